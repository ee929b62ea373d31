"""Where similarities come from: attributions against slow, obvious versions, and what pages make of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.explain_run import TinyRun, make_run
from helpers.tiny import tiny_model
from pixel_deletion import deletion_curves
from torch import Tensor

from likethat.cli.parser import main
from likethat.data.decode import read_image, to_input
from likethat.errors import UserError
from likethat.explaining import attribution, explanation, sources
from likethat.explaining.attribution import (
    GRID,
    WINDOW,
    attribute,
    flat,
    gradient_times_input,
    occlusion,
    similarity_at,
    smooth,
)
from likethat.explaining.boxes import activation_boxes
from likethat.explaining.explanation import Explanation, Options, explain, explain_batch
from likethat.explaining.files import explain_files
from likethat.models.protopnet import ProtoPNet
from likethat.runs.classifier import Classifier, load

METHODS = ("upsampling", "gradient", "occlusion")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_run(tmp_path_factory.mktemp("attribution"), nonzero=1.0, per_class=4)


@pytest.fixture
def case() -> tuple[ProtoPNet, Tensor, Tensor, Tensor]:
    """A network, a picture of stripes, some prototypes and the patches they match."""
    network = tiny_model([2, 2], input_size="96x128").eval()
    x_3HW = torch.rand(3, 12, 16).repeat_interleave(8, 1).repeat_interleave(8, 2)
    chosen_p = torch.tensor([3, 0, 1])
    with torch.no_grad():
        patch_p = network(x_3HW[None]).distance_BPHW[0, chosen_p].flatten(1).argmin(1)
    return network, x_3HW, chosen_p, patch_p


def test_similarity_is_taken_at_the_matched_patch(case: tuple[ProtoPNet, Tensor, Tensor, Tensor]) -> None:
    network, x_3HW, chosen_p, patch_p = case
    with torch.no_grad():
        assert torch.equal(
            similarity_at(network, x_3HW[None], chosen_p, patch_p)[0], network(x_3HW[None]).score_BP[0, chosen_p]
        )


def test_occlusion_is_what_loops_find(case: tuple[ProtoPNet, Tensor, Tensor, Tensor]) -> None:
    network, x_3HW, chosen_p, patch_p = case
    height, width = x_3HW.shape[1:]
    row_of, column_of = ([pixel * GRID // side for pixel in range(side)] for side in (height, width))
    whole = similarity_at(network, x_3HW[None], chosen_p, patch_p)[0]
    lost, windows = torch.zeros(3, GRID, GRID), torch.zeros(GRID, GRID)
    for top in range(1 - WINDOW, GRID):
        for left in range(1 - WINDOW, GRID):
            rows = [y for y in range(height) if top <= row_of[y] < top + WINDOW]
            columns = [x for x in range(width) if left <= column_of[x] < left + WINDOW]
            hidden = x_3HW.clone()
            for colour in range(3):
                for y in rows:
                    hidden[colour, y, columns] = x_3HW[colour].mean()
            with torch.no_grad():
                drop_p = whole - similarity_at(network, hidden[None], chosen_p, patch_p)[0]
            for row in range(max(top, 0), min(top + WINDOW, GRID)):
                for column in range(max(left, 0), min(left + WINDOW, GRID)):
                    lost[:, row, column] += drop_p
                    windows[row, column] += 1
    assert (windows == WINDOW**2).all()
    assert lost.abs().max() > 0.02
    assert torch.allclose(occlusion(network, x_3HW, chosen_p, patch_p), lost / windows, atol=1e-5)


def test_occlusion_with_windows_further_apart_still_covers_every_cell(
    case: tuple[ProtoPNet, Tensor, Tensor, Tensor],
) -> None:
    _, cover_wHW = attribution._windows(case[1].shape[1:], 2)
    assert len(cover_wHW) == (GRID // 2 + 1) ** 2
    assert int(cover_wHW.sum(0).min()) >= 1
    fine_pHW, coarse_pHW = (occlusion(*case, step) for step in (1, 2))
    likeness_p = torch.nn.functional.cosine_similarity(fine_pHW.flatten(1), coarse_pHW.flatten(1))
    assert float(likeness_p.min()) > 0.7


def test_gradients_add_up_to_the_similarity(case: tuple[ProtoPNet, Tensor, Tensor, Tensor]) -> None:
    """Without noise, on a fine way, as integrated gradients do."""
    network, x_3HW, chosen_p, patch_p = case
    map_pHW = gradient_times_input(network, x_3HW, chosen_p, patch_p, steps=200, noise=0.0)
    with torch.no_grad():
        full_p, empty_p = similarity_at(network, torch.stack([x_3HW, flat(x_3HW)]), chosen_p, patch_p)
    assert (full_p - empty_p).abs().max() > 0.02
    assert torch.allclose(map_pHW.sum((1, 2)), full_p - empty_p, atol=1e-3)


def test_gradients_of_prototypes_one_by_one_or_together(
    case: tuple[ProtoPNet, Tensor, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    one_by_one = gradient_times_input(*case)
    monkeypatch.setattr(attribution, "AT_ONCE", {"cpu": 2})
    together = gradient_times_input(*case)
    assert torch.allclose(one_by_one, together, atol=1e-6)
    network, x_3HW, chosen_p, patch_p = case
    alone = gradient_times_input(network, x_3HW, chosen_p[1:2], patch_p[1:2])
    assert torch.allclose(one_by_one[1:2], alone, atol=1e-6)
    assert one_by_one[0].abs().max() > 1e-6
    assert all(parameter.grad is None for parameter in network.parameters())


@pytest.mark.parametrize("size_hw", [(224, 224), (300, 100), (7, 5), (1, 1)])
def test_smoothing_takes_pictures_of_any_size_and_keeps_a_flat_map(size_hw: tuple[int, int]) -> None:
    map_pHW = torch.full((2, *size_hw), 0.5)
    found = smooth(map_pHW)
    assert found.shape == (2, min(56, size_hw[0]), min(56, size_hw[1]))
    assert torch.allclose(found, torch.tensor(0.5))


def test_deletion_curves_are_what_loops_find(case: tuple[ProtoPNet, Tensor, Tensor, Tensor]) -> None:
    network, x_3HW, chosen_p, _ = case
    height, width = x_3HW.shape[1:]
    map_pHW = torch.rand(3, height, width)  # as fine as the picture: no upsampling to be imitated
    shares = (0.0, 0.1, 0.5, 1.0)
    found = deletion_curves(network, x_3HW, chosen_p, map_pHW, shares, torch.zeros_like(x_3HW))
    for row, p in enumerate(chosen_p.tolist()):
        order = sorted(range(height * width), key=lambda n: -float(map_pHW[row].flatten()[n]))
        for column, share in enumerate(shares):
            changed = x_3HW.flatten(1).clone()
            changed[:, order[: round(share * height * width)]] = 0
            with torch.no_grad():
                scores = network(torch.stack([changed.view_as(x_3HW), x_3HW])).score_BP[:, p]
            assert float(found[row, column]) == pytest.approx(float(scores[0] / scores[1]), abs=1e-4)
    assert (found[:, 0] == 1).all()
    assert found[:, 3].max() != 1


# --- explanations ---


def matches_of(found: Explanation) -> list[explanation.Match]:
    return [*found.nearest, *(row.match for sheet in found.classes for row in sheet.rows)]


@pytest.mark.parametrize("method", METHODS)
def test_boxes_and_maps_follow_the_method(run: TinyRun, method: str) -> None:
    classifier, picture = load(run.path, "cpu"), run.root / run.samples[0].path
    found, usual = (explain(classifier, picture, attribution=name) for name in (method, "upsampling"))
    prepared = classifier.prepare(picture)
    numbers = sorted({match.prototype.id for match in matches_of(found)})
    maps = attribute(classifier.networks[0], prepared.pixels[0].float() / 255, torch.tensor(numbers), method)
    boxes = activation_boxes(maps, prepared.views[0].input_hw)
    for match in matches_of(found):
        place = numbers.index(match.prototype.id)
        assert match.attribution == method
        assert torch.allclose(match.map_HW, maps[place], atol=1e-5)
        assert match.box == pytest.approx(prepared.views[0].to_file(boxes[place]), abs=1e-6)
    assert [[row.points for row in sheet.rows] for sheet in found.classes] == [
        [row.points for row in sheet.rows] for sheet in usual.classes
    ], "where the evidence lies does not change what it counts"
    document = found.to_dict(maps=True)
    assert document["attribution"] == method
    assert np.shape(document["maps"][numbers[0]]) == maps.shape[1:]
    same = [one.box == other.box for one, other in zip(matches_of(found), matches_of(usual), strict=True)]
    assert all(same) == (method == "upsampling")


@pytest.mark.parametrize("method", METHODS[1:])
def test_prototypes_are_found_in_their_own_pictures_by_the_same_method(
    run: TinyRun, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    classifier, picture = load(run.path, "cpu"), run.root / run.samples[0].path
    (run.path / "attribution.safetensors").unlink(missing_ok=True)
    found = explain(classifier, picture, attribution=method)
    network = classifier.networks[0]
    for match in found.nearest:
        prototype = match.prototype
        pixels, _ = to_input(read_image(run.path / prototype.source), None, network.backbone.input_size)
        x_3HW = torch.from_numpy(pixels).permute(2, 0, 1) / 255
        patch_1 = torch.tensor([prototype.row * network.patch_grid[1] + prototype.column])
        map_1HW = attribute(network, x_3HW, torch.tensor([prototype.id]), method, patch_1, step=2)
        height, width = network.backbone.input_size
        x0, y0, x1, y1 = activation_boxes(map_1HW, (height, width))[0]
        assert match.source_share == pytest.approx((x0 / width, y0 / height, x1 / width, y1 / height), abs=0.02)
        assert match.to_dict()["source"]["share"] == list(match.source_share)
    usual = explain(classifier, picture)
    assert all(match.source_share is None for match in matches_of(usual))
    source, box = read_image(run.path / found.nearest[0].prototype.source), found.nearest[0].source_share
    assert found.source_part(found.nearest[0]).width == pytest.approx((box[2] - box[0]) * source.width, abs=1)
    monkeypatch.setattr(sources, "attribute", None)  # what was found is kept: for this model, and for who loads it anew
    for again in (classifier, load(run.path, "cpu")):
        kept = explain(again, picture, attribution=method, percentile=90.0)
        assert {m.prototype.id for m in kept.nearest if m.source_share} == {m.prototype.id for m in kept.nearest}
        assert all(m.source_share[2] - m.source_share[0] > 0 for m in kept.nearest)


def test_what_was_kept_is_of_no_use_to_another_network(run: TinyRun, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", seed=3)
    explain(load(run.path, "cpu"), run.root / run.samples[0].path, attribution="gradient", top_classes=1)
    kept = run.path / "attribution.safetensors"
    assert sources._load(run.path)
    shutil.copy(kept, other.path)
    assert sources._load(other.path) == {}
    (other.path / kept.name).write_bytes(b"no tensors")
    assert sources._load(other.path) == {}


def test_patience_ends_and_what_was_not_come_to_stays_where_the_run_says(run: TinyRun) -> None:
    (run.path / "attribution.safetensors").unlink(missing_ok=True)
    classifier = load(run.path, "cpu")
    prepared, options = (
        classifier.prepare(run.root / run.samples[0].path),
        Options(attribution="gradient", patience=0.0),
    )
    counts = []
    for _ in range(2):
        (found,) = explain_batch(classifier, [prepared], options)
        counts.append(len({m.prototype.id for m in matches_of(found) if m.source_share}))
    assert 0 < counts[0] < counts[1]
    assert found.nearest[0].source_share, "the most similar come first"
    found.png()


def test_what_no_page_shows_is_not_located_at_such_cost(run: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explanation, "CLOSELY", 2)
    monkeypatch.setattr(explanation, "NEAREST", 1)
    found = explain(load(run.path, "cpu"), run.root / run.samples[0].path, attribution="occlusion", top_classes=1)
    by_points = sorted(found.predicted.rows, key=lambda row: -abs(row.points))
    nearest = found.nearest[0].prototype.id
    assert len(by_points) == 12
    for number, row in enumerate(by_points):
        closely = number < 2 or row.match.prototype.id == nearest
        assert row.match.attribution == ("occlusion" if closely else "upsampling")


def test_every_network_of_a_combined_run_is_asked(run: TinyRun, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", seed=3)
    first = load(run.path, "cpu")
    for picture in (other.path / "prototypes").glob("source-*.jpg"):
        shutil.copy(picture, run.path / "prototypes")
    both = Classifier(run.path, run.classes, [*first.networks, other.model], [*first.prototypes, *other.prototypes])
    picture = run.root / run.samples[0].path
    found = explain(both, picture, attribution="occlusion")
    alone = explain(first, picture, attribution="occlusion")
    maps = {id(match.prototype): match.map_HW for match in matches_of(alone)}
    assert {match.attribution for match in matches_of(found)} == {"occlusion"}
    compared = [match for match in matches_of(found) if id(match.prototype) in maps]
    assert len(compared) > 10
    assert all(torch.allclose(match.map_HW, maps[id(match.prototype)], atol=1e-5) for match in compared)


def test_the_command_shows_the_method(run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, pages, sheets = str(run.root / run.samples[0].path), {}, {}
    for method, title in zip(METHODS, ("Activation map", "Gradient x input", "Occlusion"), strict=True):
        out = tmp_path / method
        arguments = ["explain", str(run.path), picture, "--out", str(out), "--attribution", method, "--device", "cpu"]
        assert main(arguments) == 0
        pages[method] = (out / "explanations.html").read_text()
        sheets[method] = (out / "0.png").read_bytes()
        assert f"<span>{title}</span>" in pages[method]
        assert ("painted over" in pages[method]) == (method == "occlusion")
        document: dict[str, Any] = json.loads((out / "explanations.json").read_text())
        assert document["images"][0]["attribution"] == method
    assert len(set(pages.values())) == len(set(sheets.values())) == 3
    capsys.readouterr()
    assert main(["explain", str(run.path), picture, "--attribution", "magic"]) == 2
    assert "invalid choice: 'magic'" in capsys.readouterr().err
    with pytest.raises(UserError, match="choose one of upsampling, gradient, occlusion"):
        explain(load(run.path, "cpu"), picture, attribution="magic")


def test_slow_methods_show_their_progress_picture_by_picture(run: TinyRun) -> None:
    paths = [str(run.root / sample.path) for sample in run.samples[:3]]
    for method, expected in (("gradient", [(1, 3), (2, 3), (3, 3)]), ("upsampling", [(3, 3)])):
        steps: list[tuple[int, int]] = []
        found = list(
            explain_files(load(run.path, "cpu"), paths, Options(attribution=method), lambda *step: steps.append(step))  # noqa: B023
        )
        assert steps == expected
        assert [answer.path for answer in found] == paths
