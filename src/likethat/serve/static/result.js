// The answer about one picture: what it looks like, and why.
import { address, debounce, make, percent, pretty, problemBox, readdress, request, say, signed, title } from "./dom.js";
import { dropZone, forget, remembered } from "./ask.js";
import { Stage, small } from "./stage.js";

const TALL = "min(21rem, 46vh)";
const MODES = [["box", "Box"], ["heat", "Map"], ["grid", "Raw grid"]];

export async function result(page) {
  const { main, run, part: id, query, signal } = page;
  const asked = { class: query.get("class"), against: query.get("against"), percentile: query.get("percentile"), level: query.get("level"), attribution: query.get("attribution"), prototype: query.get("prototype"), view: query.get("view") };
  const load = () => request(address(`/api/pictures/${encodeURIComponent(id)}`, asking(asked)), { signal });
  const before = main.querySelector(`[data-picture="${CSS.escape(id)}"]`); // the same picture, asked something else
  before?.setAttribute("aria-busy", "true");
  const waiting = setTimeout(() => { if (!before) main.replaceChildren(loading(id)); }, 150);
  let answer;
  try {
    answer = await load();
  } catch (error) {
    if (error.status === 404) forget(id);
    throw error;
  } finally {
    clearTimeout(waiting);
  }
  const skipped = history.state?.skipped ?? [];
  const view = new View(page, asked, answer, load);
  main.replaceChildren(
    filmstrip(id),
    skipped.length ? make("div", { class: "problem", role: "alert" }, ...skipped.map(({ path, reason }) => make("div", {}, make("strong", {}, path), `: ${reason}`))) : "",
    view.node);
  document.title = `${pretty(answer.predicted)} – likethat`;
  say(`${pretty(answer.predicted)}, ${percent(answer.ranking[0].probability)}`);
}

/** The part of the address that the server answers; the rest only says what is shown of the answer. */
function asking({ class: name, against, percentile, level, attribution }) {
  return { class: name, against, percentile, level, attribution };
}

function loading(id) {
  return make("div", { class: "answer", "aria-busy": "true" },
    make("div", { class: "verdict-bar" }, make("div", {}, make("p", { class: "soft" }, "Looking…"), make("div", { class: "ghost wide" }))),
    make("div", { class: "columns" },
      make("div", { class: "viewer" }, make("img", { class: "preview", src: `/pictures/${encodeURIComponent(id)}/picture.jpg`, alt: "your picture" })),
      make("div", {}, ...Array.from({ length: 5 }, () => make("div", { class: "ghost row-ghost" })))));
}

function filmstrip(current) {
  const pictures = remembered();
  if (pictures.length < 2) return "";
  return make("ul", { class: "film", "aria-label": "Pictures of this session" }, ...pictures.map(({ id, name, picture }) => {
    const image = make("img", { src: picture, alt: name || "picture", loading: "lazy" });
    const link = make("a", { href: `/ask/${id}`, title: name, "aria-current": id === current ? "page" : false }, image);
    image.addEventListener("error", () => { forget(id); link.parentNode?.remove(); });
    return make("li", {}, link);
  }));
}

class View {
  constructor(page, asked, answer, load) {
    Object.assign(this, { page, asked, answer, load });
    this.mode = MODES.some(([mode]) => mode === asked.view) ? asked.view : "box";
    this.own = new Stage(answer.picture, answer.size, `your picture${answer.name ? ": " + answer.name : ""}`, TALL);
    this.source = new Stage("data:,", [1, 1], "", TALL);
    this.left = make("div", { class: "viewer" });
    this.right = make("div", { class: "evidence" });
    this.head = make("div", { class: "verdict-bar" });
    this.zone = dropZone(page, true);
    this.node = make("div", { class: "answer", "data-picture": answer.id }, this.head, make("div", { class: "columns" }, this.left, this.right));
    this.drawHead();
    this.drawLeft();
    this.drawRight();
  }

  get comparing() { return this.answer.sheets.length > 1; }
  get name() { return this.answer.sheets[0].name; }
  get rows() { return this.comparing ? this.answer.difference.rows : this.answer.sheets[0].rows; }

  /** The address of this answer with something else chosen. */
  href(changes) { return address(location.pathname, { ...this.asked, prototype: null, ...changes }); }

  drawHead() {
    const { answer } = this;
    const best = answer.ranking[0];
    const files = (kind) => address(`/pictures/${answer.id}/explanation.${kind}`, asking(this.asked));
    const abstains = answer.verdict?.abstains;
    this.head.replaceChildren(
      make("div", {},
        make("p", { class: "soft" }, abstains ? "The nearest class is" : "This picture looks like"),
        make("h1", { class: abstains ? "unsure" : "" }, pretty(best.name), make("span", { class: "sure" }, percent(best.probability)))),
      make("div", { class: "downloads" }, make("span", { class: "soft small" }, "Download"),
        ...["png", "html", "json"].map((kind) => make("a", { class: "button", href: files(kind), download: true }, kind.toUpperCase())),
        this.zone),
      this.promise());
  }

  /** What the model promises about the picture, at a level that can be chosen. */
  promise() {
    const { verdict } = this.answer;
    if (!verdict) {
      return make("p", { class: "pledge unknown" }, make("span", {}, "This run is not calibrated, so it promises nothing. ",
        make("code", {}, "likethat calibrate RUN"), " lets it say how sure it is, and when a picture is unlike everything it knows."));
    }
    const level = make("select", { onchange: () => this.page.go(this.href({ level: level.value === "0.95" ? null : level.value })) },
      ...[...new Set([0.8, 0.9, 0.95, 0.99, verdict.level])].sort().map((value) => make("option", { value, selected: value === verdict.level }, `${100 * value} %`)));
    const holds = make("label", {}, "Holds for", level, "of pictures");
    const { prototype: id, class: name, similarity } = verdict.nearest;
    const nearest = ["Nearest is ", make("a", { href: `/prototypes/${id}` }, title(id, this.answer.matches[id]?.name)), ` of ${pretty(name)}, similarity ${signed(similarity)}.`];
    const names = verdict.prediction_set.map((name, number) => [number ? (number === verdict.prediction_set.length - 1 ? " or " : ", ") : "", make("b", {}, pretty(name))]);
    if (verdict.unlike) {
      return make("p", { class: "pledge unlike" }, make("span", {}, make("b", {}, "Unlike everything the model knows. "), "It abstains: fewer than ", `${Math.round(100 * (1 - verdict.level))} % of validation pictures look so little like any class. `, nearest), holds);
    }
    if (!verdict.prediction_set.length) {
      return make("p", { class: "pledge unlike" }, make("span", {}, make("b", {}, "No class is likely enough. "), "The model abstains at this level. ", nearest), holds);
    }
    if (!verdict.informed) {
      return make("p", { class: "pledge unknown" }, make("span", {}, "There were too few validation pictures to exclude any class at this level."), holds);
    }
    if (verdict.prediction_set.length === 1) return make("p", { class: "pledge" }, make("span", {}, names, " and no other class."), holds);
    return make("p", { class: "pledge several" }, make("span", {}, `One of these ${verdict.prediction_set.length}: `, names, "."), holds);
  }

  drawLeft() {
    this.caption = make("figcaption", {}, "your picture");
    this.sourceCaption = make("figcaption", {}, "");
    const modes = make("fieldset", { class: "segments" }, make("legend", { class: "unseen" }, "What to show on your picture"),
      ...MODES.map(([mode, text]) => make("label", {},
        make("input", { type: "radio", name: "mode", value: mode, checked: mode === this.mode, onchange: () => this.setMode(mode) }), make("span", {}, text))));
    const percentile = Number(this.asked.percentile ?? 95);
    const output = make("output", { for: "percentile" }, `${percentile} %`);
    const change = debounce(120, (value) => this.setPercentile(value));
    this.slider = make("label", { class: "slider" }, make("span", {}, "Box leaves out"),
      make("input", { type: "range", id: "percentile", min: 50, max: 99, step: 0.5, value: percentile,
        oninput: (event) => { output.textContent = `${event.target.value} %`; change(event.target.value); } }), output);
    this.left.replaceChildren(
      make("div", { class: "two-up" },
        make("figure", {}, this.own.node, this.caption),
        make("figure", {}, this.source.node, this.sourceCaption)),
      make("div", { class: "viewer-tools" }, modes, this.methods(), !this.page.run.seen_alone && this.slider),
      this.page.run.seen_alone ? make("p", { class: "soft small" }, this.page.run.seen_alone) : "",
      this.ranking());
  }

  /** How the part of the picture is found: by stretching the map of similarities, or by asking the network, which takes seconds. */
  methods() {
    const chosen = this.asked.attribution ?? "upsampling";
    const select = make("select", { id: "attribution", onchange: () => this.page.go(this.href({ attribution: select.value === "upsampling" ? null : select.value, prototype: this.lit })) },
      ...Object.entries(this.page.run.attributions).map(([value, text]) => make("option", { value, selected: value === chosen }, text)));
    return make("label", { class: "slider" }, make("span", {}, "Found by"), select);
  }

  ranking() {
    const chosen = this.answer.sheets.map((sheet) => sheet.name);
    const item = ({ name, probability }) => {
      const bar = make("i");
      bar.style.width = `${100 * probability}%`;
      return make("li", {}, make("a", { href: this.href({ class: name, against: null }), "aria-current": chosen.includes(name) ? "true" : false },
        make("span", {}, pretty(name)), make("span", {}, percent(probability)), make("div", { class: "meter" }, bar)));
    };
    const first = this.answer.ranking.slice(0, 5), rest = this.answer.ranking.slice(5);
    return make("nav", { class: "classes", "aria-label": "Classes, likeliest first" },
      make("h2", {}, "Classes"),
      make("ol", {}, ...first.map(item)),
      rest.length ? make("details", { open: rest.some(({ name }) => chosen.includes(name)) }, make("summary", {}, `${rest.length} more`), make("ol", {}, ...rest.map(item))) : "");
  }

  drawRight() {
    const { answer } = this;
    const [sheet, rival] = answer.sheets;
    const shown = this.comparing ? answer.difference : sheet;
    const most = Math.max(...shown.rows.map((row) => Math.abs(row.points)), 1e-9);
    const options = answer.ranking.filter(({ name }) => name !== sheet.name)
      .map(({ name }) => make("option", { value: name, selected: rival?.name === name }, pretty(name)));
    const compare = make("select", { id: "compare", onchange: () => this.page.go(this.href({ class: sheet.name, against: compare.value })) },
      make("option", { value: "" }, "no other class"), ...options);
    const heading = this.comparing
      ? make("h2", {}, `Why ${pretty(sheet.name)} rather than ${pretty(rival.name)}`)
      : make("h2", {}, `Evidence for ${pretty(sheet.name)}`);
    this.list = make("ol", { class: "evidence-rows", onkeydown: (event) => this.arrows(event) },
      ...shown.rows.map((row) => this.row(row, most)));
    const total = (text, value, kind = "") => make("div", { class: kind }, make("span", {}, text), make("span", {}, value));
    this.right.replaceChildren(
      make("div", { class: "evidence-head" }, heading,
        make("label", { for: "compare", class: "soft small" }, "Compare with ", compare)),
      this.comparing ? make("p", { class: "soft small legend" }, make("span", { class: "for" }), `speaks for ${pretty(sheet.name)} `, make("span", { class: "anti" }), `for ${pretty(rival.name)}`)
        : make("p", { class: "soft small legend" }, "Similarity to the training patch × its connection to the class = points. Point at a line, or use ↑ and ↓."),
      this.list,
      make("div", { class: "totals" },
        shown.others ? total(`${shown.others} further prototype${shown.others > 1 ? "s" : ""}`, signed(shown.rest), "soft") : "",
        this.comparing && [total(pretty(sheet.name), signed(sheet.logit), "soft"), total(pretty(rival.name), signed(rival.logit), "soft")],
        total(this.comparing ? `Lead of ${pretty(sheet.name)}` : `Total points for ${pretty(sheet.name)}`, signed(shown.logit), "total")),
      this.nearest());
    const first = shown.rows.find((row) => String(row.prototype) === this.asked.prototype) ?? shown.rows[0];
    if (first) this.light(first.prototype);
    else this.own.clear();
  }

  row(row, most) {
    const match = this.answer.matches[row.prototype];
    const bar = make("i", { class: row.points < 0 ? "anti" : "for" });
    bar.style.width = `${(this.comparing ? 50 : 100) * Math.abs(row.points) / most}%`;
    const other = !this.comparing && match.class !== this.name;
    return make("li", {}, make("button", {
      type: "button", class: "evidence-row", "data-prototype": row.prototype,
      onmouseenter: () => this.light(row.prototype), onfocus: () => this.light(row.prototype), onclick: () => this.light(row.prototype),
    },
      make("img", { src: match.crop, alt: "", loading: "lazy" }),
      make("span", { class: "what" }, make("b", {}, title(row.prototype, match.name)), (other || this.comparing) && make("small", { class: other ? "other" : "" }, `of ${pretty(match.class)}`)),
      make("span", { class: "sum" }, `${signed(match.similarity)} × ${signed(row.weight)}`, make("b", {}, signed(row.points))),
      make("span", { class: this.comparing ? "bar middle" : "bar" }, bar)));
  }

  nearest() {
    const cards = this.answer.nearest.map((id) => {
      const match = this.answer.matches[id];
      return make("li", {}, make("button", { type: "button", class: "near-card", "data-prototype": id, onmouseenter: () => this.light(id), onfocus: () => this.light(id), onclick: () => this.light(id) },
        small(match.source, match.source_size, match.source_box, "", "5.5rem"),
        make("b", {}, signed(match.similarity)), make("span", {}, pretty(match.class)), make("small", { class: "soft" }, title(id, match.name))));
    });
    return make("details", { class: "nearest" }, make("summary", {}, "Nearest prototypes of all classes"), make("ol", {}, ...cards));
  }

  arrows(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    const buttons = [...this.list.querySelectorAll("button")];
    const next = buttons[buttons.indexOf(document.activeElement) + step];
    if (next) { event.preventDefault(); next.focus(); }
  }

  /** Shows where the prototype is, in your picture and in its own. */
  light(id) {
    this.lit = id;
    const match = this.answer.matches[id];
    for (const button of this.right.querySelectorAll("[data-prototype]")) button.classList.toggle("lit", Number(button.dataset.prototype) === Number(id));
    if (this.mode === "box") this.own.box(match.box);
    else if (this.mode === "heat") this.own.heat(match.heat, match.box);
    else this.own.grid(match.map, this.page.run.colours);
    const method = match.attribution;
    const place = { box: "this part", heat: this.page.run.attributions[method].toLowerCase(), grid: method === "upsampling" ? "similarity of every patch" : "what each part adds to the similarity" }[this.mode];
    this.caption.replaceChildren(make("b", {}, "Your picture"), ` ${place}`);
    this.source.picture(match.source, match.source_size, `training picture of ${pretty(match.class)}`);
    this.source.box(match.source_box);
    this.sourceCaption.replaceChildren(make("b", {}, "looks like that"), " ",
      make("a", { href: `/prototypes/${id}` }, title(id, match.name)), ` of ${pretty(match.class)} · `, make("a", { href: `/correct?prototype=${id}&picture=${this.answer.id}` }, "correct"));
  }

  setMode(mode) {
    this.mode = this.asked.view = mode;
    readdress(this.asked);
    this.light(this.lit);
  }

  async setPercentile(value) {
    this.asked.percentile = value === "95" ? null : value;
    readdress(this.asked);
    const turn = this.turn = (this.turn ?? 0) + 1;
    try {
      const answer = await this.load();
      if (turn !== this.turn) return; // the slider has moved on
      this.answer = answer;
    } catch (error) {
      if (error.name !== "AbortError") this.right.prepend(problemBox(error));
      return;
    }
    this.drawHead();
    this.light(this.lit);
  }
}
