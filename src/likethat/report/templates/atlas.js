"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const combined = data.prototypes.some((prototype) => prototype.member > 0);
const list = document.getElementById("list"), tools = document.getElementById("tools");

function make(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function shot(file, width, height, text, box) {
  const image = make("img", { src: file, alt: text, title: text, loading: "lazy", decoding: "async" });
  if (width) { image.width = width; image.height = height; }
  const frame = make("div", { class: box ? "shot" : "shot crop" }, image);
  if (box) {
    const [x, y, w, h] = box.map((value) => value / 10 + "%");
    frame.append(make("i", { style: `left:${x};top:${y};width:${w};height:${h}` }));
  }
  return frame;
}

function tile(prototype, [number, similarity, box]) {
  const [file, width, height, label, path] = data.pictures[number];
  const other = label !== prototype.label;
  const name = make("span", { title: data.classes[label], class: other ? "alien" : "" }, (other ? "≠ " : "") + data.classes[label]);
  return make("figure", { class: other ? "tile other" : "tile" },
    make("div", { class: "frame" }, shot(file, width, height, path, box)),
    make("figcaption", {}, make("span", {}, similarity.toFixed(2)), name));
}

function strip(prototype, title, neighbours, purity) {
  if (!neighbours.length) return "";
  const own = Math.round(purity * neighbours.length);
  return make("div", { class: "strip" },
    make("h4", {}, `Nearest ${title} pictures: ${own} of ${neighbours.length} of its class`),
    make("div", { class: "tiles" }, ...neighbours.map((neighbour) => tile(prototype, neighbour))));
}

function pictures(count) { return count + (count === 1 ? " picture" : " pictures"); }

function fill(node, prototype) {
  const [number, box] = prototype.source;
  const [file, width, height, , path] = data.pictures[number];
  const tags = [];
  if (prototype.mixed) tags.push(make("span", { class: "tag" }, "mixed neighbours"));
  if (KINDS.unused(prototype)) tags.push(make("span", { class: "tag" }, "never used"));
  if (prototype.repeats !== null) {
    tags.push(make("a", { class: "tag", href: "#p" + prototype.repeats }, "same as prototype " + prototype.repeats));
  }
  const facts = [
    ["Purity", Math.round(100 * prototype.purity) + " %"],
    ["Connection", prototype.weight.toFixed(2)],
    ["Moved", prototype.moved.toFixed(3)],
    ["Leads", prototype.leads ? "in " + pictures(prototype.leads) : "nowhere"],
  ];
  for (const [label, weight] of prototype.others) facts.push(["to " + data.classes[label], weight.toFixed(2).replace("-", "−")]);
  if (prototype.furtherOthers) facts.push([`to ${prototype.furtherOthers} more`, "weaker"]);
  node.append(
    make("div", {},
      make("div", { class: "pair" },
        shot(`pictures/p${prototype.id}.webp`, 0, 0, prototype.title),
        shot(file, width, height, path, box)),
      make("h3", {}, data.classes[prototype.label], make("small", {}, `${prototype.title}${combined ? ", network " + (prototype.member + 1) : ""}`)),
      ...tags,
      make("dl", {}, ...facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]))),
    make("div", {},
      strip(prototype, "training", prototype.train, prototype.purity),
      strip(prototype, "validation", prototype.val, prototype.valPurity)));
}

// A card is empty until it comes near the window, so thousands of them cost little.
const waiting = new WeakMap();
const observer = new IntersectionObserver((seen) => {
  for (const { isIntersecting, target } of seen) {
    if (!isIntersecting) continue;
    observer.unobserve(target);
    fill(target, waiting.get(target));
  }
}, { rootMargin: "1200px 0px" });

const cards = data.prototypes.map((prototype) => {
  const node = make("li", { class: "proto", id: "p" + prototype.id });
  waiting.set(node, prototype);
  observer.observe(node);
  return { node, prototype };
});

const KINDS = {
  mixed: (prototype) => prototype.mixed,
  unused: (prototype) => !prototype.weight && !prototype.others.length,
  follows: (prototype) => !prototype.leads,
  repeats: (prototype) => prototype.repeats !== null,
};
const RANGES = [["purity", 100], ["weight", 1], ["moved", 1]];

function chosen(prototype) {
  const { label, kind } = tools.elements;
  if (label.value !== "" && prototype.label !== Number(label.value)) return false;
  if (kind.value && !KINDS[kind.value](prototype)) return false;
  return RANGES.every(([field, scale]) => {
    const low = tools.elements[field + "-min"].valueAsNumber, high = tools.elements[field + "-max"].valueAsNumber;
    const value = scale * prototype[field];
    return !(value < low - 1e-9) && !(value > high + 1e-9);  // an empty field is NaN and excludes nothing
  });
}

function update() {
  const shown = cards.filter(({ prototype }) => chosen(prototype));
  const sort = tools.elements.sort.value, field = sort.replace("-", "");
  const sign = sort.startsWith("-") ? -1 : 1;
  const key = ({ prototype }) => field === "class" ? prototype.label : sign * prototype[field];
  shown.sort((a, b) => key(a) - key(b) || a.prototype.id - b.prototype.id);
  const nodes = [];
  let label = null;
  for (const { node, prototype } of shown) {
    if (field === "class" && prototype.label !== label) {
      label = prototype.label;
      nodes.push(make("li", { class: "group" }, data.classes[label]));
    }
    nodes.push(node);
  }
  if (!nodes.length) nodes.push(make("li", { class: "none" }, "No prototype is like that."));
  list.replaceChildren(...nodes);
  document.getElementById("count").value = `${shown.length.toLocaleString("en")} of ${cards.length.toLocaleString("en")}`;
}

tools.addEventListener("input", update);
tools.addEventListener("submit", (event) => event.preventDefault());
tools.addEventListener("reset", () => setTimeout(update));
// A link to a prototype that the filters hide shows all of them again.
addEventListener("hashchange", () => {
  const target = location.hash.slice(1);
  if (!target || document.getElementById(target)) return;
  tools.reset();
  setTimeout(() => document.getElementById(target)?.scrollIntoView(), 50);
});
update();
if (location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView();
