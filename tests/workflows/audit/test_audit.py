"""`likethat data audit`: swapped labels of real birds are found, and nothing about a picture rests on its own label."""

from __future__ import annotations

import csv
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from bench_audit import share_found, swap_labels
from helpers.runs import QUICK, TINY, likethat, make_tiny_run

from likethat.config.presets import resolve
from likethat.explaining.explanation import explain
from likethat.progress import Display
from likethat.runs.classifier import load
from likethat.runs.data import open_run_data
from likethat.training.last_layer import solve_last_layer
from likethat.workflows.audit import opinions
from likethat.workflows.audit.opinions import opinion_of_features, refitted_logits
from likethat.workflows.audit.run import Doubt, audit_run, explain_without_itself

SHARED = Path(__file__).resolve().parents[4] / "shared" / "cub"
SPECIES = ("001.", "010.", "017.", "020.", "025.", "036.", "042.", "047.")


def unpack_some(folder: Path) -> Path:
    """Unpack 24 training and 2 test images of each of eight species of CUB, with tables of them alone."""
    with tarfile.open(SHARED / "annotations.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    root = folder / "CUB_200_2011"

    def rows(name: str) -> list[list[str]]:
        return [line.split(maxsplit=1) for line in (root / name).read_text().splitlines()]

    split, taken, count = dict(rows("train_test_split.txt")), {}, {}
    for key, path in rows("images.txt"):
        if path.startswith(SPECIES):
            kind = path[:4], split[key].strip()
            count[kind] = count.get(kind, 0) + 1
            if count[kind] <= (24 if split[key].strip() == "1" else 2):
                taken[key] = path
    kept = {path.split("/")[0] for path in taken.values()}
    for name in ("images.txt", "image_class_labels.txt", "train_test_split.txt", "bounding_boxes.txt"):
        (root / name).write_text("".join(f"{key} {value}\n" for key, value in rows(name) if key in taken))
    (root / "classes.txt").write_text("".join(f"{key} {name}\n" for key, name in rows("classes.txt") if name in kept))
    wanted = {f"CUB_200_2011/images/{path}" for path in taken.values()}
    with tarfile.open(SHARED / "images-0.tar") as archive:
        archive.extractall(folder, [member for member in archive if member.name in wanted], filter="data")
    return root


@pytest.mark.skipif(not SHARED.is_dir(), reason="CUB-200-2011 is not at ../shared/cub")
def test_swapped_labels_of_real_birds_come_first(tmp_path: Path) -> None:
    cub = unpack_some(tmp_path / "cub")
    swapped = swap_labels(cub, tmp_path / "data", 8, 0.02, seed=5)
    assert len(swapped) == 4
    run = tmp_path / "run"
    likethat("train", tmp_path / "data", "--out", run, "--preset", "quick", "--input-size", "80", "--device", "cpu")
    done = likethat("data", "audit", run, "--most", "3", "--device", "cpu")
    assert share_found(run / "audit" / "audit.csv", swapped, 0.03) >= 0.7
    with (run / "audit" / "audit.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 192, "all training and validation images"
    likelihood = [float(row["probability_of_class"]) for row in rows]
    assert likelihood[0] < 0.1 < 0.5 < likelihood[-1]
    page = (run / "audit" / "audit.html").read_text()
    assert page.count('<h2 id="picture-') == 3
    assert f"is labelled {rows[0]['class']} and looks like {rows[0]['looks_like']}" in done.stdout
    assert json.loads(likethat("verify", run, "--json", "--device", "cpu").stdout)["passed"]
    assert "is there already" in likethat("data", "audit", run, "--device", "cpu", check=2).stderr


@pytest.mark.parametrize("group_N", [torch.arange(30), torch.arange(30) // 7, torch.arange(30) % 11])
def test_each_row_is_what_a_fit_without_its_group_says(group_N: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opinions, "RIDGES", (0.02,))
    monkeypatch.setattr(opinions, "FACTORS", (7.0,))
    feature_NC, label_N = torch.rand(30, 6), torch.arange(30) % 3
    found_NK = opinion_of_features(feature_NC, label_N, group_N, 3)
    x_NC = F.normalize(feature_NC.double() - feature_NC.double().mean(0), dim=1)
    x_NC = torch.cat([x_NC, torch.ones(30, 1)], 1)
    target_NK = F.one_hot(label_N, 3).double()
    for number in range(30):
        others = group_N != group_N[number]
        x_nC = x_NC[others]
        weight_CK = torch.linalg.solve(x_nC.T @ x_nC + 30 * 0.02 * torch.eye(7), x_nC.T @ target_NK[others])
        expected_K = (7 * x_NC[number] @ weight_CK).log_softmax(0)
        assert torch.allclose(found_NK[number], expected_K, atol=1e-8)


def test_the_last_layer_that_judges_a_picture_has_not_seen_its_group() -> None:
    settings = resolve("quick").train
    score_NP, label_N, class_P = torch.rand(20, 4), torch.arange(20) % 2, torch.tensor([0, 0, 1, 1])
    group_N = torch.arange(20) // 2
    logits_NK = refitted_logits(score_NP, label_N, group_N, class_P, 2, settings)
    for number in (0, 7, 13):
        changed_N = torch.where(group_N == group_N[number], 1 - label_N, label_N)
        again_NK = refitted_logits(score_NP, changed_N, group_N, class_P, 2, settings)
        assert torch.equal(again_NK[number], logits_NK[number])
    whole = solve_last_layer(score_NP, label_N, class_P, 2, lam=settings.l1, ridge=settings.ridge, own_positive=True)
    assert not torch.allclose(logits_NK, score_NP @ whole.weight_KP.T, atol=1e-3)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_run(tmp_path_factory.mktemp("audit"), QUICK)


@pytest.fixture(scope="module")
def birds(quick: Path) -> Path:
    return quick.parent / "birds"


def test_a_prototype_says_nothing_about_its_own_picture(quick: Path, birds: Path) -> None:
    classifier = load(quick, "cpu")
    dataset = open_run_data(classifier, None)
    prototype = classifier.prototypes[0]
    sample = next(sample for sample in dataset.train if sample.path == prototype.path)
    other = next(name for name in classifier.classes if name != prototype.class_name)
    doubt = Doubt("train", sample, prototype.class_name, other, 0.1, 0.9)
    fair, whole = explain_without_itself(classifier, dataset, doubt), explain(classifier, birds / sample.path)
    own = {entry.id for entry in classifier.prototypes if entry.path == sample.path}
    assert {fair.predicted.name, fair.rival} >= {prototype.class_name}
    for sheet in fair.classes:
        given = {row.match.prototype.id: row.points for row in sheet.rows}
        assert all(points == 0 for number, points in given.items() if number in own)
        assert sheet.logit == pytest.approx(sum(given.values()), abs=1e-4)
    assert any(row.points for row in whole.predicted.rows if row.match.prototype.id in own)
    assert fair.verdict is None


def test_nor_about_others_of_its_burst(quick: Path) -> None:
    classifier = load(quick, "cpu")
    dataset = open_run_data(classifier, None)
    prototype = classifier.prototypes[0]
    burst = [sample for sample in dataset.train if classifier.classes[sample.label] == prototype.class_name]
    mate = next(sample for sample in burst if sample.path not in {entry.path for entry in classifier.prototypes})
    together = tuple(replace(sample, group="burst") if sample in burst else sample for sample in dataset.train)
    other = next(name for name in classifier.classes if name != prototype.class_name)
    for data, silent in ((dataset, False), (replace(dataset, train=together), True)):
        sample = next(sample for sample in data.train if sample.path == mate.path)
        doubt = Doubt("train", sample, prototype.class_name, other, 0.1, 0.9)
        sheets = explain_without_itself(classifier, data, doubt).classes
        of_class = [row for sheet in sheets for row in sheet.rows if row.match.prototype.label == mate.label]
        assert silent == all(row.points == 0 for row in of_class)


def test_what_a_trained_network_cannot_be_asked_is_said(tmp_path: Path) -> None:
    found = audit_run(make_tiny_run(tmp_path), None, "cpu", Display(quiet=True))
    assert len(found.doubts) == 27
    assert "wrong labels that it has memorised are not found" in found.notes[0]
    likelihood = [doubt.label_probability for doubt in found.doubts]
    assert likelihood[0] < likelihood[-1]
    assert {doubt.part for doubt in found.doubts} == {"train", "val"}


def test_labels_are_judged_by_the_backbone_from_before_training(birds: Path, tmp_path: Path) -> None:
    """Two runs that differ in their epochs alone judge training pictures alike, to the bit."""
    fresh = load_fresh(tmp_path / "weights.safetensors")
    judged = []
    for number, epochs in enumerate(("1", "3")):
        options = [*TINY, "--baseline-epochs", epochs, "--joint-epochs", "1", "--weights", fresh]
        likethat("train", birds, "--out", tmp_path / f"run{number}", *options)
        found = audit_run(tmp_path / f"run{number}", None, "cpu", Display(quiet=True))
        assert "validation pictures by both" in found.notes[0]
        judged.append({doubt.path: doubt.label_probability for doubt in found.doubts if doubt.part == "train"})
    assert judged[0] == judged[1]


def load_fresh(file: Path) -> Path:
    import timm
    from safetensors.torch import save_file

    torch.manual_seed(3)
    save_file({name: value.contiguous() for name, value in timm.create_model("test_resnet").state_dict().items()}, file)
    return file


def test_a_combined_run_is_refused(quick: Path, tmp_path: Path) -> None:
    likethat("combine", quick, quick, "--out", tmp_path / "both")
    assert "audit the runs it was combined from" in likethat("data", "audit", tmp_path / "both", check=2).stderr
