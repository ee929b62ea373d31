"""The atlas: right about the neighbours of every prototype, and a page that carries thousands of them."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.browser import chromium
from helpers.runs import make_tiny_run
from helpers.tiny import tiny_model
from PIL import Image

from likethat.cli.parser import main
from likethat.data.dataset import Sample
from likethat.explaining.atlas import Atlas, Entry, Neighbour, make_atlas
from likethat.explaining.boxes import activation_boxes
from likethat.explaining.latent import latent_space
from likethat.progress import Display
from likethat.report import atlas as pages
from likethat.report.atlas import write_atlas
from likethat.runs.classifier import Classifier, Prototype, load
from likethat.runs.data import open_run_data

K = 4


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_run(tmp_path_factory.mktemp("atlas"))


@pytest.fixture(scope="module")
def document(run: Path) -> dict[str, Any]:
    assert main(["atlas", str(run), "--k", str(K), "--device", "cpu"]) == 0
    made: dict[str, Any] = json.loads((run / "atlas" / "atlas.json").read_text())
    return made


@torch.no_grad()
def test_neighbours_are_those_of_a_plain_search(run: Path, document: dict[str, Any]) -> None:
    """Every image by itself, every prototype by itself."""
    classifier = load(run, "cpu")
    dataset = open_run_data(classifier, None)
    (model,) = classifier.networks
    height, width = model.backbone.input_size
    for part in ("train", "val"):
        samples = dataset.part(part)
        prepared = [classifier.prepare(dataset.root / sample.path, sample.box) for sample in samples]
        outputs = [classifier.outputs([picture])[0] for picture in prepared]
        for p, entry in enumerate(document["prototypes"]):
            nearest = sorted(range(len(samples)), key=lambda n: float(outputs[n].min_distance_BP[0, p]))[:K]
            assert [found["path"] for found in entry[part]] == [samples[n].path for n in nearest]
            for found, n in zip(entry[part], nearest, strict=True):
                map_HW = outputs[n].similarity_BPHW[0, p]
                place = int(outputs[n].distance_BPHW[0, p].argmin())
                assert (found["row"], found["column"]) == divmod(place, map_HW.shape[1])
                assert found["class"] == dataset.classes[samples[n].label]
                assert found["similarity"] == pytest.approx(float(map_HW.max()), rel=1e-3)
                assert found["distance"] == pytest.approx(float(outputs[n].min_distance_BP[0, p]), abs=1e-4)
                half_y, half_x = (
                    round(side / cells / 2) for side, cells in zip((height, width), map_HW.shape, strict=True)
                )
                ((x0, y0, x1, y1),) = activation_boxes(map_HW[None], (height, width))
                box = max(0, x0 - half_x), max(0, y0 - half_y), min(width, x1 + half_x), min(height, y1 + half_y)
                assert found["box"] == pytest.approx(prepared[n].views[0].to_file(box), abs=0.01)


def test_every_prototype_is_its_own_nearest_patch(run: Path, document: dict[str, Any]) -> None:
    for prototype, entry in zip(load(run, "cpu").prototypes, document["prototypes"], strict=True):
        first = entry["train"][0]
        assert (first["path"], first["row"], first["column"]) == (prototype.path, prototype.row, prototype.column)
        assert first["box"] == pytest.approx(prototype.box, abs=0.01)
        assert (entry["path"], entry["box"]) == (prototype.path, list(prototype.box))


def test_numbers_about_prototypes_and_their_space(run: Path, document: dict[str, Any]) -> None:
    classifier = load(run, "cpu")
    weight_KP, vectors = classifier.weight_KP, classifier.networks[0].prototype_layer.vectors().detach().double()
    within, between = [], []
    for prototype, entry in zip(classifier.prototypes, document["prototypes"], strict=True):
        own = [found["class"] == entry["class"] for found in entry["train"]]
        assert entry["purity"] == sum(own) / K
        assert entry["mixed"] == (entry["purity"] < 0.5)
        assert entry["val_purity"] == sum(found["class"] == entry["class"] for found in entry["val"]) / K
        weights = {name: float(w) for name, w in zip(classifier.classes, weight_KP[:, prototype.id], strict=True)}
        assert entry["weight"] == pytest.approx(weights.pop(entry["class"]), abs=1e-6)
        others = {name: weight for name, weight in weights.items() if weight}
        assert entry["other_weights"] == pytest.approx(others, abs=1e-6)
        for earlier in classifier.prototypes[: prototype.id]:
            distance = float((vectors[prototype.id] - vectors[earlier.id]).norm())
            (within if earlier.label == prototype.label else between).append(distance)
    summary = document["summary"]
    assert summary["mean_distance_within_class"] == pytest.approx(np.mean(within), rel=1e-5)
    assert summary["mean_distance_between_classes"] == pytest.approx(np.mean(between), rel=1e-5)
    assert summary["background_suspects"] == [e["id"] for e in document["prototypes"] if e["mixed"]]
    assert summary["never_leading"] == [e["id"] for e in document["prototypes"] if not e["leads"]]


@torch.no_grad()
def test_leaders_give_most_points_to_the_right_class(run: Path, document: dict[str, Any]) -> None:
    classifier = load(run, "cpu")
    dataset = open_run_data(classifier, None)
    leads = [0] * len(classifier.prototypes)
    for sample in (*dataset.train, *dataset.val):
        (output,) = classifier.outputs([classifier.prepare(dataset.root / sample.path, sample.box)])
        points_P = output.score_BP[0] * classifier.weight_KP[sample.label]
        if points_P.max() > 0:
            leads[int(points_P.argmax())] += 1
    assert [entry["leads"] for entry in document["prototypes"]] == leads


def test_combined_networks_and_uneven_classes(run: Path) -> None:
    """A second member with fewer prototypes in one class: each is searched in its own space."""
    first, second = load(run, "cpu"), load(run, "cpu")
    (network,) = second.networks
    kept = torch.tensor([number for number in range(len(second.prototypes)) if number not in (0, 1)])
    layer = network.prototype_layer
    layer.prototype_PDhw = torch.nn.Parameter(layer.prototype_PDhw[kept])
    layer.class_P, layer.unprojected_PDhw = layer.class_P[kept], layer.unprojected_PDhw[kept]
    network.last_layer.weight = torch.nn.Parameter(2 * network.last_layer.weight[:, kept])
    count = len(first.prototypes)
    others = [replace(second.prototypes[n], id=count + place, member=1) for place, n in enumerate(kept.tolist())]
    both = Classifier(run, first.classes, [*first.networks, network], [*first.prototypes, *others])
    dataset = open_run_data(first, None)
    single = make_atlas(first, dataset, 2, Display(quiet=True))
    atlas = make_atlas(both, dataset, 2, Display(quiet=True))
    assert len(atlas.entries) == 2 * count - 2
    assert [entry.train for entry in atlas.entries[:count]] == [entry.train for entry in single.entries]
    for entry, n in zip(atlas.entries[count:], kept.tolist(), strict=True):
        for found, alone in zip(entry.train, single.entries[n].train, strict=True):
            # Products of matrices of another size may round otherwise.
            assert replace(found, similarity=0.0, distance=0.0) == replace(alone, similarity=0.0, distance=0.0)
            assert found.similarity == pytest.approx(alone.similarity, rel=1e-5)
            assert found.distance == pytest.approx(alone.distance, rel=1e-5, abs=1e-6)
        assert entry.repeats is None, "the same patch of another network is no duplicate"
        assert entry.weight == 2 * single.entries[n].weight
        assert entry.leads >= single.entries[n].leads, "with twice the weight it leads wherever it led"
    assert sum(entry.leads for entry in atlas.entries) == sum(entry.leads for entry in single.entries)


def test_duplicates_and_unused_prototypes_are_found(run: Path) -> None:
    classifier = load(run, "cpu")
    (network,) = classifier.networks
    with torch.no_grad():
        network.prototype_layer.prototype_PDhw[5] = network.prototype_layer.prototype_PDhw[2]
        network.last_layer.weight[:, 3] = 0
    moved = replace(classifier.prototypes[7], sha256="f" * 64, row=0, column=0)
    prototypes = [*classifier.prototypes[:7], moved, replace(moved, id=8)]
    changed = Classifier(run, classifier.classes, [network], prototypes)
    expected: list[int | None] = [None] * 9
    expected[5], expected[8] = 2, 7
    assert latent_space(changed).first_same_P == tuple(expected)
    atlas = make_atlas(changed, open_run_data(classifier, None), 1, Display(quiet=True))
    assert atlas.duplicates == [(2, 5), (7, 8)]
    unused = (network.last_layer.weight == 0).all(0).nonzero()[:, 0].tolist()
    assert 3 in unused
    assert atlas.never_used == unused
    assert atlas.entries[3].leads == 0


def test_mistakes_get_a_sentence(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*arguments: object) -> str:
        capsys.readouterr()
        assert main(["atlas", *map(str, arguments), "--device", "cpu", "--out", str(tmp_path / "out")]) == 2
        assert sorted(path.name for path in tmp_path.iterdir() if "out" in path.name) == []
        return capsys.readouterr().err

    assert "--k is 0" in refused(run, "--k", 0)
    source = load(run, "cpu").prototypes[0].path
    for name, message in (("changed", "has changed or gone"), ("gone", "has changed or gone")):
        data = shutil.copytree(run.parent / "birds", tmp_path / name)
        if name == "changed":
            Image.new("RGB", (64, 64), "red").save(data / source)
        else:
            (data / source).unlink()
        assert message in refused(run, "--data", data)
    data = shutil.copytree(run.parent / "birds", tmp_path / "other")
    next((data / "test").rglob("*.jpg")).unlink()
    assert "not those that" in refused(run, "--data", data)
    assert "does not exist" in refused(run, "--data", tmp_path / "nowhere")
    unfinished = shutil.copytree(run, tmp_path / "unfinished")
    (unfinished / "model.safetensors").unlink()
    assert "unfinished" in refused(unfinished)


def test_data_that_moved_is_found_where_the_user_says(run: Path, tmp_path: Path, document: dict[str, Any]) -> None:
    data = shutil.copytree(run.parent / "birds", tmp_path / "moved")
    out = tmp_path / "out"
    assert main(["atlas", str(run), "--k", str(K), "--data", str(data), "--out", str(out), "--device", "cpu"]) == 0
    again = json.loads((out / "atlas.json").read_text())
    assert again["data"] == str(data)
    assert again["prototypes"] == document["prototypes"]


def large_atlas(folder: Path, classes: int = 200, per_class: int = 10, pictures: int = 400) -> Atlas:
    """Thousands of prototypes without a training: neighbours at random, in crops of a few noisy files,
    which are the hardest to compress; and every prototype connected to every class."""
    chance = random.Random(0)
    (folder / "prototypes").mkdir(parents=True)
    noise = np.random.default_rng(0)
    for number in range(10):
        pixels = noise.integers(0, 256, (150, 200, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png", compress_level=1)
    Image.new("RGB", (60, 40), "teal").save(folder / "prototypes" / "crop.jpg")
    Image.new("RGB", (200, 150), "olive").save(folder / "prototypes" / "source.jpg")
    names = tuple(f"{number:03d}.<b>Species & Son</b>" for number in range(classes))
    samples = [
        Sample(
            f"{number % 10}.png", number % classes, (number // 10 % 100, number // 1000, 100 + number // 10 % 100, 130)
        )
        for number in range(pictures)
    ]
    entries, prototypes = [], []
    weights = dict.fromkeys(names, -0.123456)
    for p in range(classes * per_class):
        label = p // per_class
        source = samples[label + classes * (p % (pictures // classes))]
        prototype = Prototype(
            id=p, label=label, class_name=names[label], path=source.path, sha256="", row=0, column=0,
            cell=(0, 0, 9, 9), box=(0, 0, 9, 9), crop_to=source.box, moved=chance.random(),
            crop="prototypes/crop.jpg", source="prototypes/source.jpg", source_box=(20, 15, 100, 75),
        )  # fmt: skip
        found = [
            [
                Neighbour(source if not n else chance.choice(samples), 5.0 - n, 0.1, 0, 0, (0.1, 0.1, 0.5, 0.4))
                for n in range(5)
            ]
            for _ in range(2)
        ]
        weight = chance.uniform(0, 3)
        others = {name: other for name, other in weights.items() if name != names[label]}
        purity = chance.randrange(1, 6) / 5
        repeats = p - 1 if p % 100 == 99 else None
        entries.append(Entry(prototype, weight, others, tuple(found[0]), tuple(found[1]), purity, 0.2, p % 3, repeats))
        prototypes.append(prototype)
    classifier = Classifier(folder, names, [tiny_model([1] * classes)], prototypes)
    return Atlas(classifier, folder, 5, {"train": pictures, "val": pictures}, tuple(entries), 0.5, 1.0)


SCROLL = """
scrollBy(0, 1500);
requestAnimationFrame(() => requestAnimationFrame(arguments[0]));
"""
FILL_ALL = """
for (const node of document.querySelectorAll('.proto:empty')) fill(node, waiting.get(node));
requestAnimationFrame(() => requestAnimationFrame(arguments[0]));
"""
FIRST_TWELVE = """
const done = arguments[0];
function look() {
  const first = [...document.images].slice(0, 12);
  if (first.length === 12 && first.every((image) => image.complete && image.naturalWidth)) done();
  else setTimeout(look, 20);
}
look();
"""
MARKED = """return Object.fromEntries([...document.querySelectorAll('.proto')].filter((node) => node.firstChild)
    .map((node) => [node.id.slice(1), node.textContent.includes('mixed neighbours')]));"""
SHOWN = """return [...document.querySelectorAll('.proto')].map((node) => waiting.get(node))
    .map(({id, label, purity, weight, moved}) => ({id, label, purity, weight, moved}));"""


def page_seconds(browser: Any) -> float:
    """Of the processor, for the page's own thread: what else the machine does is not counted."""
    metrics = browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    return float(next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration"))


def test_a_page_of_two_thousand_prototypes(tmp_path: Path) -> None:
    """In a real browser: it opens, sorts and filters at once, and scrolls with little work."""
    atlas = large_atlas(tmp_path / "run")
    with chromium() as browser:
        folder = tmp_path / "atlas"
        folder.mkdir()
        write_atlas(folder, atlas)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        assert size < 60e6
        browser.get((folder / "index.html").as_uri())
        count = browser.find_element("id", "count")
        assert count.text == "2,000 of 2,000"

        def choose(field: str, value: str) -> list[dict[str, Any]]:
            browser.execute_script(
                "const field = tools.elements[arguments[0]]; field.value = arguments[1];"
                "field.dispatchEvent(new Event('input', {bubbles: true}))",
                field,
                value,
            )
            shown: list[dict[str, Any]] = browser.execute_script(SHOWN)
            assert count.text == f"{len(shown):,} of 2,000"
            return shown

        for field in ("purity", "weight", "moved"):
            shown = choose("sort", field)
            assert [entry[field] for entry in shown] == sorted(entry[field] for entry in shown)
            assert choose("sort", f"-{field}")[0][field] == max(entry[field] for entry in shown)
        assert choose("sort", "class") == sorted(shown, key=lambda entry: int(entry["id"]))
        assert len(choose("moved-min", "0.5")) == sum(entry.prototype.moved >= 0.49995 for entry in atlas.entries)
        choose("moved-min", "")
        assert {entry["purity"] for entry in choose("purity-max", "40")} == {0.2, 0.4}
        choose("purity-max", "")
        assert [entry["id"] for entry in choose("kind", "mixed")] == atlas.mixed
        assert [entry["id"] for entry in choose("kind", "repeats")] == [second for _, second in atlas.duplicates]
        choose("kind", "")
        shown = choose("label", "7")
        assert [entry["id"] for entry in shown] == list(range(70, 80))
        heading = browser.find_element("css selector", ".group")
        assert heading.text == "007.<b>Species & Son</b>", "names are text, whatever they hold"
        choose("label", "")

        browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
        spent = [page_seconds(browser)]
        for _ in range(60):
            browser.execute_async_script(SCROLL)
            spent.append(page_seconds(browser))
        steps = sorted(after - before for before, after in pairwise(spent))
        assert browser.execute_script("return scrollY") > 50_000
        loaded = browser.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
        assert all(name.startswith("file:") for name in loaded)
        # Pictures in sight are there.
        browser.execute_script("scrollTo(0, 0)")
        browser.execute_async_script(FIRST_TWELVE)
        marked = browser.execute_script(MARKED)
        assert 20 < len(marked) < 500, "cards near the places that were looked at"
        assert all(is_marked == (int(number) in atlas.mixed) for number, is_marked in marked.items())
        assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
        assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
        before = page_seconds(browser)
        browser.execute_async_script(FILL_ALL)
        assert steps[57] < (page_seconds(browser) - before) / 3, "a step's work, against that for all cards"


def test_pictures_keep_to_their_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise is the hardest picture to compress; its quality gives way."""
    atlas = large_atlas(tmp_path / "run", classes=4, per_class=5, pictures=80)
    sizes = {}
    for budget in (30_000_000, 200_000):
        monkeypatch.setattr(pages, "BUDGET", budget)
        folder = tmp_path / str(budget)
        folder.mkdir()
        write_atlas(folder, atlas)
        files = [path for path in (folder / "pictures").iterdir() if not path.name.startswith("p")]
        sizes[budget] = sum(path.stat().st_size for path in files)
        assert sizes[budget] < budget
    assert sizes[30_000_000] > 200_000
