// The answer about one picture: what it looks like, and why.
import { address, debounce, make, percent, pretty, problemBox, readdress, request, say, signed, title } from "./dom.js";
import { dropZone, filmstrip, forget } from "./ask.js";
import { Hidden, near } from "./hide.js";
import { pledge } from "./pledge.js";
import { Stage, cut, small } from "./stage.js";

const TALL = "min(21rem, 46vh)";
const MODES = [["box", "Box"], ["heat", "Map"], ["grid", "Raw grid"]];

export async function result(page) {
  const { main, run, part: id, query, signal } = page;
  const asked = { class: query.get("class"), against: query.get("against"), percentile: query.get("percentile"), level: query.get("level"), attribution: query.get("attribution"), prototype: query.get("prototype"), view: query.get("view"), hide: query.getAll("hide") };
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
    this.hidden = new Hidden(asked.hide, page.run.limits.hidden,
      (hide) => address(`/api/pictures/${encodeURIComponent(answer.id)}/hidden`, { ...asking(asked), ...this.explained, hide }), () => this.drawHidden(), page.signal);
    this.hidden.drawOn(this.own.node);
    this.node = make("div", { class: "answer", "data-picture": answer.id }, this.head, make("div", { class: "columns" }, this.left, this.right));
    this.drawHead();
    this.drawLeft();
    this.drawRight();
    this.hidden.refresh();
  }

  get comparing() { return this.answer.sheets.length > 1; }
  /** The classes whose points are shown, whichever the model prefers when parts are hidden. */
  get explained() { return { class: this.answer.sheets[0].name, against: this.answer.sheets[1]?.name }; }
  get name() { return this.answer.sheets[0].name; }
  get shown() { return this.comparing ? this.answer.difference : this.answer.sheets[0]; }

  /** The address of this answer with something else chosen. */
  href(changes) { return address(location.pathname, { ...this.asked, prototype: null, ...changes }); }

  drawHead() {
    const { answer } = this;
    const best = answer.ranking[0];
    const files = (kind) => address(`/pictures/${answer.id}/explanation.${kind}`, { ...asking(this.asked), hide: this.hidden.texts });
    const abstains = answer.verdict?.abstains;
    this.head.replaceChildren(
      make("div", {},
        make("p", { class: "soft" }, abstains ? "The nearest class is" : "This picture looks like"),
        make("h1", { class: abstains ? "unsure" : "" }, pretty(best.name), make("span", { class: "sure" }, percent(best.probability)))),
      make("div", { class: "downloads" }, make("span", { class: "soft small" }, "Download"),
        ...["png", "html", "json"].map((kind) => make("a", { class: "button", href: files(kind), download: true }, kind.toUpperCase())),
        this.zone),
      pledge(answer, (level) => this.page.go(this.href({ level }))));
  }

  drawLeft() {
    this.caption = make("figcaption", {}, "your picture");
    this.sourceCaption = make("figcaption", {}, "");
    const modes = make("fieldset", { class: "segments" }, make("legend", { class: "unseen" }, "What to show on your picture"),
      ...MODES.map(([mode, text]) => make("label", {},
        make("input", { type: "radio", name: "mode", value: mode, checked: mode === this.mode, onchange: () => this.setMode(mode) }), make("span", {}, text))));
    const percentile = Number(this.asked.percentile ?? 95);
    const output = make("output", { for: "percentile" }, `${100 - percentile} %`);
    const change = debounce(120, (value) => this.setPercentile(value));
    this.slider = make("label", { class: "slider" }, make("span", {}, "Box around the strongest"),
      make("input", { type: "range", id: "percentile", min: 50, max: 99, step: 0.5, value: percentile,
        oninput: (event) => { output.textContent = `${100 - event.target.value} %`; change(event.target.value); } }), output);
    this.left.replaceChildren(
      make("div", { class: "two-up" },
        make("figure", {}, this.own.node, this.caption),
        make("figure", {}, this.source.node, this.sourceCaption)),
      this.hiding = make("div", { class: "hiding" }),
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
    this.classes = new Map();
    const item = ({ name, probability, logit }) => {
      const bar = make("i"), now = make("i", { class: "now" }), after = make("span", { class: "still" });
      bar.style.width = `${100 * probability}%`;
      const link = make("a", { href: this.href({ class: name, against: null }), "aria-current": chosen.includes(name) ? "true" : false },
        make("span", {}, pretty(name)), make("span", {}, make("span", { class: "was" }, percent(probability)), after), make("div", { class: "meter" }, bar, now));
      this.classes.set(name, { link, now, after, logit });
      return make("li", {}, link);
    };
    const first = this.answer.ranking.slice(0, 5), rest = this.answer.ranking.slice(5);
    return make("nav", { class: "classes", "aria-label": "Classes, likeliest first" },
      make("h2", {}, "Classes"),
      make("ol", {}, ...first.map(item)),
      rest.length ? make("details", { open: rest.some(({ name }) => chosen.includes(name)) }, make("summary", {}, `${rest.length} more`), make("ol", {}, ...rest.map(item))) : "");
  }

  drawRight() {
    const { answer, shown } = this;
    const [sheet, rival] = answer.sheets;
    const options = answer.ranking.filter(({ name }) => name !== sheet.name)
      .map(({ name }) => make("option", { value: name, selected: rival?.name === name }, pretty(name)));
    const compare = make("select", { id: "compare", onchange: () => this.page.go(this.href({ class: sheet.name, against: compare.value })) },
      make("option", { value: "" }, "no other class"), ...options);
    const heading = this.comparing
      ? make("h2", {}, `Why ${pretty(sheet.name)} and not ${pretty(rival.name)}`)
      : make("h2", {}, `Evidence for ${pretty(sheet.name)}`);
    this.lines = [];
    this.list = make("ol", { class: "evidence-rows", onkeydown: (event) => this.arrows(event) }, ...shown.groups.map((group) => this.line(group)));
    const total = (text, before, kind, after) => {
      const now = make("span", { class: "still" });
      this.totals.push({ now, before, after });
      return make("div", { class: kind }, make("span", {}, text), make("span", {}, make("span", { class: "was" }, signed(before)), now));
    };
    this.totals = [];
    const given = (now) => shown.groups.reduce((sum, { rows }) => sum + left(now, rows), 0);
    this.right.replaceChildren(
      make("div", { class: "evidence-head" }, heading,
        make("label", { for: "compare", class: "soft small" }, "Compare with ", compare)),
      this.comparing ? make("p", { class: "soft small legend" }, make("span", { class: "for" }), `speaks for ${pretty(sheet.name)} `, make("span", { class: "anti" }), `for ${pretty(rival.name)}`)
        : make("p", { class: "soft small legend" }, "This part of your picture looks like that training patch: similarity × connection to the class = points. Point at a line, or use ↑ and ↓."),
      this.list,
      make("div", { class: "totals" },
        shown.others ? total(`${shown.others} further prototype${shown.others > 1 ? "s" : ""}`, shown.rest, "soft", (now) => this.now(now).logit - given(this.now(now))) : "",
        this.comparing && answer.sheets.map(({ name, logit }, number) => total(pretty(name), logit, "soft", (now) => now.sheets[number].logit)),
        total(this.comparing ? `Lead of ${pretty(sheet.name)}` : `Total points for ${pretty(sheet.name)}`, shown.logit, "total", (now) => this.now(now).logit)),
      this.nearest());
    const wanted = String(this.lit ?? this.asked.prototype);
    const rows = shown.groups.flatMap(({ rows }) => rows);
    const first = rows.find((row) => String(row.prototype) === wanted) ?? rows[0];
    if (first) this.light(first.prototype);
    else this.own.clear();
  }

  /** What is left of the sheet that is shown. */
  now(after) { return this.comparing ? after.difference : after.sheets[0]; }

  /** A part of the picture: one prototype, or several that show the same part and are listed when it is opened. */
  line(group) {
    const [lead] = group.rows, match = this.answer.matches[lead.prototype], several = group.rows.length > 1;
    const hide = make("button", { type: "button", class: "button hide-part", onclick: () => this.hidden.toggle(match.box) });
    const row = this.row(lead, group.rows, group.points);
    this.lines.at(-1).hide = hide;
    return make("li", {}, make("div", { class: "line-row" }, row, hide),
      several && make("details", { class: "row-members" }, make("summary", {}, `Each of the ${group.rows.length}`), ...group.rows.map((member) => this.row(member, [member], member.points))));
  }

  row(row, rows, points) {
    const match = this.answer.matches[row.prototype], several = rows.length > 1;
    const kind = points < 0 ? "anti" : "for", bar = make("i", { class: kind }), nowBar = make("i", { class: `${kind} now` }), after = make("b", { class: "still" });
    const other = !this.comparing && match.class !== this.name;
    const how = make("span", { class: "how" });
    this.lines.push({ rows, row, points, bar, nowBar, after, how, match });
    return make("button", {
      type: "button", class: "evidence-row", "data-prototype": row.prototype,
      onmouseenter: () => this.light(row.prototype), onfocus: () => this.light(row.prototype), onclick: () => this.light(row.prototype),
    },
      cut(this.answer.picture, this.answer.size, match.box),
      make("img", { src: match.crop, alt: "", loading: "lazy" }),
      make("span", { class: "what" }, make("b", {}, several ? `${rows.length} prototypes` : title(row.prototype, match.name)), (other || this.comparing) && make("small", { class: other ? "other" : "" }, `of ${pretty(match.class)}`)),
      make("span", { class: "sum" }, how, make("b", { class: "was" }, signed(points)), after),
      make("span", { class: this.comparing ? "bar middle" : "bar" }, bar, nowBar));
  }

  /** The points of the whole picture, and beside them what is left of them where parts are hidden. */
  drawHidden() {
    const { hidden, answer } = this, { after, problem } = hidden;
    if (!hidden.draft && String(hidden.texts) !== String(this.asked.hide)) {
      this.asked.hide = hidden.texts;
      readdress(this.asked);
      this.drawHead();
    }
    this.node.classList.toggle("with-hidden", Boolean(after));
    this.own.cover(hidden.cover());
    const now = after && this.now(after);
    const most = Math.max(...this.lines.flatMap(({ rows, points }) => [Math.abs(points), now ? Math.abs(left(now, rows)) : 0]), 1e-9);
    const wide = (points) => `${(this.comparing ? 50 : 100) * Math.abs(points) / most}%`;
    for (const { rows, row, points, bar, nowBar, after: text, how, match, hide } of this.lines) {
      const rest = now ? left(now, rows) : points;
      bar.style.width = wide(points);
      nowBar.style.width = now ? wide(rest) : 0;
      nowBar.className = `${rest < 0 ? "anti" : "for"} now`;
      text.textContent = now ? signed(rest) : "";
      how.textContent = rows.length > 1 ? "" : `${signed(now ? after.matches[row.prototype].similarity : match.similarity)} × ${signed(row.weight)}`;
      if (!hide) continue;
      const isHidden = hidden.has(match.box);
      hide.textContent = isHidden ? "Show" : "Hide";
      hide.setAttribute("aria-label", `${isHidden ? "Show" : "Hide"} the part that ${title(row.prototype, match.name)} shows`);
      hide.disabled = hidden.full && !isHidden;
    }
    for (const { now: text, after: rest } of this.totals) text.textContent = after ? signed(rest(after)) : "";
    const ranked = new Map((after?.ranking ?? []).map((entry) => [entry.name, entry]));
    for (const [name, { link, now: bar, after: text }] of this.classes) {
      const entry = ranked.get(name);
      text.textContent = entry ? percent(entry.probability) : "";
      bar.style.width = entry ? `${100 * entry.probability}%` : 0;
      link.title = entry ? `${signed(this.classes.get(name).logit)} points, with parts hidden ${signed(entry.logit)}` : `${signed(this.classes.get(name).logit)} points`;
    }
    const outcome = hidden.outcome(answer);
    this.hiding.replaceChildren(...hidden.tools(outcome), problem ? problemBox(problem) : "");
    if (this.lit !== undefined) this.light(this.lit);
    if (after && !hidden.draft) say(outcome.textContent);
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
    const buttons = [...this.list.querySelectorAll(".evidence-row")].filter((button) => button.checkVisibility());
    const next = buttons[buttons.indexOf(document.activeElement) + step];
    if (next) { event.preventDefault(); next.focus(); }
  }

  /** Shows where the prototype is, in your picture and in its own. */
  light(id) {
    this.lit = id;
    const match = this.answer.matches[id];
    for (const button of this.right.querySelectorAll("[data-prototype]")) button.classList.toggle("lit", Number(button.dataset.prototype) === Number(id));
    if (this.mode === "box" && this.hidden.all.length) this.own.outline(match.box);
    else if (this.mode === "box") this.own.box(match.box);
    else if (this.mode === "heat") this.own.heat(match.heat, match.box);
    else this.own.grid(match.map, this.page.run.colours);
    const method = match.attribution;
    const place = { box: "this part", heat: this.page.run.attributions[method].toLowerCase(), grid: method === "upsampling" ? "similarity of every patch" : "what each part adds to the similarity" }[this.mode];
    const moved = this.hidden.after?.matches[id];
    const elsewhere = moved && !near(moved.box, match.box, 0.05);
    if (elsewhere && this.mode === "box") this.own.moved(moved.box);
    this.caption.replaceChildren(make("b", {}, "Your picture"), ` ${place}`,
      moved ? `. Similarity ${signed(match.similarity)} → ${signed(moved.similarity)}${elsewhere ? ", now nearest in the dashed box" : ""}` : "");
    this.source.picture(match.source, match.source_size, `training picture of ${pretty(match.class)}`);
    this.source.box(match.source_box);
    this.sourceCaption.replaceChildren(make("b", {}, "looks like that"), " ",
      make("a", { href: `/prototypes/${id}` }, title(id, match.name)), ` of ${pretty(match.class)} · `, make("a", { href: `/correct?prototype=${id}&picture=${this.answer.id}` }, "edit"));
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
    this.drawRight();
    this.hidden.refresh();
  }
}

/** The points that these rows have left. */
function left(now, rows) { return rows.reduce((sum, { prototype }) => sum + (now.points[prototype] ?? 0), 0); }
