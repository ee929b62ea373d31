// What the model promises about a picture.
import { make, pretty, signed, title } from "./dom.js";

/** What the model promises about the picture, at a level that can be chosen. */
export function pledge({ verdict, matches }, choose) {
  if (!verdict) {
    return make("p", { class: "pledge unknown" }, make("span", {}, "This run is not calibrated, so it promises nothing. ",
      make("code", {}, "likethat calibrate RUN"), " lets it say how sure it is, and when a picture is unlike everything it knows."));
  }
  const level = make("select", { onchange: () => choose(level.value) },
    ...[...new Set([0.8, 0.9, 0.95, 0.99, verdict.level])].sort().map((value) => make("option", { value, selected: value === verdict.level }, `${100 * value} %`)));
  const remedy = verdict.remedy && make("small", { class: "soft" }, ` ${verdict.remedy}.`);
  const said = (kind, ...words) => make("p", { class: `pledge ${kind}` }, make("span", {}, ...words), make("label", {}, "Confidence level", level), remedy);
  const { prototype: id, class: name, similarity } = verdict.nearest;
  const nearest = ["Nearest is ", make("a", { href: `/prototypes/${id}` }, title(id, matches[id]?.name)), ` of ${pretty(name)}, similarity ${signed(similarity)}.`];
  const names = verdict.prediction_set.map((name, number) => [number ? (number === verdict.prediction_set.length - 1 ? " or " : ", ") : "", make("b", {}, pretty(name))]);
  if (verdict.unlike) return said("unlike", make("b", {}, "Unlike everything the model knows. "), "It abstains: fewer than ", `${Math.round(100 * (1 - verdict.level))} % of validation pictures look so little like any class. `, nearest);
  if (!verdict.prediction_set.length) return said("unlike", make("b", {}, "No class is likely enough. "), "The model abstains at this level. ", nearest);
  if (!verdict.informed) return said("unknown", "There were too few validation pictures to exclude any class at this level.");
  if (verdict.prediction_set.length === 1) return said("single", "Only ", names, " remains plausible.");
  return said("several", `One of these ${verdict.prediction_set.length}: `, names, ".");
}
