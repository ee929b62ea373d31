// One prototype: where it comes from, what it is connected to, and which patches are nearest to it.
import { address, make, pretty, request, signed, title } from "./dom.js";
import { Stage, small } from "./stage.js";
import { card, noAtlas } from "./browse.js";

function strip(name, neighbours, own) {
  if (!neighbours?.length) return "";
  const same = neighbours.filter((neighbour) => neighbour.class === own).length;
  return make("section", { class: "neighbours" },
    make("h2", {}, `Nearest ${name} pictures`, make("small", { class: "soft" }, ` ${same} of ${neighbours.length} are of its class`)),
    make("ol", {}, ...neighbours.map((neighbour) => {
      const other = neighbour.class !== own;
      const image = small(neighbour.picture, [4, 3], neighbour.share, neighbour.path, "9rem");
      // The pictures tell their own shape; until they do, they have that of most photographs.
      image.firstChild.addEventListener("load", ({ target }) => {
        image.style.aspectRatio = `${target.naturalWidth} / ${target.naturalHeight}`;
        image.style.maxWidth = `calc(9rem * ${target.naturalWidth / target.naturalHeight})`;
      });
      return make("li", { class: other ? "other" : "" }, image,
        make("span", {}, make("b", {}, signed(neighbour.similarity)), " ", make("span", { class: other ? "alien" : "" }, other ? `≠ ${pretty(neighbour.class)}` : pretty(neighbour.class))));
    })));
}

export async function prototype(page) {
  const { main, run, part, signal } = page;
  const [entry, { prototypes: siblings }] = await request(`/api/prototypes/${part}`, { signal })
    .then(async (entry) => [entry, await request(address("/api/prototypes", { class: entry.class }), { signal })]);
  document.title = `${title(entry.id, entry.name)} of ${pretty(entry.class)} – ${run.name}`;
  const source = new Stage(entry.source, entry.source_size, `training picture ${entry.path}`, "min(24rem, 55vh)");
  source.box(entry.source_box);
  const others = Object.entries(entry.other_weights).sort(([, a], [, b]) => Math.abs(b) - Math.abs(a));
  const facts = [
    ["Class", make("a", { href: address("/browse", { class: entry.class }) }, pretty(entry.class))],
    ["Connection to it", signed(entry.weight)],
    ...others.slice(0, 5).map(([name, weight]) => [`to ${pretty(name)}`, signed(weight)]),
    others.length > 5 ? [`to ${others.length - 5} more`, "weaker"] : null,
    entry.purity === null ? null : ["Purity", `${Math.round(100 * entry.purity)} %${entry.mixed ? " (mixed neighbours)" : ""}`],
    entry.leads === null ? null : ["Leads", entry.leads ? `in ${entry.leads} picture${entry.leads > 1 ? "s" : ""}` : "nowhere"],
    entry.repeats === null ? null : ["Same as", make("a", { href: `/prototypes/${entry.repeats}` }, `prototype ${entry.repeats}`)],
    ["Moved at projection", entry.moved.toFixed(3)],
    ["Training picture", entry.path],
  ].filter(Boolean);
  const step = (id, text, rel) => (id >= 0 && id < run.prototypes ? make("a", { class: "button", href: `/prototypes/${id}`, rel }, text) : "");
  main.replaceChildren(
    make("div", { class: "crumbs" }, make("a", { href: "/browse" }, "Prototypes"), " / ", make("a", { href: address("/browse", { class: entry.class }) }, pretty(entry.class)),
      make("span", { class: "steps" }, step(entry.id - 1, "← Previous", "prev"), step(entry.id + 1, "Next →", "next"))),
    make("div", { class: "one-prototype" },
      make("figure", {}, source.node, make("figcaption", {}, "The training picture, with the prototype lit")),
      make("div", {},
        make("p", { class: "soft" }, `A part of ${pretty(entry.class)}`),
        make("h1", {}, title(entry.id, entry.name)),
        make("p", {}, make("a", { class: "button", href: `/correct?prototype=${entry.id}` }, "Edit this prototype")),
        make("img", { class: "crop-large", src: entry.crop, alt: "the patch alone" }),
        make("dl", { class: "told" }, ...facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)])))),
    entry.train ? [strip("training", entry.train, entry.class), strip("validation", entry.val, entry.class)].reduce((all, one) => { all.append(one); return all; }, document.createDocumentFragment()) : noAtlas(page),
    siblings.length > 1 ? make("section", { class: "class-group" }, make("h2", {}, `Other prototypes of ${pretty(entry.class)}`),
      make("div", { class: "cards-grid" }, ...siblings.filter(({ id }) => id !== entry.id).map((other) => card(other)))) : "");
}
