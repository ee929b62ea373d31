"""Three ways to explain one picture side by side, after the paper's Figure 4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from likethat.data.decode import Box, to_input
from likethat.data.loaders import to_unit
from likethat.errors import UserError
from likethat.explaining.boxes import whole_map
from likethat.explaining.draw.heat import overlay
from likethat.explaining.draw.render import cut_out, fit, read_picture, scaled
from likethat.explaining.draw.sheet import ACCENT, MARGIN, SCALE, SOFT, WIDTH, SheetCanvas, one_line
from likethat.explaining.explanation import Explanation, explain
from likethat.explaining.scoring import RowGroup
from likethat.runs.baseline import LoadedBaseline
from likethat.runs.classifier import Classifier, PictureSource

COLOURS = ("#e11d48", "#2563eb", "#f59e0b")  # of the parts shown, most points first
SIDE, GAP, TOP, HEIGHT = 206, 22, 92, 360  # of a panel's picture, between panels, above pictures, of the figure
CASES = MARGIN + 2 * (SIDE + GAP)  # where the third panel begins
THUMB = 62


@dataclass(frozen=True)
class Attention:
    """A baseline's answer and the share of every patch in it: their mean is the class's logit."""

    class_name: str
    probability: float
    map_HW: Tensor


@torch.no_grad()
def class_activation(baseline: LoadedBaseline, image: Image.Image, crop_to: Box | None = None) -> Attention:
    """Return the class activation map of the predicted class. `image` is upright."""
    pixels, _ = to_input(image, crop_to, baseline.model.backbone.input_size)
    x_13HW = to_unit(torch.from_numpy(pixels).permute(2, 0, 1)[None].to(baseline.device))
    logits_1HWK = baseline.model.head(baseline.model.backbone(x_13HW).permute(0, 2, 3, 1))
    logits_K = logits_1HWK.mean((0, 1, 2))
    best = int(logits_K.argmax())
    map_HW = whole_map(baseline.model.backbone, logits_1HWK[..., best])[0].cpu()
    return Attention(baseline.classes[best], float(logits_K.softmax(0)[best]), map_HW)


def comparison_figure(
    classifier: Classifier, baseline: LoadedBaseline, image: PictureSource, crop_to: Box | None = None
) -> Image.Image:
    """Draw what a baseline, one with part attention, and a ProtoPNet can say about a picture."""
    if set(classifier.classes) != set(baseline.classes):
        raise UserError(f"{classifier.path} and {baseline.path} know different classes; compare runs on the same data.")
    explanation = explain(classifier, image, crop_to=crop_to, top_classes=1)
    attention = class_activation(baseline, explanation.image, crop_to)
    parts = [group for group in explanation.predicted.groups if group.points > 0][: len(COLOURS)]
    picture, best = fit(explanation.picture, SIDE * SCALE), explanation.predicted
    verdict = f"{best.name}, {best.probability:.1%}"
    canvas = SheetCanvas(HEIGHT)
    for x, title, text in (
        (MARGIN, "Object attention", "a baseline: where it looked"),
        (MARGIN + SIDE + GAP, "Part attention", "which parts it looked at"),
        (CASES, "Parts and prototypical cases", "which parts, and what they look like"),
    ):
        canvas.text(x, 34, title, 16, bold=True)
        canvas.text(x, 60, text, 12, SOFT)
    _panel(canvas, MARGIN, overlay(picture, attention.map_HW), f"{attention.class_name}, {attention.probability:.1%}")
    boxes = [scaled(part.lead.match.share, *picture.size) for part in parts]
    _panel(canvas, MARGIN + SIDE + GAP, draw_parts(picture, boxes), verdict)
    for number, part in enumerate(parts):
        _draw_case(canvas, TOP + number * (THUMB + 10), explanation, part, COLOURS[number])
    canvas.text(CASES, TOP + SIDE + 10, one_line(verdict, WIDTH - MARGIN - CASES, 13), 13, bold=True)
    given = sum(part.points for part in parts)
    canvas.text(CASES, TOP + SIDE + 30, f"{given:.2f} of its {best.logit:.2f} points come from these parts", 11, SOFT)
    return canvas.image


def _panel(canvas: SheetCanvas, x: int, picture: Image.Image, verdict: str) -> None:
    canvas.picture(x, TOP, picture, SIDE)
    canvas.text(x, TOP + SIDE + 10, one_line(verdict, SIDE, 13), 13, bold=True)


def draw_parts(picture: Image.Image, boxes: Sequence[Box]) -> Image.Image:
    """Return a copy with the boxes in the colours of the parts, those with most points on top."""
    picture = picture.copy()
    draw = ImageDraw.Draw(picture)
    for box, colour in reversed(list(zip(boxes, COLOURS, strict=False))):
        x0, y0, x1, y1 = (round(value) for value in box)
        x1, y1 = min(x1, picture.width) - 1, min(y1, picture.height) - 1
        for inset, line in enumerate(["white"] + [colour] * 2 * SCALE + ["white"]):
            if x1 - x0 > 2 * inset and y1 - y0 > 2 * inset:
                draw.rectangle((x0 + inset, y0 + inset, x1 - inset, y1 - inset), outline=line)
    return picture


def _draw_case(canvas: SheetCanvas, y: int, explanation: Explanation, part: RowGroup, colour: str) -> None:
    """Draw a part of the picture, the prototype it looks like, and the training picture that is from."""
    match, prototype = part.lead.match, part.lead.match.prototype
    side = THUMB * SCALE
    source = read_picture(explanation.run, prototype.source).convert("RGB")
    scale = side / max(source.size)
    box = tuple(value * scale for value in prototype.source_box)
    pictures = (
        fit(cut_out(explanation.picture, match.share), side),
        fit(explanation.source_part(match), side),
        fit(source, side),
    )
    x = CASES
    canvas.draw.rectangle([v * SCALE for v in (x, y, x + 4, y + THUMB)], fill=colour)
    canvas.picture(x + 10, y, pictures[0], THUMB)
    canvas.text(x + 10 + THUMB + 26, y + THUMB / 2, "looks like", 10, SOFT, anchor="mm")
    canvas.picture(x + 10 + THUMB + 52, y, pictures[1], THUMB)
    outlined = pictures[2].copy()
    ImageDraw.Draw(outlined).rectangle(box, outline=colour, width=2 * SCALE)
    canvas.picture(x + 10 + 2 * THUMB + 58, y, outlined, THUMB)
    left = x + 10 + 3 * THUMB + 68
    canvas.text(left, y + THUMB / 2 - 8, f"{part.points:+.2f}", 15, ACCENT, anchor="lm", bold=True)
    canvas.text(left, y + THUMB / 2 + 12, "points", 11, SOFT, anchor="lm")
