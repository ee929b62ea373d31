"""Draws the pictures of docs/metrics.md from a finished run on the embedded birds: python docs/draw_metrics.py RUN"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from likethat.data.decode import Box
from likethat.data.parts import PartTable, read_parts
from likethat.explaining.draw.heat import colour_table
from likethat.explaining.draw.render import draw_box
from likethat.metrics import decisive, degradation, gradients, misalignment, part_hits, purity, reveal, transformations
from likethat.metrics.regions import centres, distance_to_box
from likethat.metrics.response import moved_boxes
from likethat.metrics.sweep import Batch, Subject, add_noise, sweep
from likethat.progress import Display
from likethat.runs.classifier import load
from likethat.runs.data import open_test_data

IMAGES = Path(__file__).parent / "images"
SIDE, GAP, LINE = 132, 6, 18
WHITE, GREEN, RED, GREY, INK = (255, 255, 255), (0, 190, 110), (235, 60, 50), (150, 150, 150), (40, 40, 40)
FONT = ImageFont.load_default(12)


class Keep:
    """The whole test part as one batch."""

    on_training_images = False

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def collect(self, batch: Batch) -> None:
        self.batches.append(batch)


def tile(x_3HW: Tensor) -> Image.Image:
    pixels = (x_3HW.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    return Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def boxed(image: Image.Image, box: Tensor | Sequence[float]) -> Image.Image:
    x0, y0, x1, y1 = (float(value) * SIDE for value in box)
    return draw_box(image, (x0, y0, x1, y1))


def outline(image: Image.Image, box: Tensor | Sequence[float], colour: tuple[int, int, int]) -> Image.Image:
    image = image.copy()
    x0, y0, x1, y1 = (min(max(float(value), 0), 1) * (SIDE - 1) for value in box)
    ImageDraw.Draw(image).rectangle((x0, y0, x1, y1), outline=colour, width=2)
    return image


def dotted(image: Image.Image, point: Tensor | Sequence[float], colour: tuple[int, int, int]) -> Image.Image:
    image = image.copy()
    x, y = (float(value) * SIDE for value in point)
    ImageDraw.Draw(image).ellipse((x - 4, y - 4, x + 4, y + 4), fill=colour, outline=WHITE)
    return image


def strip(name: str, tiles: Sequence[tuple[Image.Image, str]]) -> None:
    """Tiles side by side, each with a line of text below."""
    width = len(tiles) * (SIDE + GAP) - GAP
    sheet = Image.new("RGB", (width, SIDE + LINE), WHITE)
    draw = ImageDraw.Draw(sheet)
    for number, (image, text) in enumerate(tiles):
        left = number * (SIDE + GAP)
        sheet.paste(image.resize((SIDE, SIDE)), (left, 0))
        draw.text((left + SIDE / 2, SIDE + LINE / 2), text, fill=INK, font=FONT, anchor="mm")
    sheet.save(IMAGES / f"metric-{name}.jpg", quality=85)


def square(peak_2: Tensor) -> Box:
    x, y = peak_2.tolist()
    half = part_hits.HALF_REGION
    return x - half, y - half, x + half, y + half


class Pictures:
    """One function a metric; each writes its strip."""

    def __init__(self, batch: Batch, parts: PartTable) -> None:
        self.batch, self.parts = batch, parts
        assert batch.part_BQ4 is not None
        self.part_BQ4 = batch.part_BQ4
        self.subject = batch.subject
        self.network = self.subject.classifier.networks[0]
        self.x = batch.x[0]
        self.evidence = batch.evidence
        right_B = batch.predicted_B == batch.label_B
        self.shown = int(right_B.nonzero()[0])  # one picture for most strips

    def peaks(self, rows: Sequence[int], prototype: int) -> Tensor:
        return self.batch.clean.peaks(torch.tensor(rows), torch.full((len(rows),), prototype))

    def own(self, prototype: int, count: int) -> list[int]:
        return (self.batch.label_B == self.subject.class_P[prototype]).nonzero()[:count, 0].tolist()

    def with_parts(self, row: int, image: Image.Image, region: Box) -> Image.Image:
        """Parts inside the square in green, the others in grey."""
        for point in centres(self.part_BQ4[row]):
            if not point.isnan().any():
                inside = float(distance_to_box(point[None], torch.tensor([region]))) == 0
                image = dotted(image, point, GREEN if inside else GREY)
        return image

    def consistency(self) -> None:
        prototype = int(self.evidence.prototype_BE[self.shown, 0])
        rows, tiles = self.own(prototype, 5), []
        for row, peak_2 in zip(rows, self.peaks(rows, prototype), strict=True):
            region = square(peak_2)
            tiles.append((self.with_parts(row, outline(tile(self.x[row]), region, WHITE), region), f"picture {row}"))
        strip("consistency", tiles)

    def stability(self) -> None:
        prototype, row = int(self.evidence.prototype_BE[self.shown, 0]), self.shown
        noisy = add_noise(self.x[row : row + 1], torch.Generator().manual_seed(0))
        after = self.batch.read([noisy])
        tiles = []
        for x_3HW, reading, place, text in (
            (self.x[row], self.batch.clean, row, "the picture"),
            (noisy[0], after, 0, "with noise"),
        ):
            region = square(reading.peaks(torch.tensor([place]), torch.tensor([prototype]))[0])
            tiles.append((self.with_parts(row, outline(tile(x_3HW), region, WHITE), region), text))
        strip("stability", tiles)

    def purity(self) -> None:
        prototype = int(self.evidence.prototype_BE[self.shown, 0])
        rows = self.batch.clean.score_BP[:, prototype].topk(6).indices
        box_n4 = self.batch.clean.boxes(rows, torch.full((6,), prototype))
        tiles = []
        for row, box in zip(rows.tolist(), purity.trimmed(box_n4), strict=True):
            image = outline(tile(self.x[row]), box, WHITE)
            tiles.append((self.with_parts(row, image, tuple(box.tolist())), self.name_of(row)))
        strip("purity", tiles)

    def name_of(self, row: int) -> str:
        name = self.subject.classifier.classes[int(self.batch.label_B[row])]
        return name.replace("_", " ")[:20]

    def coverage(self) -> None:
        tiles = []
        for label in range(0, 8, 2):
            row = int((self.batch.label_B == label).nonzero()[0])
            prototypes = (self.subject.class_P == label).nonzero()[:, 0]
            regions = [
                square(peak_2) for peak_2 in self.batch.clean.peaks(torch.full_like(prototypes, row), prototypes)
            ]
            image = tile(self.x[row])
            for region in regions:
                image = outline(image, region, WHITE)
            for point in centres(self.part_BQ4[row]):
                if not point.isnan().any():
                    found = any(float(distance_to_box(point[None], torch.tensor([r]))) == 0 for r in regions)
                    image = dotted(image, point, GREEN if found else RED)
            tiles.append((image, self.name_of(row)))
        strip("coverage", tiles)

    def decisive(self) -> None:
        number = {name: label for label, name in enumerate(self.subject.classifier.classes)}
        tiles = []
        for a, b, part in self.parts.pairs:
            for own, other in ((number[a], number[b]), (number[b], number[a])):
                row = int((self.batch.label_B == own).nonzero()[1])
                points_P = decisive.separating_points(
                    self.batch.clean.score_BP[row : row + 1],
                    self.subject.weight_KP,
                    torch.tensor([own]),
                    torch.tensor([other]),
                )[0]
                peak_2 = self.peaks([row], int(points_P.argmax()))[0]
                box = self.part_BQ4[row, part]
                hit = float(distance_to_box(peak_2[None], box[None])) <= decisive.TOLERANCE
                image = dotted(outline(tile(self.x[row]), box, WHITE), peak_2, GREEN if hit else RED)
                tiles.append((image, self.parts.names[part]))
        strip("decisive", tiles[:6])

    def transformations(self) -> None:
        row, prototype, box = self.leading()
        tiles = [(boxed(tile(self.x[row]), box), "the picture")]
        for name, move_23 in transformations.MOVES.items():
            moved = transformations.warp(self.x[row : row + 1], move_23)
            after = self.batch.read([moved]).boxes(torch.tensor([0]), torch.tensor([prototype]))[0]
            image = outline(tile(moved[0]), moved_boxes(box[None], move_23)[0], WHITE)
            tiles.append((boxed(image, after), name))
        strip("transformations", tiles)

    def leading(self) -> tuple[int, int, Tensor]:
        return self.shown, int(self.evidence.prototype_BE[self.shown, 0]), self.evidence.box_BE4[self.shown, 0]

    def degradation(self) -> None:
        row, prototype, box = self.leading()
        x_13HW = self.x[row : row + 1]
        changed = {
            f"JPEG {degradation.QUALITY}": degradation.through_jpeg(x_13HW),
            "noise": add_noise(x_13HW, torch.Generator().manual_seed(0)),
        }
        tiles = [(boxed(tile(x_13HW[0]), box), "the picture")]
        for name, after_13HW in changed.items():
            after = self.batch.read([after_13HW]).boxes(torch.tensor([0]), torch.tensor([prototype]))[0]
            tiles.append((boxed(outline(tile(after_13HW[0]), box, WHITE), after), name))
        strip("degradation", tiles)

    def misalignment(self) -> None:
        row, prototype, box = self.leading()
        x_13HW, only = self.x[row : row + 1], torch.tensor([prototype])
        free_11HW = misalignment.free_pixels(box[None], self.network.backbone.input_size, rim=True)
        _, attacked = misalignment.attack(self.network, x_13HW, only, free_11HW, torch.Generator().manual_seed(0))
        inside_11HW = misalignment.box_masks(box[None, None], self.network.backbone.input_size)
        pasted = torch.where(inside_11HW, x_13HW, self.x[row + 13 : row + 14])

        def similarity(x: Tensor) -> str:
            return f"similarity {float(self.batch.read([x]).score_BP[0, prototype]):.2f}"

        tiles = [
            (boxed(tile(x_13HW[0]), box), similarity(x_13HW)),
            (boxed(tile(attacked[0]), box), similarity(attacked)),
            (tile(0.5 + (attacked - x_13HW)[0] * 4), "the attack, times 4"),
            (boxed(tile(pasted[0]), box), similarity(pasted)),
        ]
        strip("misalignment", tiles)

    def receptive_field(self) -> None:
        row, prototype, box = self.leading()
        gradient = gradients.similarity_gradient(self.network, self.x[row : row + 1], torch.tensor([prototype]))
        energy_HW = gradient.square().sum(1)[0]
        level_HW = (energy_HW / energy_HW.flatten().quantile(0.995)).clamp(0, 1).sqrt()
        heat = torch.from_numpy(colour_table()[(level_HW * 255).long().numpy()]).permute(2, 0, 1) / 255
        strip(
            "receptive_field", [(boxed(tile(self.x[row]), box), "the box"), (boxed(tile(heat), box), "gradient energy")]
        )

    def revealed(self, show: bool, steps: Sequence[int], boxes_BE4: Tensor | None = None) -> list[Image.Image]:
        row = self.shown
        box_BE4 = self.evidence.box_BE4[row : row + 1] if boxes_BE4 is None else boxes_BE4
        mask_L1HW = reveal.unions(box_BE4, self.evidence.counts_BE[row : row + 1], self.network.backbone.input_size)
        x_13HW = self.x[row : row + 1]
        blur = reveal.blurred(x_13HW)
        return [tile(torch.where(mask_L1HW[step] == show, x_13HW, blur)[0]) for step in steps]

    def deletion(self) -> None:
        hidden, shown = self.revealed(False, (0, 2, 4)), self.revealed(True, (0, 2, 4))
        names = [f"{reveal.STEPS[step]} hidden" for step in (0, 2, 4)] + [
            f"{reveal.STEPS[step]} shown" for step in (0, 2, 4)
        ]
        strip("deletion", list(zip(hidden + shown, names, strict=True)))

    def leakage(self) -> None:
        random_14 = reveal.elsewhere(
            self.evidence.box_BE4[self.shown : self.shown + 1], torch.Generator().manual_seed(1)
        )
        tiles = [
            (self.revealed(True, [4])[0], "the boxes alone"),
            (self.revealed(False, [4])[0], "without the boxes"),
            (self.revealed(True, [4], random_14)[0], "random boxes alone"),
        ]
        strip("leakage", tiles)

    def background(self) -> None:
        assert self.batch.object_B4 is not None
        tiles = []
        for row in range(0, len(self.x), len(self.x) // 4)[:4]:
            image = outline(tile(self.x[row]), self.batch.object_B4[row], WHITE)
            prototypes = self.evidence.prototype_BE[row][self.evidence.counts_BE[row]]
            for peak_2 in self.batch.clean.peaks(torch.full_like(prototypes, row), prototypes):
                outside = float(distance_to_box(peak_2[None], self.batch.object_B4[row][None])) > 0
                image = dotted(image, peak_2, RED if outside else GREEN)
            tiles.append((image, self.name_of(row)))
        strip("background", tiles)

    def redundancy(self) -> None:
        own_NP = self.batch.label_B[:, None] == self.subject.class_P
        nearest_kP = self.batch.clean.score_BP.topk(10, dim=0).indices
        prototype = int(own_NP.gather(0, nearest_kP).float().mean(0).argmin())
        rows = nearest_kP[:6, prototype]
        box_n4 = self.batch.clean.boxes(rows, torch.full((6,), prototype))
        strip(
            "redundancy",
            [
                (boxed(tile(self.x[row]), box), self.name_of(row))
                for row, box in zip(rows.tolist(), box_n4, strict=True)
            ],
        )

    def sparsity(self) -> None:
        points_P = (
            self.batch.clean.score_BP[self.shown] * self.subject.weight_KP[self.batch.predicted_B[self.shown]]
        ).detach()
        values = points_P[points_P != 0].sort(descending=True).values.tolist()
        width = 6 * (SIDE + GAP) - GAP
        sheet = Image.new("RGB", (width, SIDE), WHITE)
        draw, step = ImageDraw.Draw(sheet), width / max(len(values), 1)
        top, running, total = max(values), 0.0, sum(abs(value) for value in values)
        for number, value in enumerate(values):
            needed = running < 0.9 * total
            running += abs(value)
            box = (number * step + 2, SIDE - 20 - (SIDE - 30) * abs(value) / top, (number + 1) * step - 2, SIDE - 20)
            draw.rectangle(box, fill=(15, 118, 110) if needed else GREY)
            draw.text(((number + 0.5) * step, SIDE - 9), f"{value:+.2f}", fill=INK, font=FONT, anchor="mm")
        sheet.save(IMAGES / "metric-sparsity.png")

    def all(self) -> list[Callable[[], None]]:
        names = "consistency stability purity coverage decisive transformations degradation misalignment"
        more = "receptive_field deletion leakage background redundancy sparsity"
        return [getattr(self, name) for name in f"{names} {more}".split()]


def main(run: str) -> None:
    classifier = load(run, "cpu")
    dataset, _ = open_test_data(classifier, None)
    parts = read_parts(dataset)
    assert parts is not None, "the pictures are drawn from a run on the embedded birds"
    subject = Subject(classifier, dataset.root, dataset.test, parts)
    keep = Keep()
    sweep(subject, [keep], Display())  # type: ignore[list-item]
    x_N3HW = torch.cat([batch.x[0] for batch in keep.batches])
    part_NQ4, object_N4 = (
        torch.cat([tensor for batch in keep.batches if (tensor := getattr(batch, name)) is not None])
        for name in ("part_BQ4", "object_B4")
    )
    index_N = torch.cat([batch.index_B for batch in keep.batches])
    order_N = index_N.argsort()
    whole = Batch(
        subject,
        torch.arange(len(index_N)),
        [x_N3HW[order_N]],
        part_NQ4[order_N],
        object_N4[order_N],
        perturbed=True,
        attacked=True,
    )
    for draw in Pictures(whole, parts).all():
        draw()


if __name__ == "__main__":
    main(sys.argv[1])
