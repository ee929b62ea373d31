"""What every prototype looks like: its training picture, the box in it, and both as small files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from likethat.data.cache import decode_chunk
from likethat.data.dataset import Sample
from likethat.data.decode import Box, read_image, view_of
from likethat.data.loaders import Images, hold
from likethat.data.reading.workers import begin_many
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


def draw_prototypes(
    run: Path,
    model: ProtoPNet,
    projection: Projection,
    samples: Sequence[Sample],
    root: Path,
    sha256: Mapping[str, str],
    classes: Sequence[str],
) -> list[Prototype]:
    """Write pictures of all prototypes into the folder `run`; return their facts. `samples` are training images."""
    pixel_NHW3 = decode_chunk(root, samples, model.backbone.input_size).pixels
    images = hold(pixel_NHW3, tuple(samples), model.prototype_layer.class_P.device)
    with begin_drawing(run, model, projection, images, samples, root, sha256, classes) as drawn:
        return in_order(drawn, len(projection.image_P))


@contextmanager
def begin_drawing(
    run: Path,
    model: ProtoPNet,
    projection: Projection,
    images: Images,
    samples: Sequence[Sample],
    root: Path,
    sha256: Mapping[str, str],
    classes: Sequence[str],
) -> Iterator[Iterator[list[Prototype]]]:
    """Begin to write pictures of all prototypes into the folder `run`, by other processes where there are many, and
    provide their facts picture by picture. `images` are the `samples` as the network sees them."""
    size_hw = model.backbone.input_size
    of_image: dict[int, list[int]] = {}
    for p, image in enumerate(projection.image_P.tolist()):
        of_image.setdefault(image, []).append(p)
    names = source_names((sha256[samples[image].path], samples[image].box) for image in of_image)
    columns = (model.prototype_layer.class_P, projection.row_P, projection.column_P, projection.moved_P)
    facts_P = list(zip(*(column.tolist() for column in columns), strict=True))
    cell_P = [patch_box(model, row, column) for _, row, column, _ in facts_P]
    box_P = cell_P if model.backbone.windows is not None else _locate(model, images, of_image)
    (run / layout.PICTURES).mkdir(parents=True, exist_ok=True)

    def draw(image: int) -> list[Prototype]:
        sample = samples[image]
        upright = read_image(root / sample.path, value_range=sample.value_range)
        view = view_of(upright, sample.box, size_hw)
        source = shrink(seen_part(upright, view), SOURCE_SIDE)
        scale_x, scale_y = source.width / size_hw[1], source.height / size_hw[0]
        name = names[sha256[sample.path], sample.box]
        _write(run / name, jpeg(source))
        drawn = []
        for p in of_image[image]:
            (label, row, column, moved), box = facts_P[p], box_P[p]
            prototype = Prototype(
                id=p,
                label=label,
                class_name=classes[label],
                path=sample.path,
                sha256=sha256[sample.path],
                row=row,
                column=column,
                cell=view.to_file(cell_P[p]),
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

    with begin_many(draw, list(of_image)) as found:
        yield found


@torch.no_grad()
def _locate(model: ProtoPNet, images: Images, of_image: Mapping[int, Sequence[int]]) -> list[Box]:
    """Return the box around what each prototype activates most in the image that it comes from."""
    model.eval()
    box_of: dict[int, Box] = {}
    numbers = list(of_image)
    for start in range(0, len(numbers), BATCH):
        batch = numbers[start : start + BATCH]
        output = model(images.batch(torch.tensor(batch))[0])
        places = [(number, p) for number, image in enumerate(batch) for p in of_image[image]]
        number_p, drawn_p = torch.tensor(places, device=images.device).T
        boxes = match_boxes(model, output.of_distance(output.distance_BPHW[number_p, drawn_p]))
        box_of |= dict(zip((p for _, p in places), boxes, strict=True))
    return [box_of[p] for p in range(len(box_of))]


def in_order(drawn: Iterable[Sequence[Prototype]], total: int, advance: Advance | None = None) -> list[Prototype]:
    """Wait until the pictures of all prototypes are written; return the facts about these by their numbers."""
    prototypes: list[Prototype] = []
    for of_picture in drawn:
        prototypes += of_picture
        if advance:
            advance(len(prototypes), total)
    return sorted(prototypes, key=lambda prototype: prototype.id)


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
