// Parts of the picture that the reader hides: the list of them, drawing new ones, and asking what becomes of the points.
import { make, percent, pretty, request, signed } from "./dom.js";

const LEAST = 0.02; // of the picture's side: a shorter drag is a click

const rounded = (value, digits) => Number(value.toFixed(digits));
const written = (box) => box.map((value) => rounded(value, 8)).join(","); // less than a pixel of the largest picture
export const near = (a, b, most = 1e-3) => a.every((value, number) => Math.abs(value - b[number]) < most);

export class Hidden {
  /** `ask(boxes)` gives the address of the answer; `show()` is called when there is another one, or a draft of one. */
  constructor(texts, most, ask, show, signal) {
    Object.assign(this, { most, ask, show, signal });
    this.boxes = texts.map((text) => text.split(",").map(Number)).filter((box) => box.length === 4 && box.every(Number.isFinite));
    this.draft = null;
    this.after = null; // what the server said about the boxes
    this.problem = null;
    this.busy = false;
  }

  get texts() { return this.boxes.map(written); }
  get all() { return this.draft ? [...this.boxes, this.draft] : this.boxes; }
  get full() { return this.boxes.length >= this.most; }
  has(box) { return this.boxes.some((other) => near(box, other)); }

  set(boxes) {
    this.boxes = boxes;
    this.draft = null;
    return this.refresh();
  }

  add(box) { return this.full || this.has(box) ? this.refresh() : this.set([...this.boxes, box]); }
  toggle(box) { return this.has(box) ? this.set(this.boxes.filter((other) => !near(box, other))) : this.add(box); }
  undo() { return this.set(this.boxes.slice(0, -1)); }
  clear() { return this.set([]); }

  /** One request at a time. What changed meanwhile is asked when it has come back, so that the points keep up with the pointer. */
  async refresh() {
    this.show();
    if (this.busy) return;
    this.busy = true;
    try {
      for (let asked = null; asked !== String(this.all.map(written));) {
        asked = String(this.all.map(written));
        this.after = this.all.length ? await request(this.ask(this.all.map(written)), { signal: this.signal }) : null;
        this.problem = null;
        this.show();
      }
    } catch (error) {
      if (error.name === "AbortError") return;
      this.after = null;
      this.problem = error;
      this.show();
    } finally {
      this.busy = false;
    }
  }

  /** Lets the reader draw rectangles on a picture with mouse, pen or finger. */
  drawOn(node) {
    node.classList.add("drawable");
    let start = null;
    const place = ({ clientX, clientY }) => {
      const { left, top, width, height } = node.getBoundingClientRect();
      return [(clientX - left) / width, (clientY - top) / height].map((value) => rounded(Math.min(1, Math.max(0, value)), 3));
    };
    const box = ([x, y]) => [Math.min(x, start[0]), Math.min(y, start[1]), Math.max(x, start[0]), Math.max(y, start[1])];
    const large = ([x0, y0, x1, y1]) => x1 - x0 >= LEAST && y1 - y0 >= LEAST;
    node.addEventListener("dragstart", (event) => event.preventDefault());
    node.addEventListener("pointerdown", (event) => {
      if (event.button || this.full) return;
      start = place(event);
      node.setPointerCapture(event.pointerId);
      event.preventDefault();
    });
    node.addEventListener("pointermove", (event) => {
      if (!start) return;
      const drawn = box(place(event));
      this.draft = large(drawn) ? drawn : null;
      this.refresh();
    });
    const end = (keep) => (event) => {
      if (!start) return;
      const drawn = box(place(event));
      start = null;
      this.draft = null;
      if (keep && large(drawn)) this.add(drawn);
      else this.refresh();
    };
    node.addEventListener("pointerup", end(true));
    node.addEventListener("pointercancel", end(false));
  }

  /** What lies on the picture: rectangles in the colour that the model saw. */
  cover() {
    return make("div", { class: "covers", "aria-hidden": "true" }, ...this.all.map(([x0, y0, x1, y1]) => {
      const part = make("i");
      Object.assign(part.style, { left: `${100 * x0}%`, top: `${100 * y0}%`, width: `${100 * (x1 - x0)}%`, height: `${100 * (y1 - y0)}%`, backgroundColor: this.after?.colour ?? "#808080" });
      return part;
    }));
  }

  /** Whether the answer is another one without the hidden parts. */
  outcome({ ranking: [best] }) {
    const { after, all } = this;
    if (!after) return "";
    const same = after.predicted === best.name, rest = after.ranking.find(({ name }) => name === best.name), winner = after.ranking[0];
    const parts = `With ${all.length === 1 ? "this part" : `these ${all.length} parts`} hidden `;
    const change = `${percent(best.probability)} → ${percent(rest.probability)}, ${signed(best.logit)} → ${signed(rest.logit)} points`;
    return same
      ? make("p", { class: "outcome" }, parts, "the answer stays ", make("b", {}, pretty(best.name)), ` (${change}).`)
      : make("p", { class: "outcome changed" }, parts, "the answer changes to ", make("b", {}, pretty(winner.name)), ` (${percent(winner.probability)}). ${pretty(best.name)}: ${change}.`);
  }

  /** What stands below the picture: how to hide a part or, where parts are hidden, what came of it and the way back. */
  tools(outcome) {
    if (!this.all.length) return [make("p", { class: "soft small" }, "Test it: ", make("b", {}, "drag over a part of your picture"), " to hide it, or hide the part of a line. Points that stay did not come from there.")];
    return [outcome,
      make("div", { class: "hiding-buttons" },
        make("button", { type: "button", class: "button", id: "undo-hiding", onclick: () => this.undo() }, "Undo"),
        make("button", { type: "button", class: "button", id: "clear-hiding", onclick: () => this.clear() }, "Show all again")),
      make("p", { class: "soft small" }, "Hidden parts have the mean colour of the rest. Nothing of what lies under them reaches the model; their edges do, and may look like something themselves.")];
  }
}
