"""`--on-object`: prototypes come from masks and boxes that the data has."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.runs import PAPER, QUICK, TINY, likethat, make_tiny_birds
from PIL import Image

from likethat.data.cells import Cells, tiles
from likethat.data.formats import open_dataset
from likethat.errors import UserError
from likethat.runs.classifier import load
from likethat.workflows.edit.editor import open_editor
from likethat.workflows.objects import FINE, object_cells, on_object


@pytest.fixture(scope="module")
def birds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_birds(tmp_path_factory.mktemp("objects") / "birds")


@pytest.fixture(scope="module")
def table(birds: Path) -> Path:
    """A table of the same pictures, whose masks are the upper left quarter of each."""
    rows = []
    for picture in sorted(birds.rglob("*.jpg")):
        part, species, name = picture.relative_to(birds).parts
        mask = np.zeros((64, 64), np.uint8)
        mask[:32, :32] = 1  # anything but black
        place = birds.parent / "masks" / part / species / f"{picture.stem}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(mask).save(place)
        rows.append((f"birds/{part}/{species}/{name}", species, part, place.relative_to(birds.parent).as_posix()))
    with (birds.parent / "pictures.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "label", "split", "mask"), *rows])
    return birds.parent / "pictures.csv"


def test_a_cell_is_on_the_object_where_half_of_it_is() -> None:
    cells, generator = tiles((3, 4)), torch.Generator().manual_seed(0)
    fine_HW = (torch.rand(3 * FINE, 4 * FINE, generator=generator) < 0.5).float()
    found = on_object(fine_HW, cells)
    for row in range(3):
        for column in range(4):
            block = fine_HW[row * FINE : (row + 1) * FINE, column * FINE : (column + 1) * FINE]
            assert bool(found[row, column]) == (float(block.mean()) >= 0.5)
    fine_HW = torch.zeros(3 * FINE, 4 * FINE)
    fine_HW[FINE, 2 * FINE] = 1
    assert on_object(fine_HW, cells).nonzero().tolist() == [[1, 2]], "an object smaller than a cell"
    assert bool(on_object(torch.zeros(3 * FINE, 4 * FINE), cells).all()), "nothing known"


def test_windows_are_on_the_object_where_their_middle_is() -> None:
    windows = Cells((3, 3), (64, 64), extent=32, stride=16)
    fine_HW = torch.zeros(3 * FINE, 3 * FINE)
    fine_HW[:, : FINE + FINE // 2] = 1  # the left half
    assert on_object(fine_HW, windows).tolist() == [[True, True, False]] * 3


@pytest.mark.parametrize("preset", [QUICK, PAPER])
def test_prototypes_come_from_the_masks(table: Path, tmp_path: Path, preset: list[str]) -> None:
    options = ["--input-size", "128"]  # a map of 4x4
    likethat("train", table, "--out", tmp_path / "run", *preset, *options, "--on-object")
    network = load(tmp_path / "run", "cpu").networks[0]
    rows, columns = network.patch_grid
    assert rows >= 4
    for prototype in load(tmp_path / "run", "cpu").prototypes:
        assert prototype.row < rows / 2
        assert prototype.column < columns / 2
    assert json.loads(likethat("verify", tmp_path / "run", "--json", "--device", "cpu").stdout)["passed"]
    with open_editor(tmp_path / "run", device="cpu") as editor:
        offered = [candidate.patch for candidate in editor.candidates(0)]
    assert offered
    assert all(patch.row < rows / 2 and patch.column < columns / 2 for patch in offered), "corrections keep to it"


def test_boxes_of_the_data_set_are_objects_too(birds: Path) -> None:
    dataset, cells = open_dataset(birds), tiles((16, 16))
    on_NHW = object_cells(dataset, cells)
    boxes = json.loads((birds / "parts.json").read_text())
    for sample, on_HW in zip(dataset.train, on_NHW, strict=True):
        x0, y0, x1, y1 = boxes[sample.path]["bird"]
        expected = max(0, x1 - x0) * max(0, y1 - y0) / 64**2
        assert float(on_HW.float().mean()) == pytest.approx(expected, abs=0.12)


def test_boxes_of_a_table_are_objects_too(birds: Path, tmp_path: Path) -> None:
    pictures = sorted(path for path in birds.rglob("*.jpg") if "train" in path.parts)
    rows = [(path, path.parent.name, 32, 16, 64, 48) for path in pictures[1:]]
    rows.append((pictures[0], pictures[0].parent.name, *[""] * 4))
    with (tmp_path / "pictures.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "label", "x0", "y0", "x1", "y1"), *rows])
    whole = open_dataset(tmp_path / "pictures.csv", full_images=True, val_fraction=0.2)
    box_HW = torch.zeros(4, 4, dtype=torch.bool)
    box_HW[1:3, 2:] = True
    for sample, on_HW in zip(whole.train, object_cells(whole, tiles((4, 4))), strict=True):
        assert bool(on_HW.all()) if sample.object_box is None else torch.equal(on_HW, box_HW)
    cropped = open_dataset(tmp_path / "pictures.csv", val_fraction=0.2)
    assert bool(object_cells(cropped, tiles((4, 4))).all()), "nothing but the object is seen"


def test_data_without_masks_or_boxes_is_told(birds: Path, tmp_path: Path) -> None:
    for picture in birds.rglob("*.jpg"):
        place = tmp_path / "plain" / picture.relative_to(birds)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(picture.read_bytes())
    with pytest.raises(UserError, match="neither masks nor boxes"):
        object_cells(open_dataset(tmp_path / "plain"), tiles((4, 4)))


def test_a_cost_moves_evidence_onto_the_masks(table: Path, tmp_path: Path) -> None:
    options = [*TINY, "--input-size", "128", "--baseline-epochs", "1", "--joint-epochs", "8", "--backbone-lr", "0.003"]
    likethat("train", table, "--out", tmp_path / "run", *options, "--on-mask", "3", "--place", "0", "--cutmix", "0")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    costs = [line["train"]["on_mask"] for line in lines if line["stage"] == "joint"]
    assert len(costs) == 8
    assert costs[-1] < 0.9 * costs[0], costs


def test_a_cost_needs_maps_that_it_can_be_taken_of(table: Path, tmp_path: Path) -> None:
    done = likethat("train", table, "--out", tmp_path / "run", *PAPER, "--on-mask", "1", check=2)
    assert "--on-mask needs --similarity cosine" in done.stderr
