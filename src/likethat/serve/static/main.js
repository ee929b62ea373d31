// The frame around the pages: which address shows which page, and links that do not reload.
import { make, problemBox, request } from "./dom.js";
import { ask } from "./ask.js";
import { result } from "./result.js";
import { browse } from "./browse.js";
import { prototype } from "./prototype.js";
import { correct } from "./correct.js";
import { api } from "./api.js";

const PAGES = [
  [/^\/$/, "ask", ask],
  [/^\/ask\/([^/]+)$/, "ask", result],
  [/^\/browse$/, "browse", browse],
  [/^\/prototypes\/(\d+)$/, "browse", prototype],
  [/^\/correct$/, "correct", correct],
  [/^\/api$/, "api", api],
];
const main = document.getElementById("main");
const TOP = "top";
let run = null;
let leave = null; // ends what the page that is shown has started

/** Shows the page of the address. `focus` says where the keyboard goes on: a selector, or the top of a new page. */
async function show(focus = null) {
  leave?.abort();
  leave = new AbortController();
  const { signal } = leave;
  const [page, name, parts] = PAGES.map(([pattern, name, page]) => [page, name, location.pathname.match(pattern)])
    .find(([, , found]) => found) ?? [lost, "", [""]];
  for (const link of document.querySelectorAll("[data-page]")) {
    if (link.dataset.page === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  try {
    if (!run) {
      run = await request("/api/run");
      document.getElementById("run-name").textContent = run.name;
    }
    await page({ main, run, part: decodeURIComponent(parts[1] ?? ""), query: new URLSearchParams(location.search), signal, go, again: () => show(TOP) });
  } catch (error) {
    if (error.name === "AbortError" || signal.aborted) return;
    if (!(error.status >= 0)) console.error(error);
    document.title = "likethat: not shown";
    main.replaceChildren(make("div", { class: "calm" },
      make("h1", {}, error.status === 404 ? "Nothing here any more" : "This page cannot be shown"),
      problemBox(error),
      make("p", {}, make("a", { class: "button", href: "/" }, "Ask about a picture"), " ",
        make("button", { class: "button", onclick: () => show(TOP) }, "Try again"))));
  }
  if (signal.aborted) return;
  if (focus === TOP) {
    main.focus({ preventScroll: true });
    scrollTo(0, 0);
  } else if (focus) main.querySelector(focus)?.focus({ preventScroll: true });
}

/** Where the keyboard is, in words that still hold when the page has been drawn anew. */
function place() {
  const active = document.activeElement;
  if (active.id) return `#${active.id}`;
  return active.closest(".classes") ? ".classes a[aria-current]" : active.closest(".pledge") ? ".pledge select" : null;
}

function lost() {
  main.replaceChildren(make("div", { class: "calm" }, make("h1", {}, "There is no such page"),
    make("p", {}, make("a", { class: "button", href: "/" }, "Ask about a picture"))));
}

/** To another address of this application. One that differs in its parameters only keeps its place on the screen. */
export function go(href, state = null) {
  const same = new URL(href, location).pathname === location.pathname;
  history.pushState(state, "", href);
  show(same ? place() : TOP);
}

addEventListener("popstate", () => show());
addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href]");
  if (!link || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
  if (link.origin !== location.origin || link.hasAttribute("download") || link.target || link.getAttribute("href").startsWith("#")) return;
  if (!PAGES.some(([pattern]) => pattern.test(link.pathname))) return;
  event.preventDefault();
  go(link.href);
});
show();
