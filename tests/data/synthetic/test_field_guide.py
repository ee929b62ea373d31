"""The embedded birds: reproducible, true part boxes, and pairs of species that differ in one part."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from likethat.data.synthetic.birds import PARTS
from likethat.data.synthetic.field_guide import PALETTE, SPECIES, Species, make_birds, part_boxes, single_part_pairs
from likethat.data.synthetic.scenes import Scene, draw_picture, sample_scene

BY_FOLDER = {species.folder: species for species in SPECIES}
SIZE = 192


def contents(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def birds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    dest = tmp_path_factory.mktemp("synth") / "new" / "birds"
    make_birds(dest, species=8, train=3, val=1, test=2, size=96, seed=5)
    return dest


def test_same_seed_same_bytes_and_another_seed_other_images(birds: Path, tmp_path: Path) -> None:
    make_birds(tmp_path / "again", species=8, train=3, val=1, test=2, size=96, seed=5)
    make_birds(tmp_path / "other", species=8, train=3, val=1, test=2, size=96, seed=6)
    first, again, other = contents(birds), contents(tmp_path / "again"), contents(tmp_path / "other")
    assert first == again
    assert first.keys() == other.keys()
    assert all(first[name] != other[name] for name in first if name.endswith(".jpg"))


def test_no_two_images_are_the_same(birds: Path) -> None:
    images = [data for name, data in contents(birds).items() if name.endswith(".jpg")]
    assert len(set(images)) == len(images)


def test_fewer_images_are_the_first_of_more(birds: Path, tmp_path: Path) -> None:
    """An image depends on its own split, species and number only."""
    make_birds(tmp_path, species=2, train=1, val=0, test=1, size=96, seed=5)
    more = contents(birds)
    for name, data in contents(tmp_path).items():
        if name.endswith(".jpg"):
            assert data == more[name]


def test_folders_counts_and_sizes(birds: Path) -> None:
    folders = [species.folder for species in SPECIES[:8]]
    for split, count in (("train", 3), ("val", 1), ("test", 2)):
        assert sorted(p.name for p in (birds / split).iterdir()) == sorted(folders)
        for folder in folders:
            images = list((birds / split / folder).iterdir())
            assert len(images) == count
            assert all(Image.open(path).size == (96, 96) for path in images)
    assert sorted(p.name for p in birds.iterdir()) == ["parts.json", "species.json", "test", "train", "val"]


def test_progress_counts_every_image(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    make_birds(tmp_path, species=2, train=2, val=1, test=1, size=64, progress=lambda *step: seen.append(step))
    assert seen == [(n, 8) for n in range(1, 9)]


def test_parts_json_has_a_box_inside_the_image_for_every_part_of_every_image(birds: Path) -> None:
    boxes = json.loads((birds / "parts.json").read_text())
    assert boxes.keys() == {name for name in contents(birds) if name.endswith(".jpg")}
    for of_image in boxes.values():
        assert of_image.keys() == {*PARTS, "eye", "bird"}
        bird = of_image["bird"]
        for x0, y0, x1, y1 in of_image.values():
            assert 0 <= x0 < x1 <= 96
            assert 0 <= y0 < y1 <= 96
            assert bird[0] <= x0
            assert bird[1] <= y0
            assert x1 <= bird[2]
            assert y1 <= bird[3]


def test_species_json_names_pairs_of_four_different_parts(birds: Path) -> None:
    guide = json.loads((birds / "species.json").read_text())
    parts_of = {entry["class"]: entry["parts"] for entry in guide["species"]}
    assert parts_of.keys() == {p.name for p in (birds / "train").iterdir()}
    assert [pair["part"] for pair in guide["pairs"]] == ["crown", "throat", "belly", "wing bars"]
    for pair in guide["pairs"]:
        a, b = parts_of[pair["a"]], parts_of[pair["b"]]
        assert [part for part in a if a[part] != b[part]] == [pair["part"]]


def test_all_sixteen_species_differ_and_every_part_decides_a_pair() -> None:
    assert len({species.colours for species in SPECIES}) == len({species.folder for species in SPECIES}) == 16
    assert {pair["part"] for pair in single_part_pairs(SPECIES)} == set(PARTS)


@pytest.mark.parametrize("pair", single_part_pairs(SPECIES), ids=lambda pair: f"{pair['a']}-{pair['part']}")
def test_a_pair_in_the_same_scene_differs_in_its_part_only(pair: dict[str, str]) -> None:
    for seed in range(3):
        scene = sample_scene(np.random.default_rng(seed))
        a = draw_picture(BY_FOLDER[pair["a"]].palette, scene, SIZE)
        b = draw_picture(BY_FOLDER[pair["b"]].palette, scene, SIZE)
        assert part_boxes(a.visible) == part_boxes(b.visible)
        x0, y0, x1, y1 = part_boxes(a.visible)[pair["part"]]
        changed = np.abs(a.rgb - b.rgb).max(0)
        margin = 4  # the frayed edge of a patch, fainter than half
        outside = np.ones_like(changed, bool)
        outside[max(0, y0 - margin) : y1 + margin, max(0, x0 - margin) : x1 + margin] = False
        assert changed[outside].max() == 0
        assert np.median(changed[a.visible[pair["part"]] > 0.9]) > 50  # and there it is plain to see


@pytest.mark.parametrize("species", SPECIES, ids=lambda species: species.folder)
def test_each_part_shows_the_colour_of_its_species(species: Species) -> None:
    for seed in range(3):
        scene = Scene(pose=sample_scene(np.random.default_rng(seed)).pose, seed=seed)
        canvas = draw_picture(species.palette, scene, SIZE)
        for part, colour in species.parts.items():
            shown = np.median(canvas.rgb[:, canvas.visible[part] > 0.9], axis=1)
            # Of the colours in use for the part, under any plausible shade, its own explains the pixels best.
            errors = {
                rival: min(
                    np.abs(shown - shade * np.array(PALETTE[rival])).sum() for shade in np.arange(0.7, 1.2, 0.02)
                )
                for rival in {other.parts[part] for other in SPECIES}
            }
            assert min(errors, key=lambda rival: errors[rival]) == colour, part
            assert errors[colour] < 40


def test_parts_are_large_enough_to_be_seen() -> None:
    for seed in range(20):
        boxes = part_boxes(draw_picture(SPECIES[0].palette, sample_scene(np.random.default_rng(seed)), SIZE).visible)
        length = max(boxes["bird"][2] - boxes["bird"][0], boxes["bird"][3] - boxes["bird"][1])
        for part in PARTS:
            x0, y0, x1, y1 = boxes[part]
            assert max(x1 - x0, y1 - y0) > 0.08 * length


def test_the_bird_box_is_where_the_picture_differs_from_an_empty_scene() -> None:
    """Two birds of no common colour differ over the whole bird but for the shared plumage, and nowhere else."""
    scene = sample_scene(np.random.default_rng(11))
    bright = draw_picture(dict.fromkeys(PARTS, (250, 30, 250)), scene, SIZE)
    dark = draw_picture(dict.fromkeys(PARTS, (10, 90, 10)), scene, SIZE)
    ys, xs = np.nonzero(np.abs(bright.rgb - dark.rgb).max(0) > 30)
    x0, y0, x1, y1 = part_boxes(bright.visible)["bird"]
    assert np.abs(np.array([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]) - [x0, y0, x1, y1]).max() <= 2
