"""Why a picture got its class: which parts of it look like which prototypes, and how many points each one gave."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL.Image import Image
from torch import Tensor

from likethat.data.decode import Box
from likethat.errors import UserError
from likethat.explaining.attribution import UPSAMPLING, check_method
from likethat.explaining.boxes import PERCENTILE
from likethat.explaining.draw.notebook import notebook_html
from likethat.explaining.draw.page import write_explanations
from likethat.explaining.draw.render import pdf, png, scaled, small_png
from likethat.explaining.draw.sheet import draw_long_sheet, draw_page_sheet
from likethat.explaining.hiding import hide_boxes
from likethat.explaining.matches import Match, find_matches
from likethat.explaining.scoring import RowGroup, ScoredPicture, Sheet, SheetRow, added_up
from likethat.models.protopnet import Output, summed_logits
from likethat.runs.atomic_files import atomic_path, write_json
from likethat.runs.classifier import Classifier, PictureSource, PreparedPicture

NEAREST = 10  # prototypes listed over all classes, as in the paper's analysis
STRONGEST = 5  # parts in a summary
CLOSELY = 10  # prototypes of a class that are located by another attribution than upsampling: as many as pages show


class Explanation(ScoredPicture):
    """A picture's scoring sheets, which can be drawn and saved."""

    def figure(self, colours: str = "ember", *, long: bool = False) -> Image:
        """Draw what counts most on one page or, with `long`, the scoring sheets of all classes; colours='jet' gives the
        paper's rainbow."""
        return draw_long_sheet(self, colours) if long else draw_page_sheet(self, colours)

    def png(self, colours: str = "ember", *, long: bool = False) -> bytes:
        """Return `figure` as a PNG file. That of one page has at most 500 kB, if need be with fewer colours."""
        image = self.figure(colours, long=long)
        return png(image) if long else small_png(image)

    def save(self, path: str | Path, colours: str = "ember", *, long: bool = False) -> Path:
        """Save the explanation as a page (.html), a picture (.png, .pdf) or data (.json). The picture is one page for
        mail and print or, with `long`, as long as all its sheets."""
        path, ending = Path(path), Path(path).suffix.lower()
        if ending == ".json":
            write_json(path, self.to_dict())
        elif ending in (".png", ".pdf"):
            data = self.png(colours, long=long) if ending == ".png" else pdf(self.figure(colours, long=long))
            with atomic_path(path) as temporary:
                temporary.write_bytes(data)
        elif ending in (".html", ".htm"):
            write_explanations(path, [self], colours)
        else:
            raise UserError(f"An explanation is saved as .html, .png, .pdf or .json; {path} ends with none of them.")
        return path

    def __repr__(self) -> str:
        return f"<likethat.Explanation {self.path or 'picture'}: {self.predicted.name}>"

    def __str__(self) -> str:
        """Return a summary: the class, what is promised, and what decided: most of its lead over the rival."""
        decisive = self.sheets[0]
        groups, others, rest = decisive.main_groups(STRONGEST)
        lines = [f"{self.path or 'picture'}: {self.predicted.name} ({self.predicted.probability:.1%})"]
        lines += [self.verdict.sentence()] if self.verdict else []
        lines += [] if decisive.rival is None else [f"{decisive.title}:"]
        lines += [
            f"{group.points:+8.2f} points: like {_named(group)} of {group.lead.match.prototype.class_name} "
            f"({group.lead.match.prototype.path}), similarity {group.lead.match.similarity:.2f}"
            for group in groups
        ]
        lines += [f"{rest:+8.2f} points: {others} other prototypes"] if others else []
        if self.rival is None:
            return "\n".join([*lines, f"{decisive.logit:8.2f} points in all"])
        totals = " against ".join(f"{self.sheet(name).logit:.2f}" for name in (decisive.name, self.rival))
        return "\n".join([*lines, f"{decisive.logit:+8.2f} points ahead: {totals}"])

    def _repr_html_(self) -> str:
        return notebook_html(self)


def _named(group: RowGroup) -> str:
    more = len(group.rows) - 1
    return group.lead.match.prototype.title + (f" and {more} more" if more else "")


@dataclass(frozen=True)
class Options:
    """What an explanation tells, and how."""

    top_classes: int = 3
    against: str | None = None  # the class to compare the prediction with; the runner-up, if none
    percentile: float = PERCENTILE  # of a map's pixels outside its box
    level: float | None = None  # of the prediction set
    attribution: str = UPSAMPLING
    also: Sequence[str] = ()  # classes to explain besides the likeliest
    patience: float | None = None  # seconds to find prototypes in their own pictures by such an attribution


USUAL = Options()


def explain(
    classifier: Classifier,
    image: PictureSource,
    *,
    crop_to: Box | None = None,
    top_classes: int = USUAL.top_classes,
    against: str | None = None,
    percentile: float = USUAL.percentile,
    level: float | None = None,
    attribution: str = USUAL.attribution,
    hide: Sequence[Box] = (),
) -> Explanation:
    """Explain one picture. `against` is the class that the prediction is compared with (the runner-up, if none is named
    or that class is the prediction; nothing, where only one class is explained); `level` is that of the
    prediction set of a calibrated run; `attribution` says how the parts of the picture are found: by upsampling,
    gradient or occlusion; `hide` paints rectangles over first, each x0, y0, x1, y1 in pixels of the file, as the
    boxes of explanations are."""
    prepared = hide_boxes(classifier.prepare(image, crop_to), hide)
    path = str(image) if isinstance(image, str | Path) else None
    options = Options(top_classes, against, percentile, level, attribution)
    return explain_batch(classifier, [prepared], options, paths=[path])[0]


def explain_batch(
    classifier: Classifier,
    batch: Sequence[PreparedPicture],
    options: Options = USUAL,
    *,
    paths: Sequence[str | None] | None = None,
    outputs: Sequence[Output] | None = None,
) -> list[Explanation]:
    """Explain several prepared pictures after one forward pass over all of them; `outputs` are its results, where the
    networks have seen the pictures already."""
    outputs = classifier.outputs(batch) if outputs is None else outputs
    check_method(options.attribution)
    if options.top_classes < 1:
        raise UserError(f"At least 1 class must be explained, and {options.top_classes} were asked for.")
    rival = None if options.against is None else class_number(classifier.classes, options.against)
    further = [class_number(classifier.classes, name) for name in options.also]
    weight_KP = classifier.weight_KP
    score_BP = torch.cat([output.score_BP for output in outputs], 1).cpu().double()
    logit_BK = summed_logits(outputs).cpu().double()
    verdicts = classifier.verdicts(logit_BK, score_BP, options.level)
    explanations = []
    for number, (prepared, path) in enumerate(zip(batch, paths or [None] * len(batch), strict=True)):
        score_P, logit_K = score_BP[number], logit_BK[number]
        size_wh = prepared.views[0].input_hw[::-1]
        order = logit_K.argsort(descending=True, stable=True).tolist()
        shown = order[: options.top_classes]
        opponent = _opponent(order, rival, options.top_classes)
        shown += sorted({opponent, *further} - {None, *shown}, key=order.index)
        nearest = score_P.argsort(descending=True, stable=True)[:NEAREST].tolist()
        weight_kP = weight_KP[shown].cpu().double()
        wanted_P = (weight_kP != 0).any(0)
        wanted_P[nearest] = True
        closely_P = torch.zeros_like(wanted_P)
        closely_P[nearest] = True
        points_kP = (weight_kP * score_P).abs()
        closely_P[points_kP.topk(min(CLOSELY, points_kP.shape[1])).indices] = True
        matches = find_matches(
            classifier,
            outputs,
            prepared,
            number,
            score_P,
            wanted_P,
            closely_P,
            percentile=options.percentile,
            attribution=options.attribution,
            patience=options.patience,
        )
        explanations.append(
            Explanation(
                path=path,
                image=prepared.image,
                view=prepared.views[0],
                classes=_sheets(classifier.classes, shown, logit_K, weight_kP, matches),
                nearest=tuple(matches[p] for p in nearest),
                rival=None if opponent is None else classifier.classes[opponent],
                run=classifier.path,
                verdict=verdicts[number],
                attribution=options.attribution,
                sees_windows=classifier.sees_windows,
                hidden=tuple(prepared.views[0].to_file(scaled(box, *size_wh)) for box in prepared.hidden),
            )
        )
    return explanations


def _opponent(order: Sequence[int], asked: int | None, top_classes: int) -> int | None:
    """Return the class that the prediction is compared with: the one asked for, or the runner-up if it is shown."""
    if asked is None and top_classes == 1:
        return None
    return asked if asked not in (None, order[0]) else next(iter(order[1:]), None)


def class_number(classes: Sequence[str], name: str) -> int:
    if name in classes:
        return classes.index(name)
    close = difflib.get_close_matches(name, classes, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(close)}?" if close else f"for example, {classes[0]} is one."
    raise UserError(f"There is no class called '{name}'; {hint}")


def _sheets(
    classes: Sequence[str], shown: Sequence[int], logit_K: Tensor, weight_kP: Tensor, matches: Mapping[int, Match]
) -> tuple[Sheet, ...]:
    probabilities, logits = logit_K.softmax(0).tolist(), logit_K.tolist()
    sheets = []
    for label, weight_P in zip(shown, weight_kP, strict=True):
        connected_p = weight_P.nonzero()[:, 0]
        weights = zip(connected_p.tolist(), weight_P[connected_p].tolist(), strict=True)
        rows = [SheetRow(matches[p], weight, matches[p].similarity * weight) for p, weight in weights]
        in_order = added_up(rows, logits[label], abs(logits[label]))
        sheets.append(Sheet(classes[label], logits[label], probabilities[label], in_order))
    return tuple(sheets)
