// What can be done about one prototype: ban it, name it, merge others into it, put another patch in its place.
import { make, pretty, problemBox, request, signed, title } from "./dom.js";
import { Stage, small } from "./stage.js";

const REASONS = ["background", "ruler or scale", "text mark", "hand or tool", "wrong part"];
const WHO = "likethat-who"; // remembered in this browser

export class Panel {
  constructor(page) {
    this.page = page;
    this.node = make("section", { class: "panel", "aria-label": "The chosen prototype" });
    this.why = make("input", { type: "text", id: "why", maxlength: 300, placeholder: "for example: shows the branch, not the bird", list: "reasons" });
    this.who = make("input", { type: "text", id: "who", maxlength: 100, autocomplete: "name", required: true, value: localStorage.getItem(WHO) ?? "" });
    this.who.addEventListener("change", () => localStorage.setItem(WHO, this.who.value.trim()));
  }

  /** A change to the shown prototype, with its reasons. */
  do(kind, more = {}) {
    if (!this.who.value.trim()) {
      this.who.setCustomValidity("Say who you are: corrections are kept with a name.");
      this.who.reportValidity();
      this.who.addEventListener("input", () => this.who.setCustomValidity(""), { once: true });
      return;
    }
    const why = this.why.value.trim();
    this.why.value = "";
    this.page.change({ kind, prototypes: [this.entry.id], who: this.who.value.trim(), why, ...more });
  }

  draw(entry) {
    this.entry = entry;
    if (!entry) {
      this.node.replaceChildren(make("p", { class: "soft" }, "Choose a prototype."));
      return;
    }
    const source = new Stage(entry.source, entry.source_size, `training picture of ${pretty(entry.class)}`, "15rem");
    source.box(entry.source_box);
    const name = make("input", { type: "text", id: "name", maxlength: 100, value: entry.name ?? "", placeholder: "for example: red crown" });
    this.node.replaceChildren(
      make("div", { class: "panel-head" }, source.node,
        make("div", {}, make("p", { class: "soft" }, pretty(entry.class)), make("h2", {}, title(entry.id, entry.name)),
          make("p", { class: "soft small" }, `Connection ${signed(entry.weight)}`, entry.purity === null ? "" : `, purity ${Math.round(100 * entry.purity)} %`, make("br"), make("a", { href: `/prototypes/${entry.id}` }, "Its neighbours")))),
      make("div", { class: "panel-fields" },
        make("label", { for: "who" }, "Who corrects"), this.who,
        make("label", { for: "why" }, "Why"), this.why,
        make("div", { class: "chips reasons" }, ...REASONS.map((reason) => make("button", { type: "button", class: "button", onclick: () => { this.why.value = reason; this.why.focus(); } }, reason)))),
      make("button", { class: "button danger", id: "ban", onclick: () => this.do("ban") }, `Ban prototype ${entry.id}`),
      make("form", { class: "inline", onsubmit: (event) => { event.preventDefault(); this.do("name", { text: name.value }); } },
        make("label", { for: "name" }, "Call it"), name, make("button", { class: "button" }, "Name")),
      this.merger(entry), this.replacer(entry));
  }

  merger(entry) {
    const others = this.page.state.prototypes.filter((other) => other.class === entry.class && other.id !== entry.id);
    const picked = new Set();
    const button = make("button", { class: "button", disabled: true, onclick: () => this.do("merge", { prototypes: [entry.id, ...picked] }) }, "Merge");
    const tick = (other, on) => {
      if (on) picked.add(other.id);
      else picked.delete(other.id);
      button.disabled = !picked.size;
      button.textContent = picked.size ? `Merge ${[...picked].join(", ")} into ${entry.id}` : "Merge";
    };
    return make("details", {}, make("summary", {}, "Merge duplicates into it"),
      others.length ? [make("div", { class: "choices" }, ...others.map((other) => make("label", { class: "choice" },
        make("input", { type: "checkbox", value: other.id, onchange: (event) => tick(other, event.target.checked) }),
        make("img", { src: other.crop, alt: "", loading: "lazy" }), make("span", {}, title(other.id, other.name))))), button]
        : make("p", { class: "soft small" }, "It is the only prototype of its class."));
  }

  replacer(entry) {
    const place = make("div", { class: "choices", "aria-live": "polite" });
    const details = make("details", { id: "replace" }, make("summary", {}, "Take another patch of the class instead"), place);
    details.addEventListener("toggle", async () => {
      if (!details.open || place.childElementCount) return;
      place.replaceChildren(make("p", { class: "soft" }, make("span", { class: "spinner" }), "Looking for patches…"));
      try {
        const candidates = await request(`/api/edit/candidates/${entry.id}`);
        place.replaceChildren(...candidates.map((found) => {
          const picture = small(found.picture, [4, 3], found.share, found.path, "7rem");
          picture.firstChild.addEventListener("load", ({ target }) => { picture.style.aspectRatio = `${target.naturalWidth} / ${target.naturalHeight}`; });
          return make("button", { type: "button", class: "choice", onclick: () => this.do("replace", { candidate: found.candidate }) }, picture,
            make("span", {}, "Use this patch"), make("small", { class: "soft" }, `own class ${signed(found.own)}, ${pretty(found.other_class)} ${signed(found.other)}`));
        }), candidates.length ? "" : make("p", { class: "soft" }, "The class has no other patches."));
      } catch (error) {
        place.replaceChildren(problemBox(error));
      }
    });
    return details;
  }
}
