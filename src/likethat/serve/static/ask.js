// The page that asks for pictures, and how they get to the server from any page.
import { address, make, pretty, problemBox, request, say } from "./dom.js";

const SESSION = "likethat-pictures"; // of this tab: the pictures that were asked about, newest first

export function remembered() {
  try {
    return JSON.parse(sessionStorage.getItem(SESSION)) ?? [];
  } catch {
    return [];
  }
}

export function forget(id) {
  sessionStorage.setItem(SESSION, JSON.stringify(remembered().filter((picture) => picture.id !== id)));
}

/** Sends pictures; gives their ids, and what could not be read. */
async function send(files, run) {
  if (files.length > run.limits.files) throw new Error(`At most ${run.limits.files} pictures can be asked about at once; these are ${files.length}.`);
  const large = files.find((file) => file.size > run.limits.bytes);
  if (large) throw new Error(`${large.name} has ${(large.size / 1e6).toFixed(0)} MB; at most ${run.limits.bytes / 1e6} are taken. Send a smaller picture.`);
  const form = new FormData();
  for (const file of files) form.append("file", file, file.name || "pasted picture");
  const answer = await request("/api/pictures", { method: "POST", body: form });
  sessionStorage.setItem(SESSION, JSON.stringify([...answer.pictures, ...remembered()].slice(0, 30)));
  return answer;
}

/** The states of the place where pictures are dropped: waiting, busy, refused. */
export function dropZone({ run, go, signal }, compact = false) {
  const input = make("input", { type: "file", accept: "image/*,.tif,.tiff,.heic,.avif,.dcm,.dicom", multiple: true, class: "unseen", id: "choose", onchange: () => take([...input.files]) });
  const note = make("div", { class: "zone-note" });
  const label = make("label", { class: "button primary", for: "choose" }, compact ? "Another picture" : "Choose pictures");
  const zone = make("div", { class: compact ? "zone compact" : "zone" },
    !compact && [make("div", { class: "zone-mark", "aria-hidden": "true" }, make("i"), make("b")),
      make("p", { class: "zone-title" }, "Drop a picture here, or paste one")],
    make("div", { class: "zone-choose" }, input, label), note);

  async function take(files) {
    if (!files.length) return;
    zone.classList.add("busy");
    zone.setAttribute("aria-busy", "true");
    say("Looking at the picture");
    note.replaceChildren(make("span", { class: "spinner" }), files.length > 1 ? `Looking at ${files.length} pictures…` : "Looking…");
    try {
      const { pictures, skipped } = await send(files, run);
      if (!signal.aborted) go(`/ask/${pictures[0].id}`, { skipped });
    } catch (error) {
      say(error.message);
      note.replaceChildren(problemBox(error));
    } finally {
      input.value = "";
      zone.classList.remove("busy");
      zone.removeAttribute("aria-busy");
    }
  }

  let depth = 0; // entering a child leaves its parent
  const listen = (name, action) => addEventListener(name, action, { signal });
  const carries = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  listen("dragenter", (event) => { if (carries(event)) { depth += 1; document.body.classList.add("dropping"); } });
  listen("dragleave", (event) => { if (carries(event) && (depth -= 1) <= 0) { depth = 0; document.body.classList.remove("dropping"); } });
  listen("dragover", (event) => { if (carries(event)) event.preventDefault(); });
  listen("drop", (event) => {
    if (!carries(event)) return;
    event.preventDefault();
    depth = 0;
    document.body.classList.remove("dropping");
    take([...event.dataTransfer.files]);
  });
  listen("paste", (event) => {
    const files = [...(event.clipboardData?.files ?? [])];
    if (files.length) take(files);
  });
  signal.addEventListener("abort", () => document.body.classList.remove("dropping"));
  return zone;
}

export async function ask(page) {
  const { main, run } = page;
  document.title = `Ask ${run.name}`;
  const most = 24, classes = run.classes.slice(0, most);
  main.replaceChildren(
    make("div", { class: "welcome" },
      make("h1", {}, "What does this picture look like?"),
      make("p", { class: "soft" }, "The answer comes with its reasons: which parts of your picture look like which parts of training pictures."),
      dropZone(page),
      make("p", { class: "soft small" }, `JPEG, PNG, WebP, GIF, BMP or TIFF, up to ${run.limits.bytes / 1e6} MB each. `,
        `Pictures stay in the memory of the computer that runs likethat for ${run.limits.minutes} minutes and are never written to disk by name.`)),
    make("section", { class: "knows" },
      make("h2", {}, `It knows ${run.classes.length} classes by ${run.prototypes} prototypes`),
      make("ul", { class: "chips" },
        ...classes.map(({ name, prototypes }) => make("li", {}, make("a", { href: address("/browse", { class: name }) }, pretty(name), make("small", {}, String(prototypes))))),
        run.classes.length > most && make("li", {}, make("a", { href: "/browse" }, `and ${run.classes.length - most} more`)))));
}

/** The pictures of this session, to go from one to another. */
export function filmstrip(current) {
  const pictures = remembered();
  if (pictures.length < 2) return "";
  return make("ul", { class: "film", "aria-label": "Pictures of this session" }, ...pictures.map(({ id, name, picture }) => {
    const image = make("img", { src: picture, alt: name || "picture", loading: "lazy" });
    const link = make("a", { href: `/ask/${id}`, title: name, "aria-current": id === current ? "page" : false }, image);
    image.addEventListener("error", () => { forget(id); link.parentNode?.remove(); });
    return make("li", {}, link);
  }));
}
