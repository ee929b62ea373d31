"""Draws the pictures of docs/attribution.md and of the last chapter of docs/metrics.md from a finished run on the
embedded birds, and the diagram of how reliable another run is: python docs/draw_trust.py RUN OTHER"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from draw_metrics import FONT, GAP, IMAGES, INK, LINE, SIDE, WHITE, strip
from PIL import Image, ImageDraw

from likethat.data.dataset import DataSet
from likethat.data.synthetic.field_guide import make_birds
from likethat.explaining.attribution import TITLES
from likethat.explaining.draw.heat import overlay
from likethat.explaining.draw.render import draw_box, fit, read_picture, scaled
from likethat.explaining.explanation import Explanation, explain
from likethat.explaining.scoring import SheetRow
from likethat.metrics.accuracy import logits_of
from likethat.metrics.reliability import reliability
from likethat.progress import Display
from likethat.report.measured import draw_reliability
from likethat.runs.classifier import Classifier, load
from likethat.runs.data import open_run_data

ROWS = 2  # of each picture in the comparison of attributions


def square(image: Image.Image) -> Image.Image:
    image = fit(image, SIDE)
    tile = Image.new("RGB", (SIDE, SIDE), WHITE)
    tile.paste(image, ((SIDE - image.width) // 2, (SIDE - image.height) // 2))
    return tile


def located(explanation: Explanation, row: SheetRow) -> Image.Image:
    """The part of the picture in its box, on the map it was found with."""
    picture = overlay(fit(explanation.picture, SIDE), row.match.map_HW)
    return square(draw_box(picture, scaled(row.match.share, *picture.size)))


def draw_attributions(classifier: Classifier, dataset: DataSet) -> None:
    tiles = []
    for number in (0, len(dataset.test) * 3 // 8 + 4):
        path = dataset.root / dataset.test[number].path
        found = [explain(classifier, path, top_classes=1, attribution=method) for method in TITLES]
        for rank in range(ROWS):
            rows = [explanation.predicted.rows[rank] for explanation in found]
            picture, prototype = square(found[0].picture), rows[0].match.prototype
            crop = square(read_picture(classifier.path, prototype.crop))
            tiles.append([picture, crop, *(located(one, row) for one, row in zip(found, rows, strict=True))])
    heads = ("picture", "prototype", *TITLES)
    sheet = Image.new("RGB", (len(heads) * (SIDE + GAP) - GAP, LINE + len(tiles) * (SIDE + GAP) - GAP), WHITE)
    draw = ImageDraw.Draw(sheet)
    for column, head in enumerate(heads):
        draw.text((column * (SIDE + GAP) + SIDE / 2, LINE / 2), head, fill=INK, font=FONT, anchor="mm")
        for row, line in enumerate(tiles):
            sheet.paste(line[column], (column * (SIDE + GAP), LINE + row * (SIDE + GAP)))
    sheet.save(IMAGES / "attribution.jpg", quality=88)


def draw_out_of_distribution(classifier: Classifier, dataset: DataSet) -> None:
    """Known species beside some that the run has never seen."""
    with tempfile.TemporaryDirectory() as folder:
        make_birds(Path(folder), species=16, train=1, val=1, test=1, size=160, seed=7)
        known = [dataset.root / dataset.test[number].path for number in (0, len(dataset.test) // 2)]
        others = [
            path for path in sorted(Path(folder, "test").rglob("*.jpg")) if path.parent.name not in classifier.classes
        ]
        tiles = []
        for kind, paths in (("known", known), ("unknown", others[:3])):
            for path in paths:
                verdict = classifier.predict(path).verdict
                assert verdict is not None, "calibrate the run first: likethat calibrate RUN"
                tiles.append((square(classifier.prepare(path).image), f"{kind}: {verdict.likeness:.1f} points"))
        strip("out-of-distribution", tiles)


def draw_reliable(classifier: Classifier, dataset: DataSet) -> None:
    logits_NK = logits_of(classifier, dataset.root, dataset.test, Display())
    label_N = torch.tensor([sample.label for sample in dataset.test])
    (IMAGES / "metric-reliability.svg").write_text(draw_reliability(reliability(logits_NK, label_N)))


def main(run: str, other: str) -> None:
    classifier = load(run, "cpu")
    dataset = open_run_data(classifier, None)
    draw_attributions(classifier, dataset)
    draw_out_of_distribution(classifier, dataset)
    classifier = load(other, "cpu")
    draw_reliable(classifier, open_run_data(classifier, None))


if __name__ == "__main__":
    main(*sys.argv[1:])
