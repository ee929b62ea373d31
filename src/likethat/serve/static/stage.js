// A picture with what lies on it: a lit box, an activation map, or the raw grid of similarities.
import { make } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";

function svgElement(tag, attributes) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

/** Dims all but the box, which is in shares of the picture. */
export function lit([x0, y0, x1, y1]) {
  const svg = svgElement("svg", { viewBox: "0 0 1 1", preserveAspectRatio: "none", class: "lit", "aria-hidden": "true" });
  svg.append(
    svgElement("path", { class: "dim", "fill-rule": "evenodd", d: `M0 0H1V1H0ZM${x0} ${y0}H${x1}V${y1}H${x0}Z` }),
    svgElement("rect", { class: "box-dark", x: x0, y: y0, width: x1 - x0, height: y1 - y0 }),
    svgElement("rect", { class: "box-light", x: x0, y: y0, width: x1 - x0, height: y1 - y0 }));
  return svg;
}

function boxOnly(box) {
  const svg = lit(box);
  svg.firstChild.remove();
  return svg;
}

function grid(map, colours) {
  const values = map.flat(), low = Math.min(...values), span = Math.max(...values) - low || 1;
  const table = make("div", { class: "cells", "aria-hidden": "true" });
  table.style.gridTemplateColumns = `repeat(${map[0].length}, 1fr)`;
  const numbers = map[0].length <= 10;
  for (const value of values) {
    const share = (value - low) / span;
    const cell = make("i", { title: value.toFixed(3), class: share > 0.55 ? "hot" : "" }, numbers ? value.toFixed(2).replace(/^0/, "") : "");
    cell.style.backgroundColor = colours[Math.round(share * (colours.length - 1))];
    table.append(cell);
  }
  return table;
}

/** A frame that keeps the picture's proportions and fits what lies on it. */
export class Stage {
  constructor(src, [width, height], alt, tall) {
    this.image = make("img", { src, alt, width, height });
    this.node = make("div", { class: "stage" }, this.image);
    this.resize(width, height, tall);
  }

  resize(width, height, tall = this.tall) {
    this.tall = tall;
    this.node.style.aspectRatio = `${width} / ${height}`;
    this.node.style.maxWidth = `calc(${tall} * ${width / height})`;
  }

  picture(src, [width, height], alt) {
    if (this.image.getAttribute("src") !== src) this.image.src = src;
    this.image.alt = alt;
    this.resize(width, height);
  }

  clear() {
    this.node.replaceChildren(this.image, ...(this.over ? [this.over] : []));
    this.image.classList.remove("subdued");
  }

  /** Lays something on the picture, below boxes and maps, which stays until something else is laid there. */
  cover(over) {
    this.over?.remove();
    this.over = over;
    this.image.after(over);
  }

  box(share) {
    this.clear();
    this.node.append(lit(share));
  }

  outline(share) {
    this.clear();
    this.node.append(boxOnly(share));
  }

  /** A second box: where the prototype finds its part now. */
  moved(share) {
    const svg = boxOnly(share);
    svg.classList.add("moved");
    this.node.append(svg);
  }

  heat(src, share) {
    this.clear();
    this.image.classList.add("subdued");
    this.node.append(make("img", { class: "heat", src, alt: "" }), boxOnly(share));
  }

  grid(map, colours) {
    this.clear();
    this.image.classList.add("subdued");
    this.node.append(grid(map, colours));
  }
}

/** The part of a picture inside a box, by itself. */
export function cut(src, [width, height], [x0, y0, x1, y1]) {
  const part = [x0 * width, y0 * height, (x1 - x0) * width, (y1 - y0) * height];
  const svg = svgElement("svg", { viewBox: part.join(" "), preserveAspectRatio: "xMidYMid slice", class: "cut", "aria-hidden": "true" });
  svg.append(svgElement("image", { href: src, width, height, preserveAspectRatio: "none" }));
  return svg;
}

/** A small picture with its box, for lists. */
export function small(src, [width, height], share, alt, tall = "6.5rem") {
  const stage = new Stage(src, [width, height], alt, tall);
  stage.image.loading = "lazy";
  if (share) stage.node.append(boxOnly(share));
  return stage.node;
}
