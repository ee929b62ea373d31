"""A picture of near-duplicates: each held-out picture beside the one of an earlier split that it looks like."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from likethat.data.dataset import DataSet, Sample
from likethat.data.decode import read_image, to_input
from likethat.data.near_duplicates import NearDuplicate
from likethat.explaining.draw.render import fit, jpeg, seen_part
from likethat.runs.atomic_files import atomic_path

SHOWN = 12  # pairs, the most similar first
COLUMNS = 3
SIDE, LINE, GAP = 160, 14, 12  # pixels of a picture, of a line of text, and between them
LETTERS = 26  # of a file's name, its end


def write_pairs(target: Path, dataset: DataSet, pairs: Sequence[NearDuplicate]) -> None:
    """Draw the most similar pairs into a JPEG file; where there are none, leave no file."""
    if not pairs:
        target.unlink(missing_ok=True)
        return
    with atomic_path(target) as temporary:
        temporary.write_bytes(jpeg(draw_pairs(dataset, pairs[:SHOWN])))


def draw_pairs(dataset: DataSet, pairs: Sequence[NearDuplicate]) -> Image.Image:
    sample_of = {sample.path: sample for sample in dataset.all_samples()}
    width, height = 2 * SIDE + GAP, SIDE + 2 * LINE + GAP
    columns, rows = min(COLUMNS, len(pairs)), -(-len(pairs) // COLUMNS)
    canvas = Image.new("RGB", (columns * (width + GAP) + GAP, rows * height + GAP), "white")
    draw = ImageDraw.Draw(canvas)
    font = ImageFont.load_default()
    for number, pair in enumerate(pairs):
        left, top = GAP + number % COLUMNS * (width + GAP), GAP + number // COLUMNS * height
        for path, part, x in ((pair.path, pair.part, left), (pair.other, pair.other_part, left + SIDE + 4)):
            canvas.paste(fit(_seen(dataset.root, sample_of[path]), SIDE), (x, top))
            name = path.rpartition("/")[2][-LETTERS:]
            for line, text in enumerate((part, name.encode("ascii", "replace").decode())):
                draw.text((x, top + SIDE + line * LINE), text, "black", font)
    return canvas


def _seen(root: Path, sample: Sample) -> Image.Image:
    image = read_image(root / sample.path, value_range=sample.value_range)
    return seen_part(image, to_input(image, sample.box, (1, 1))[1])
