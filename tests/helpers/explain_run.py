"""A small finished run made of pictures that show where they are: every cell of the latent map has its own colour."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps

from likethat.config.presets import resolve
from likethat.data.dataset import Sample
from likethat.data.decode import read_image, to_input
from likethat.data.loaders import Images
from likethat.explaining.gallery import draw_prototypes, save_prototypes
from likethat.models.protopnet import ProtoPNet, create_protopnet
from likethat.runs import layout
from likethat.runs.atomic_files import save_tensors
from likethat.runs.classifier import Prototype
from likethat.runs.layout import DataRecord, RunRecord
from likethat.training.project import project

INPUT_HW, MAP_HW = (96, 160), (3, 5)
CELL_HW = (96, 64)  # pixels of a cell in the files: three and two times as many as in the network's input
BORDER = (40, 24)  # around the grid, x and y, in pictures with a box to crop to
TO_STORED = {  # how an upright picture is turned to be stored with this EXIF orientation
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


@dataclass(frozen=True)
class TinyRun:
    path: Path
    root: Path
    classes: tuple[str, ...]
    samples: tuple[Sample, ...]
    colours: dict[str, np.ndarray]  # by path: MAP_HW x 3
    model: ProtoPNet
    prototypes: list[Prototype]


def grid_picture(
    path: Path, colours: np.ndarray, orientation: int = 1, cropped: bool = False
) -> tuple[float, float, float, float] | None:
    """Write a PNG of flat cells; return the box to crop to, in upright pixels, where there is a border around them."""
    picture = Image.fromarray(colours.repeat(CELL_HW[0], 0).repeat(CELL_HW[1], 1))
    box = None
    if cropped:
        width, height = picture.size
        box = (BORDER[0], BORDER[1], BORDER[0] + width, BORDER[1] + height)
        picture = ImageOps.expand(picture, BORDER, "black")
    turn = TO_STORED[orientation]
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    path.parent.mkdir(parents=True, exist_ok=True)
    (picture.transpose(turn) if turn is not None else picture).save(path, exif=exif)
    return box


def make_run(
    folder: Path,
    classes: tuple[str, ...] = ("finch", "owl", "wren"),
    per_class: int = 2,
    pictures_per_class: int = 3,
    *,
    seed: int = 0,
    nonzero: float = 0.3,
    ending: str = "",
    **options: object,
) -> TinyRun:
    """Make a run with random weights, real projection and real pictures; a share of the connections to other classes is
    not zero. Names of pictures have the ending before their extension."""
    torch.manual_seed(seed)
    generator = np.random.default_rng(seed)
    root, path = folder / "data", folder / "run"
    samples, colours = [], {}
    for label in range(len(classes)):
        for number in range(pictures_per_class):
            name = f"class{label}/{number}{ending}.png"
            colours[name] = generator.integers(0, 256, (*MAP_HW, 3), np.uint8)
            orientation = (label * pictures_per_class + number) % 8 + 1
            box = grid_picture(root / name, colours[name], orientation, cropped=number % 2 == 1)
            samples.append(Sample(name, label, box))
    settings = {"backbone": "test_resnet", "weights": "none", "input_size": "96x160", "latent_width": 16}
    config = resolve("paper", **{**settings, "prototypes_per_class": per_class, **options})
    model = create_protopnet(config.model, [per_class] * len(classes))
    size_hw = model.backbone.input_size
    pixels = np.stack([to_input(read_image(root / s.path), s.box, size_hw)[0] for s in samples])
    labels = torch.tensor([sample.label for sample in samples])
    projection = project(model, Images(torch.from_numpy(pixels), labels, torch.device("cpu")), classes)
    with torch.no_grad():
        weight_KP, draw_KP = model.last_layer.weight, torch.rand_like(model.last_layer.weight)
        kept_KP = model.own_KP | (torch.rand_like(weight_KP) < nonzero)
        weight_KP.copy_(torch.where(model.own_KP, 1 + draw_KP, -draw_KP) * kept_KP)
    sha256 = {sample.path: hashlib.sha256((root / sample.path).read_bytes()).hexdigest() for sample in samples}
    counts = {"train": len(samples), "val": 0, "test": 0}
    path.mkdir(parents=True)
    record = DataRecord(str(root), "folder", classes, counts, (), "none")
    RunRecord(config, record, (per_class,) * len(classes)).write(path)
    save_tensors(path / layout.MODEL, model.state_dict())
    (path / layout.PICTURES).mkdir()
    (path / layout.PICTURES / "0099.jpg").write_bytes(b"of an earlier projection")
    prototypes = draw_prototypes(path, model, projection, samples, root, sha256, classes)
    save_prototypes(path, prototypes)
    return TinyRun(path, root, classes, tuple(samples), colours, model, prototypes)


def write_metrics(run: Path, entries: list[dict[str, object]]) -> None:
    (run / layout.METRICS).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
