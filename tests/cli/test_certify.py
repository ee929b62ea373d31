"""`likethat certify` on runs: it must say of the projection what the networks themselves do before and after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.explain_run import TinyRun, make_run

from likethat.cli.parser import main
from likethat.data.formats import open_dataset
from likethat.explaining import certificate
from likethat.explaining.certificate import certify
from likethat.models.protopnet import summed_logits
from likethat.runs import layout
from likethat.runs.atomic_files import load_tensors, save_tensors
from likethat.runs.classifier import Classifier, load

CLASSES = ("class0", "class1", "class2")  # as `make_run` names its folders


def run_with_moves(folder: Path, size: float, *, ahead: int | None = None, **options: object) -> TinyRun:
    """A run whose last projection moved every coordinate by about `size`. With `ahead`, those of all other classes
    came from the opposite side, so that every picture was taken for this class before."""
    run = make_run(folder, CLASSES, per_class=2, pictures_per_class=6, **options)
    layer = run.model.prototype_layer
    start_PDhw = layer.prototype_PDhw.detach().clone()
    if ahead is not None:
        start_PDhw[layer.class_P != ahead] *= -1
    layer.unprojected_PDhw.copy_(start_PDhw + size * torch.randn(start_PDhw.shape))
    save_tensors(run.path / layout.MODEL, run.model.state_dict())
    return run


def predictions(classifier: Classifier, paths: list[Path], *, projected: bool) -> list[list[float]]:
    """Logits by the networks themselves, before or after their last projection."""
    kept = [member.prototype_layer.prototype_PDhw.detach().clone() for member in classifier.networks]
    with torch.no_grad():
        for member in classifier.networks:
            if not projected:
                member.prototype_layer.prototype_PDhw.copy_(member.prototype_layer.unprojected_PDhw)
        logits = [summed_logits(classifier.outputs([classifier.prepare(path)]))[0].tolist() for path in paths]
        for member, prototype_PDhw in zip(classifier.networks, kept, strict=True):
            member.prototype_layer.prototype_PDhw.copy_(prototype_PDhw)
    return logits


def certified_by_command(run: TinyRun, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["certify", str(run.path), "--device", "cpu", "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


@pytest.mark.parametrize("similarity", ["log", "cosine"])
@pytest.mark.parametrize("ahead", [None, 0, 1])
def test_the_command_agrees_with_the_network(
    tmp_path: Path, similarity: str, ahead: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_with_moves(
        tmp_path, 1e-4 if similarity == "log" else 1e-2, ahead=ahead, nonzero=0.0, similarity=similarity
    )
    document = certified_by_command(run, capsys)
    dataset = open_dataset(run.root)
    assert document["part"] == "test"
    assert document["images"] == len(dataset.test) == len(document["per_image"]) >= 3
    classifier = load(run.path, "cpu")
    paths = [run.root / sample.path for sample in dataset.test]
    before, after = (predictions(classifier, paths, projected=projected) for projected in (False, True))
    names = {
        when: [CLASSES[logits.index(max(logits))] for logits in rows]
        for when, rows in (("before", before), ("after", after))
    }
    assert [image["path"] for image in document["per_image"]] == [sample.path for sample in dataset.test]
    for when in names:
        assert [image["run"][when] for image in document["per_image"]] == names[when]
    changed = [one != other for one, other in zip(names["before"], names["after"], strict=True)]
    assert document["changed"] == sum(changed) / len(changed)
    if ahead is not None:
        assert set(names["before"]) == {CLASSES[ahead]}
    for image, logits in zip(document["per_image"], after, strict=True):
        others = [value for name, value in zip(CLASSES, logits, strict=True) if name != image["run"]["before"]]
        lead = logits[CLASSES.index(image["run"]["before"])] - max(others)
        assert image["run"]["bound"] <= lead + 1e-3
        assert image["run"]["certified"] == (image["run"]["bound"] > 1e-6)
    certified = [image["run"]["certified"] for image in document["per_image"]]
    assert document["bound"]["certified"] == sum(certified) / len(certified)
    assert any(certified) == (ahead is None)
    assert document["theorem"]["applies"] == (similarity == "log")
    assert (document["per_image"][0]["theorem"] is None) == (similarity != "log")
    assert main(["certify", str(run.path), "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert ("None of the certified predictions changed." in shown) == (ahead is None)
    assert ("No prediction is certified" in shown) == (ahead is not None)
    assert ("does not apply" in shown) == (similarity != "log")


def test_the_command_certifies_what_the_theorem_covers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prototypes of class 0 close to every picture's patches, the others far away: the pictures of class 0 are
    certified, and those of the other classes not even covered, since their own prototypes are too far."""
    run = run_with_moves(tmp_path, 0.0)
    classifier, samples = load(run.path, "cpu"), open_dataset(run.root).test
    pixels = [classifier.prepare(run.root / sample.path).pixels[0] for sample in samples if sample.label == 0]
    with torch.no_grad():
        patch_BDHW = run.model.latent(torch.stack(pixels).float() / 255)
    tensors, _ = load_tensors(run.path / layout.MODEL)
    centre_D = patch_BDHW.mean((0, 2, 3))
    before_PDhw = centre_D[None, :, None, None].repeat(6, 1, 1, 1)
    before_PDhw[:2, 0] += 0.3
    before_PDhw[2:, 0] += 5
    tensors["prototype_layer.unprojected_PDhw"] = before_PDhw
    tensors["prototype_layer.prototype_PDhw"] = before_PDhw + 1e-3
    save_tensors(run.path / layout.MODEL, tensors)
    document = certified_by_command(run, capsys)
    assert [image["theorem"]["certified"] for image in document["per_image"]] == [s.label == 0 for s in samples]
    share = len(pixels) / len(samples)
    assert document["theorem"]["certified"] == document["theorem"]["covered"] == share
    deltas = [image["theorem"]["delta"] for image in document["per_image"] if image["theorem"]["covered"]]
    assert document["theorem"]["delta"]["min"] == min(deltas) > 0
    assert all(image["a4"]["certified"] for image in document["per_image"])
    assert document["changed_a4"] == 0


def test_bounds_add_over_the_members_of_a_combined_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two networks with different inputs; the sum is certified as one, whatever each member would predict alone."""
    first = run_with_moves(tmp_path / "first", 1e-3)
    second = run_with_moves(tmp_path / "second", 1e-2, seed=1, similarity="cosine", input_size="64x96")
    both = Classifier(first.path, CLASSES, [first.model, second.model], [])
    samples = open_dataset(first.root).test
    found = certify(both, first.root, samples)
    assert "2 networks" in found.reason
    paths = [first.root / sample.path for sample in samples]
    after = predictions(both, paths, projected=True)
    before = predictions(both, paths, projected=False)
    assert [image.run.before for image in found.images] == [row.index(max(row)) for row in before]
    assert [image.run.after for image in found.images] == [row.index(max(row)) for row in after]
    for image, row in zip(found.images, after, strict=True):
        lead = row[image.run.before] - max(value for k, value in enumerate(row) if k != image.run.before)
        assert image.run.bound <= lead + 1e-3
    alone = [
        certify(Classifier(first.path, CLASSES, [m], []), first.root, samples) for m in (first.model, second.model)
    ]
    for image, one, other in zip(found.images, *(part.images for part in alone), strict=True):
        if one.run.before == other.run.before == image.run.before:
            assert image.run.bound >= one.run.bound + other.run.bound - 1e-9
    monkeypatch.setattr(certificate, "NUMBERS", 1)
    monkeypatch.setattr(certificate, "BATCH", 2)
    bounds = [image.run.bound for image in certify(both, first.root, samples).images]
    assert bounds == pytest.approx([image.run.bound for image in found.images], abs=1e-4)


def test_a_run_without_its_unprojected_prototypes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_with_moves(tmp_path, 0.0)
    run.model.prototype_layer.unprojected_PDhw.zero_()
    save_tensors(run.path / layout.MODEL, run.model.state_dict())
    assert main(["certify", str(run.path), "--device", "cpu"]) == 2
    assert "before the projection" in capsys.readouterr().err
