"""`likethat evaluate --interpretability --part val` on CUB-200-2011's own layout, with part points."""

from __future__ import annotations

import json
from pathlib import Path

from helpers.runs import DEFAULT, likethat, make_tiny_birds
from PIL import Image

from likethat.data.formats import open_dataset


def make_tiny_cub(folder: Path) -> Path:
    """The embedded birds in CUB's layout: boxes of the birds, middles of their parts."""
    birds, root = make_tiny_birds(folder / "birds"), folder / "CUB_200_2011"
    written = json.loads((birds / "parts.json").read_text())
    paths = sorted(path for path in written if not path.startswith("val/"))
    classes = sorted({path.split("/")[1] for path in paths})
    parts = sorted({part for path in paths for part in written[path]} - {"bird"})
    lines: dict[str, list[str]] = {
        "classes.txt": [f"{number} {number:03d}.{name}" for number, name in enumerate(classes, 1)],
        "parts/parts.txt": [f"{number} {name}" for number, name in enumerate(parts, 1)],
    }
    for number, path in enumerate(paths, 1):
        split, class_name, file = path.split("/")
        label = classes.index(class_name) + 1
        target = f"{label:03d}.{class_name}/{split}_{file}"
        (root / "images" / target).parent.mkdir(parents=True, exist_ok=True)
        Image.open(birds / path).save(root / "images" / target)
        x0, y0, x1, y1 = written[path]["bird"]
        lines.setdefault("images.txt", []).append(f"{number} {target}")
        lines.setdefault("image_class_labels.txt", []).append(f"{number} {label}")
        lines.setdefault("train_test_split.txt", []).append(f"{number} {int(split == 'train')}")
        lines.setdefault("bounding_boxes.txt", []).append(f"{number} {x0} {y0} {x1 - x0} {y1 - y0}")
        for part_number, part in enumerate(parts, 1):
            place = written[path].get(part)
            x, y = ((place[0] + place[2]) / 2, (place[1] + place[3]) / 2) if place else (0.0, 0.0)
            lines.setdefault("parts/part_locs.txt", []).append(f"{number} {part_number} {x} {y} {int(bool(place))}")
    for name, found in lines.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("\n".join(found) + "\n")
    return root


def test_the_held_out_images_of_cub_are_measured_with_their_parts(tmp_path: Path) -> None:
    root = make_tiny_cub(tmp_path)
    likethat("train", root, "--out", tmp_path / "run", *DEFAULT, "--val-fraction", "0.34", "--seed", "3")
    dataset = open_dataset(root, seed=3, val_fraction=0.34)
    assert len(dataset.val) == 6
    for sample in dataset.test:
        (root / sample.path).write_bytes(b"no picture")
    done = likethat("evaluate", tmp_path / "run", "--interpretability", "--part", "val", "--json")
    document = json.loads(done.stdout)
    figures = {figure["name"]: figure for figure in document["figures"]}
    assert document["evaluation"]["images"] == 6
    assert "6 validation images cropped to the box, squashed to 64x64" in figures["consistency"]["note"]
    assert "nearest of 12 training images" in figures["purity"]["note"]
    for name in ("consistency", "stability", "purity", "purity, pictures not trained on", "part coverage"):
        assert figures[name]["value"] is not None
    assert json.loads((tmp_path / "run" / "interpretability-val.json").read_text())["part"] == "val"
