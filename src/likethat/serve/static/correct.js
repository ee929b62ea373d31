// Corrections by a person who knows the subject: what the model may look at, and what the change does to it.
import { classIn, make, percent, post, pretty, problemBox, progressBar, readdress, request, say, signed, title, watch } from "./dom.js";
import { remembered } from "./ask.js";
import { Panel } from "./panel.js";
import { small } from "./stage.js";

export async function correct(page) {
  const { main, run, signal } = page;
  document.title = `Edit ${run.name}`;
  const begun = await request("/api/edit", { signal });
  const state = await watch("/api/edit", begun, signal, (progress) => main.replaceChildren(opening(progress)));
  main.replaceChildren(state.state === "done" ? new Corrections(page, state).node : invitation(page, state));
}

function invitation(page, state) {
  const { run } = page;
  const start = make("button", { class: "button primary", onclick: async () => {
    start.disabled = true;
    try {
      await post(run, "/api/edit/open");
      page.again();
    } catch (error) {
      start.disabled = false;
      start.after(problemBox(error));
    }
  } }, state.state === "failed" ? "Try again" : "Start editing");
  return make("div", { class: "welcome" },
    make("h1", {}, "Edit what the model looks at"),
    make("p", { class: "soft" }, "You can ban a prototype that shows background, a ruler or a text mark. You can merge duplicates, name a prototype, or put another patch of its class in its place. ",
      "The last layer is solved again at once, and you see what that does to accuracy and to your picture. The run itself is never changed: your corrections are saved as a new run."),
    state.state === "failed" ? make("div", { class: "problem", role: "alert" }, make("strong", {}, "The images cannot be opened. "), state.problem) : "",
    make("div", { class: "start" }, start),
    make("p", { class: "soft small" }, "All training and validation pictures are read once before you can start."));
}

function opening({ task, done, total }) {
  return make("div", { class: "welcome", "aria-busy": "true" }, make("h1", {}, "Getting ready"), make("div", { class: "zone" }, progressBar({ task, done, total })));
}

class Corrections {
  constructor(page, state) {
    Object.assign(this, { page, state });
    const { query, run } = page;
    this.chosen = query.has("prototype") ? Number(query.get("prototype")) : null;
    this.class = classIn(query, run);
    this.picture = query.get("picture") ?? remembered()[0]?.id ?? null;
    this.bar = make("div", { class: "edit-bar" });
    this.note = make("div", { "aria-live": "polite" });
    this.list = make("div", { class: "edit-list" });
    this.panel = new Panel(this);
    this.effect = make("section", { class: "effect" });
    this.history = make("section", { class: "history", id: "history" });
    this.node = make("div", { class: "correct" }, this.bar, this.note,
      make("div", { class: "columns edit-columns" }, make("div", {}, this.tools(), this.list), make("div", { class: "edit-side" }, this.panel.node, this.effect)),
      this.history);
    if (this.chosen === null || !this.entry(this.chosen)) this.chosen = this.shown()[0]?.id ?? null;
    this.draw();
  }

  entry(id) { return this.state.prototypes.find((entry) => entry.id === id); }

  shown() {
    const suspect = (entry) => (entry.mixed ? 2 : 0) + (entry.repeats !== null ? 1 : 0);
    return this.state.prototypes.filter((entry) => !this.class || entry.class === this.class)
      .sort((a, b) => suspect(b) - suspect(a) || (a.purity ?? 1) - (b.purity ?? 1) || a.id - b.id);
  }

  /** Makes a change and shows what came of it. */
  async change(body) {
    this.node.setAttribute("aria-busy", "true");
    try {
      const state = await post(this.page.run, "/api/edit", { revision: this.state.revision, ...body });
      this.state = state;
      const last = body.kind === "undo" ? `Undone: ${state.undone[0].text}` : state.history.at(-1)?.text ?? "";
      const [before, after] = [body.kind === "undo" ? state.undone[0].after : state.history.at(-1).before, state.after];
      const entropy = `cross entropy ${before.cross_entropy.toFixed(3)} → ${after.cross_entropy.toFixed(3)}`;
      const effect = after.accuracy === before.accuracy ? `Validation accuracy is unchanged, ${entropy}.` : `Validation accuracy: ${percent(before.accuracy)} before, ${percent(after.accuracy)} after, ${entropy}.`;
      say(`${last}. ${effect}`);
      this.note.replaceChildren(make("p", { class: "done" }, make("b", {}, capital(last)), ". ", effect));
      if (!this.entry(this.chosen)) this.chosen = this.shown()[0]?.id ?? null;
      this.draw();
    } catch (error) {
      await this.refused(error);
    } finally {
      this.node.removeAttribute("aria-busy");
    }
  }

  async refused(error) {
    if (error.status === 409) this.state = await request("/api/edit");
    this.draw();
    this.note.replaceChildren(problemBox(error));
    this.note.scrollIntoView({ block: "nearest" });
  }

  choose(id) {
    this.chosen = id;
    this.draw();
    this.panel.node.scrollIntoView({ block: "nearest" });
  }

  draw() {
    readdress({ prototype: this.chosen, class: this.class, picture: this.page.query.get("picture") });
    this.drawBar();
    this.drawList();
    this.panel.draw(this.entry(this.chosen));
    this.drawEffect();
    this.drawHistory();
  }

  drawBar() {
    const { before, after, history, undone, images } = this.state;
    const gain = after.accuracy - before.accuracy;
    const change = (kind, text, list) => make("button", { class: "button", id: kind, disabled: !list.length, onclick: () => this.change({ kind }), title: list.length ? `${text}: ${(kind === "undo" ? list.at(-1) : list[0]).text}` : "" }, text);
    this.bar.replaceChildren(
      make("div", { class: "scores" },
        make("div", {}, make("span", { class: "soft small" }, "Validation before"), make("b", {}, percent(before.accuracy))),
        make("span", { class: "arrow", "aria-hidden": "true" }, "→"),
        make("div", {}, make("span", { class: "soft small" }, "now"), make("b", { class: gain < 0 ? "worse" : gain > 0 ? "better" : "" }, percent(after.accuracy))),
        make("div", { class: "soft small" }, `of ${images} images`, make("br"), `cross entropy ${before.cross_entropy.toFixed(3)} → ${after.cross_entropy.toFixed(3)}`)),
      make("div", { class: "edit-buttons" }, change("undo", "Undo", history), change("redo", "Redo", undone), this.saver()));
  }

  saver() {
    const { run } = this.page;
    const field = make("input", { type: "text", id: "save-name", value: `${run.name}-corrected`, required: true, maxlength: 64, pattern: "[A-Za-z0-9][A-Za-z0-9._ \\-]*" });
    const button = make("button", { class: "button primary" }, "Save");
    const escape = (event) => {
      if (event.key !== "Escape") return;
      save.open = false;
      save.firstChild.focus();
    };
    const save = make("details", { class: "saver", onkeydown: escape }, make("summary", { class: "button", "aria-disabled": String(!this.state.history.length) }, "Save as a new run"),
      make("form", { onsubmit: async (event) => {
        event.preventDefault();
        button.disabled = true;
        button.replaceChildren(make("span", { class: "spinner" }), "Saving…");
        try {
          const saved = await post(run, "/api/edit/save", { name: field.value, revision: this.state.revision });
          save.open = false;
          this.state.saved.push(saved);
          say(`Saved as ${saved.name}`);
          this.note.replaceChildren(make("div", { class: "done saved" }, make("b", {}, `Saved as ${saved.name}. `),
            `It was judged on ${saved.images} test images ${saved.time}: ${percent(saved.test)} are right. Look at it with `, make("code", {}, saved.command)));
          this.drawBar();
        } catch (error) {
          button.disabled = false;
          button.textContent = "Save";
          await this.refused(error);
        }
      } },
      make("label", { for: "save-name" }, "Name of the new run, beside this one"), field, button,
      make("p", { class: "soft small" }, "The run that is served stays as it is.")));
    return save;
  }

  tools() {
    const field = make("select", { id: "edit-class", onchange: () => { this.class = field.value; this.chosen = this.shown()[0]?.id ?? null; this.draw(); } },
      make("option", { value: "" }, "all classes"), ...this.page.run.classes.map(({ name }) => make("option", { value: name, selected: name === this.class }, pretty(name))));
    return make("div", { class: "edit-tools" }, make("h2", {}, "Prototypes"), make("label", { for: "edit-class", class: "soft small" }, "Class ", field));
  }

  drawList() {
    const cards = this.shown().map((entry) => make("button", { type: "button", class: entry.id === this.chosen ? "card pick chosen" : "card pick", "aria-pressed": String(entry.id === this.chosen), onclick: () => this.choose(entry.id), "data-prototype": entry.id },
      make("div", { class: "pair" }, make("img", { class: "crop", src: entry.crop, alt: "", loading: "lazy" }), small(entry.source, entry.source_size, entry.source_box, "", "5rem")),
      make("b", {}, title(entry.id, entry.name)),
      make("span", { class: "soft small" }, pretty(entry.class)),
      entry.mixed ? make("span", { class: "tag" }, `purity ${Math.round(100 * entry.purity)} %`) : "",
      entry.repeats !== null ? make("span", { class: "tag" }, `same as ${entry.repeats}`) : ""));
    const focused = this.list.contains(document.activeElement) ? document.activeElement.dataset.prototype : null;
    this.list.replaceChildren(make("div", { class: "cards-grid" }, ...cards));
    this.list.querySelector(".chosen")?.scrollIntoView({ block: "nearest" });
    if (focused) this.list.querySelector(`[data-prototype="${focused}"]`)?.focus({ preventScroll: true });
  }

  /** What the corrections change for the picture that was asked about last. */
  async drawEffect() {
    if (!this.picture) {
      this.effect.replaceChildren(make("h2", {}, "Your picture"), make("p", { class: "soft" }, make("a", { href: "/" }, "Ask about a picture"), " to see here what your corrections change for it."));
      return;
    }
    let effect;
    try {
      effect = await request(`/api/edit/effect/${encodeURIComponent(this.picture)}`);
    } catch (error) {
      this.picture = null;
      this.effect.replaceChildren(make("h2", {}, "Your picture"), make("p", { class: "soft" }, error.message));
      return;
    }
    const { before, after } = effect;
    const names = Object.keys(after.probabilities).sort((a, b) => Math.max(after.probabilities[b], before.probabilities[b]) - Math.max(after.probabilities[a], before.probabilities[a])).slice(0, 3);
    const changed = effect.points.filter((row) => Math.abs(row.after - row.before) > 0.005).slice(0, 5);
    const verdict = after.predicted === before.predicted ? `Still ${pretty(after.predicted)}` : `${pretty(before.predicted)} became ${pretty(after.predicted)}`;
    this.effect.replaceChildren(make("h2", {}, "Your picture"),
      make("div", { class: "effect-head" }, make("a", { href: `/ask/${this.picture}` }, make("img", { src: `/pictures/${this.picture}/picture.jpg`, alt: "your picture" })),
        make("div", {}, make("b", { class: after.predicted === before.predicted ? "" : "alien" }, this.state.history.length ? verdict : pretty(after.predicted)),
          make("table", {}, make("tbody", {}, ...names.map((name) => make("tr", {}, make("td", {}, pretty(name)), make("td", {}, percent(before.probabilities[name])), make("td", {}, "→"), make("td", {}, percent(after.probabilities[name])))))))),
      changed.length ? make("div", {}, make("p", { class: "soft small" }, `Points for ${pretty(effect.class)} that changed most`),
        make("table", {}, make("tbody", {}, ...changed.map((row) => make("tr", {}, make("td", {}, title(row.prototype, row.name)), make("td", {}, signed(row.before)), make("td", {}, "→"), make("td", {}, signed(row.after))))))) : "");
  }

  drawHistory() {
    const { history, undone, earlier, saved } = this.state;
    const line = (edit, kind) => make("li", { class: kind },
      make("span", { class: "what-done" }, make("b", {}, capital(edit.text)), edit.why ? `: ${edit.why}` : ""), kind === "undone" ? " undone" : "",
      make("div", { class: "soft small" }, [edit.who, new Date(edit.when).toLocaleString(), `validation ${percent(edit.before.accuracy)} → ${percent(edit.after.accuracy)}`].filter(Boolean).join(" · ")));
    const lines = [...earlier.map((edit) => line(edit, "earlier")), ...history.map((edit) => line(edit, "")), ...undone.map((edit) => line(edit, "undone"))];
    this.history.replaceChildren(make("h2", {}, "History"),
      lines.length ? make("ol", {}, ...lines.reverse()) : make("p", { class: "soft" }, "Nothing has been corrected yet. Every correction will be listed here with who, when and why, and is written into ", make("code", {}, "edits.jsonl"), " of the saved run."),
      saved.length ? make("p", { class: "soft" }, "Saved: ", saved.map(({ path }) => path).join(", ")) : "");
  }
}

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
