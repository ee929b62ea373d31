"""What every prototype looks like: its training picture, the box in it, and both as small files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from likethat.data.dataset import Sample
from likethat.data.decode import Box, View, read_image, to_input
from likethat.data.loaders import to_unit
from likethat.data.reading.workers import map_in_threads
from likethat.errors import UserError
from likethat.explaining.boxes import match_boxes, patch_box
from likethat.explaining.draw.render import jpeg, seen_part, shrink
from likethat.models.protopnet import ProtoPNet
from likethat.progress import Advance
from likethat.runs import layout
from likethat.runs.atomic_files import write_json
from likethat.runs.classifier import Prototype
from likethat.training.project import Projection

CROP_SIDE, SOURCE_SIDE = 160, 256  # pixels of the small pictures, at most
BATCH = 32


def save_prototypes(run: Path, prototypes: Sequence[Prototype]) -> None:
    """Write prototypes.json once the pictures are drawn, and remove those of an earlier projection."""
    write_json(run / layout.PROTOTYPES, {"prototypes": [asdict(prototype) for prototype in prototypes]})
    _remove_others(run, prototypes)


@torch.no_grad()
def draw_prototypes(
    run: Path,
    model: ProtoPNet,
    projection: Projection,
    samples: Sequence[Sample],
    root: Path,
    sha256: Mapping[str, str],
    classes: Sequence[str],
    advance: Advance | None = None,
) -> list[Prototype]:
    """Write pictures of all prototypes into the folder `run`; return their facts. `samples` are training images."""
    model.eval()
    layer, size_hw = model.prototype_layer, model.backbone.input_size
    of_image: dict[int, list[int]] = {}
    for p, image in enumerate(projection.image_P.tolist()):
        of_image.setdefault(image, []).append(p)
    names = source_names((sha256[samples[image].path], samples[image].box) for image in of_image)
    columns = (layer.class_P, projection.row_P, projection.column_P, projection.moved_P)
    facts_P = list(zip(*(column.tolist() for column in columns), strict=True))
    (run / layout.PICTURES).mkdir(parents=True, exist_ok=True)

    def draw(image: int, read: tuple[Image.Image, Tensor, View], boxes: Sequence[Box]) -> list[Prototype]:
        sample, mine, (upright, _, view) = samples[image], of_image[image], read
        source = shrink(seen_part(upright, view), SOURCE_SIDE)
        scale_x, scale_y = source.width / size_hw[1], source.height / size_hw[0]
        name = names[sha256[sample.path], sample.box]
        _write(run / name, jpeg(source))
        drawn = []
        for p, box in zip(mine, boxes, strict=True):
            label, row, column, moved = facts_P[p]
            cell = patch_box(model, row, column)
            box = box if model.backbone.windows is None else cell
            prototype = Prototype(
                id=p,
                label=label,
                class_name=classes[label],
                path=sample.path,
                sha256=sha256[sample.path],
                row=row,
                column=column,
                cell=view.to_file(cell),
                box=view.to_file(box),
                crop_to=sample.box,
                moved=moved,
                crop=f"{layout.PICTURES}/{p:04d}.jpg",
                source=name,
                source_box=(box[0] * scale_x, box[1] * scale_y, box[2] * scale_x, box[3] * scale_y),
            )
            crop = upright.crop(_whole_pixels(view.to_upright(box)))
            _write(run / prototype.crop, jpeg(shrink(crop, CROP_SIDE)))
            drawn.append(prototype)
        return drawn

    prototypes: list[Prototype] = []
    images = list(of_image)
    for start in range(0, len(images), BATCH):
        batch = images[start : start + BATCH]
        read_B = list(map_in_threads(lambda image: _read(root, samples[image], size_hw), batch))
        x_B3HW = to_unit(torch.stack([pixels for _, pixels, _ in read_B]).to(layer.class_P.device))
        output = model(x_B3HW)
        places = [(number, p) for number, image in enumerate(batch) for p in of_image[image]]
        number_p, drawn_p = torch.tensor(places, device=layer.class_P.device).T
        boxes = iter(match_boxes(model, output.of_distance(output.distance_BPHW[number_p, drawn_p])))
        boxes_B = [list(islice(boxes, len(of_image[image]))) for image in batch]
        for drawn in map_in_threads(lambda one: draw(*one), zip(batch, read_B, boxes_B, strict=True)):
            prototypes += drawn
        if advance:
            advance(min(start + BATCH, len(images)), len(images))
    return sorted(prototypes, key=lambda prototype: prototype.id)


def _read(root: Path, sample: Sample, size_hw: tuple[int, int]) -> tuple[Image.Image, Tensor, View]:
    upright = read_image(root / sample.path, value_range=sample.value_range)
    pixels, view = to_input(upright, sample.box, size_hw)
    return upright, torch.from_numpy(pixels).permute(2, 0, 1), view


def source_names(pictures: Iterable[tuple[str, Box | None]]) -> dict[tuple[str, Box | None], str]:
    """Return a file name for every source picture, given by hash and crop. Copies of a file share one, unless they are
    cropped differently."""
    names: dict[tuple[str, Box | None], str] = {}
    taken: dict[str, Box | None] = {}
    for sha256, box in pictures:
        stem, copy = f"{layout.PICTURES}/source-{sha256[:12]}", 1
        name = f"{stem}.jpg"
        while taken.setdefault(name, box) != box:
            copy += 1
            name = f"{stem}-{copy}.jpg"
        names[sha256, box] = name
    return names


def _whole_pixels(box: Box) -> tuple[int, int, int, int]:
    """Round the box to whole pixels, at least one each way; its middle decides where it is thinner than a pixel."""
    spans = []
    for low, high in ((box[0], box[2]), (box[1], box[3])):
        first, last = round(low), round(high)
        spans.append((first, last) if last > first else (int((low + high) / 2), int((low + high) / 2) + 1))
    (x0, x1), (y0, y1) = spans
    return x0, y0, x1, y1


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise UserError(f"{path} could not be written ({error.strerror}); make room and resume the run.") from error


def _remove_others(run: Path, prototypes: Sequence[Prototype]) -> None:
    """Remove pictures of prototypes from an earlier projection."""
    used = {run / name for prototype in prototypes for name in (prototype.crop, prototype.source)}
    for path in (run / layout.PICTURES).glob("*.jpg"):
        if path not in used:
            path.unlink()
