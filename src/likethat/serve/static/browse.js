// The atlas: every prototype, by class, with what is known about it.
import { classIn, debounce, make, percent, post, pretty, problemBox, progressBar, readdress, request, say, signed, title, watch } from "./dom.js";
import { small } from "./stage.js";

const KINDS = {
  mixed: ["mixed neighbours", (entry) => entry.mixed],
  unused: ["never used", (entry) => !entry.weight && !Object.keys(entry.other_weights).length],
  repeats: ["duplicates", (entry) => entry.repeats !== null],
};
const SORTS = {
  class: ["class", null],
  purity: ["purity, lowest first", (entry) => entry.purity],
  weight: ["connection, strongest first", (entry) => -entry.weight],
  moved: ["distance moved, farthest first", (entry) => -entry.moved],
};

export function card(entry, mixed = false) {
  return make("a", { class: "card", href: `/prototypes/${entry.id}` },
    make("div", { class: "pair" }, make("img", { class: "crop", src: entry.crop, alt: "", loading: "lazy" }),
      small(entry.source, entry.source_size, entry.source_box, `training picture of ${pretty(entry.class)}`)),
    make("b", {}, title(entry.id, entry.name)),
    mixed ? make("span", { class: "small" }, pretty(entry.class)) : "",
    make("span", { class: "soft small" }, entry.purity === null ? `connection ${signed(entry.weight)}` : `purity ${Math.round(100 * entry.purity)} % · connection ${signed(entry.weight)}`),
    entry.mixed ? make("span", { class: "tag" }, "mixed neighbours") : "",
    entry.repeats !== null ? make("span", { class: "tag" }, `same as ${entry.repeats}`) : "");
}

/** Offers to search for the neighbours, and shows how far that is. */
export function noAtlas({ run, signal, again }) {
  const place = make("div", { class: "hint" });
  const follow = async (state) => {
    state = await watch("/api/atlas", state, signal, (progress) => place.replaceChildren(progressBar(progress)));
    if (state.state === "done") again();
    else offer(state);
  };
  const search = async () => {
    try {
      await follow(await post(run, "/api/atlas"));
    } catch (error) {
      if (error.name !== "AbortError") place.replaceChildren(problemBox(error));
    }
  };
  const offer = (state) => place.replaceChildren(
    state.state === "failed" ? make("div", { class: "problem", role: "alert" }, state.problem) : "",
    make("span", {}, "Neighbours and purity are not known yet: nobody has searched the training and validation pictures for patches like these. "),
    make("button", { class: "button", id: "search-neighbours", onclick: search }, state.state === "failed" ? "Try again" : "Search now"));
  request("/api/atlas", { signal }).then((state) => (state.state === "working" ? follow(state) : offer(state))).catch(() => {});
  return place;
}

export async function browse(page) {
  const { main, run, query, signal } = page;
  document.title = `Browse ${run.name}`;
  const waiting = setTimeout(() => main.replaceChildren(make("h1", { class: "page-title" }, "Prototypes"),
    make("div", { class: "cards-grid", "aria-busy": "true" }, ...Array.from({ length: 12 }, () => make("div", { class: "ghost card-ghost" })))), 150);
  const { prototypes, atlas } = await request("/api/prototypes", { signal }).finally(() => clearTimeout(waiting));

  const search = make("input", { type: "search", id: "search", value: query.get("search") ?? "", placeholder: "Name of a class or prototype", autocomplete: "off" });
  const chosen = classIn(query, run);
  const classes = make("select", { id: "class" }, make("option", { value: "" }, "all classes"),
    ...run.classes.map(({ name }) => make("option", { value: name, selected: name === chosen }, pretty(name))));
  const choice = (id, options) => make("select", { id }, ...options.map(([value, text]) => make("option", { value, selected: value === query.get(id) }, text)));
  const kind = choice("show", [["", "all prototypes"], ...Object.entries(KINDS).filter(([key]) => atlas || key === "unused").map(([key, [text]]) => [key, text])]);
  const sort = choice("sort", Object.entries(SORTS).filter(([key]) => atlas || key !== "purity").map(([key, [text]]) => [key, text]));
  const count = make("output", { class: "soft" });
  const list = make("div", { class: "browse-list" });

  function update() {
    readdress({ search: search.value.trim(), class: classes.value, show: kind.value, sort: sort.value === "class" ? "" : sort.value });
    const words = search.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    const fits = (entry) => {
      const text = `${entry.class} ${pretty(entry.class)} ${entry.name ?? ""} prototype ${entry.id}`.toLowerCase();
      return (!classes.value || entry.class === classes.value) && (!kind.value || KINDS[kind.value][1](entry)) && words.every((word) => text.includes(word));
    };
    const shown = prototypes.filter(fits);
    count.textContent = `${shown.length.toLocaleString("en")} of ${prototypes.length.toLocaleString("en")}`;
    say(`${shown.length} prototypes`);
    const key = SORTS[sort.value][1];
    if (!shown.length) {
      list.replaceChildren(make("div", { class: "calm" }, make("p", {}, "No prototype matches."), make("button", { class: "button", onclick: reset }, "Show all")));
    } else if (key) {
      list.replaceChildren(make("div", { class: "cards-grid" }, ...shown.sort((a, b) => key(a) - key(b) || a.id - b.id).map((entry) => card(entry, true))));
    } else {
      const groups = Map.groupBy ? Map.groupBy(shown, (entry) => entry.class) : group(shown);
      list.replaceChildren(...[...groups].map(([name, entries]) => make("section", { class: "class-group" },
        make("h2", {}, pretty(name), make("small", { class: "soft" }, ` ${entries.length} prototype${entries.length > 1 ? "s" : ""}`)),
        make("div", { class: "cards-grid" }, ...entries.map((entry) => card(entry))))));
    }
  }

  function reset() {
    search.value = classes.value = kind.value = "";
    sort.value = "class";
    update();
    search.focus();
  }

  search.addEventListener("input", debounce(120, update));
  for (const field of [classes, kind, sort]) field.addEventListener("change", update);
  const labelled = (text, field) => make("label", { for: field.id }, make("span", {}, text), field);
  const purities = prototypes.map((entry) => entry.purity).filter((value) => value !== null);
  const fact = (name, value, note) => make("div", {}, make("dt", {}, name), make("dd", {}, value, make("small", {}, note)));
  main.replaceChildren(
    make("div", { class: "page-title" }, make("h1", {}, "Prototypes"), make("p", { class: "soft" }, "Every prototype is a part of one training picture. A picture's class is decided by how much its parts look like them, and by nothing else.")),
    atlas ? make("dl", { class: "facts" },
      fact("Purity", percent(purities.reduce((a, b) => a + b, 0) / purities.length), "of the nearest training patches are of the prototype's class"),
      fact("Mixed neighbours", String(prototypes.filter(KINDS.mixed[1]).length), "suspects for background"),
      fact("Duplicates", String(prototypes.filter(KINDS.repeats[1]).length), "repeat another prototype"),
      fact("Never used", String(prototypes.filter(KINDS.unused[1]).length), "have no connection")) : noAtlas(page),
    make("form", { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() },
      labelled("Search", search), labelled("Class", classes), labelled("Show", kind), labelled("Sort by", sort), count),
    list);
  update();
}

function group(entries) {
  const groups = new Map();
  for (const entry of entries) groups.set(entry.class, [...(groups.get(entry.class) ?? []), entry]);
  return groups;
}
