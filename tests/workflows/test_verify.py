"""`verify` means it: whatever of a run is changed, it says so, by digests and by what follows from other things."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs import make_tiny_birds, make_tiny_run
from PIL import Image
from safetensors.torch import load_file, save_file

from likethat.cli.parser import main
from likethat.explaining.explanation import explain
from likethat.explaining.verify import FAILED, MOST_CHANGE, NOT_PROVEN, PROVEN, BoxProof, Verification
from likethat.progress import Display
from likethat.runs.classifier import load
from likethat.runs.manifest import compare_with_manifest, write_manifest
from likethat.workflows.verify import check_boxes, verify_folder

QUIET = Display(quiet=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_run(tmp_path_factory.mktemp("verify"))


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def results(verification: Verification) -> dict[str, str]:
    return {finding.what: finding.result for finding in verification.findings}


def check(run: Path) -> Verification:
    return verify_folder(run, None, "cpu", QUIET)


def change_json(name: str, change: Callable[[Any], None]) -> Callable[[Path], None]:
    def tamper(run: Path) -> None:
        document = json.loads((run / name).read_text())
        change(document)
        (run / name).write_text(json.dumps(document))

    return tamper


def change_prototypes(change: Callable[[list[dict[str, Any]]], None]) -> Callable[[Path], None]:
    return change_json("prototypes.json", lambda document: change(document["prototypes"]))


def change_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def tamper(run: Path) -> None:
        tensors = load_file(run / "model.safetensors")
        tensors[name] = change(tensors[name])
        save_file(tensors, run / "model.safetensors")

    return tamper


def swap(first: dict[str, Any], second: dict[str, Any], *names: str) -> None:
    for name in names:
        first[name], second[name] = second[name], first[name]


def swap_classes(run: Path) -> None:
    """Everywhere, so that nothing in the folder contradicts anything else."""
    change_json("config.json", lambda d: d["data"]["classes"].reverse())(run)
    names = json.loads((run / "config.json").read_text())["data"]["classes"]

    def rename(prototypes: list[dict[str, Any]]) -> None:
        for prototype in prototypes:
            prototype["class_name"] = names[prototype["label"]]

    change_prototypes(rename)(run)


def shift_boxes(prototypes: list[dict[str, Any]]) -> None:
    for prototype in prototypes:
        prototype["box"] = [value / 3 for value in prototype["box"]]


def replace_pictures(kind: str) -> Callable[[Path], None]:
    def tamper(run: Path) -> None:
        for prototype in json.loads((run / "prototypes.json").read_text())["prototypes"]:
            size = Image.open(run / prototype[kind]).size
            Image.new("RGB", size, "magenta").save(run / prototype[kind])

    return tamper


def negate(values: torch.Tensor) -> torch.Tensor:
    return -values


def spoil(values: torch.Tensor) -> torch.Tensor:
    return values.index_fill(0, torch.tensor([0]), float("nan"))


LAST, VECTORS, CLASSES = "last_layer.weight", "prototype_layer.prototype_PDhw", "prototype_layer.class_P"
REFUSED = "refused"
# What was changed, and which check finds it when the digests are forged as well.
CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no prototypes": (change_prototypes(list.clear), REFUSED),
    "one prototype less": (change_prototypes(lambda p: p.pop(4) and None), REFUSED),
    "one prototype more": (change_prototypes(lambda p: p.append(p[0])), REFUSED),
    "another order": (change_prototypes(list.reverse), REFUSED),
    "labels swapped": (change_prototypes(lambda p: swap(p[0], p[-1], "label")), REFUSED),
    "class names swapped": (change_prototypes(lambda p: swap(p[0], p[-1], "class_name")), REFUSED),
    "class list reversed": (change_json("config.json", lambda d: d["data"]["classes"].reverse()), REFUSED),
    "no classes": (change_json("config.json", lambda d: d["data"]["classes"].clear()), REFUSED),
    "other counts": (change_json("config.json", lambda d: d.update(prototypes_of_class=[2, 4, 3])), REFUSED),
    "other class_P": (change_tensor(CLASSES, lambda class_P: class_P.flip(0)), REFUSED),
    "last layer NaN": (change_tensor(LAST, spoil), REFUSED),
    "vectors infinite": (change_tensor(VECTORS, lambda v: v / 0), REFUSED),
    "classes renamed everywhere": (swap_classes, "sources"),
    "sources swapped": (change_prototypes(lambda p: swap(p[0], p[-1], "path", "sha256", "crop_to")), "sources"),
    "last layer negated": (change_tensor(LAST, negate), "calibration"),
    "boxes moved": (change_prototypes(shift_boxes), "pictures"),
    "crops replaced": (replace_pictures("crop"), "pictures"),
    "sources replaced": (replace_pictures("source"), "pictures"),
    "calibration falsified": (
        change_json("calibration.json", lambda d: d.update(likeness=[v - 9 for v in d["likeness"]])),
        "calibration",
    ),
    "vectors moved a little": (change_tensor(VECTORS, lambda v: v + 9e-5), "files"),
    "metrics": (lambda run: (run / "metrics.jsonl").write_text("") and None, "files"),
    "a picture more": (lambda run: (run / "prototypes" / "0100.jpg").write_bytes(b"x") and None, "files"),
}


def test_an_untouched_run_is_proven(trained: Path) -> None:
    verification = check(trained)
    assert verification.passed
    assert results(verification) == dict.fromkeys(("files", "structure", "sources", "pictures", "calibration"), PROVEN)
    digests = json.loads((trained / "manifest.json").read_text())["files"]
    files = {str(path.relative_to(trained)) for path in trained.rglob("*") if path.is_file()}
    assert digests.keys() == files - {"manifest.json"}


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_found_by_the_digests(run: Path, name: str) -> None:
    tamper, _ = CHANGES[name]
    tamper(run)
    verification = check(run)
    assert not verification.passed
    assert results(verification)["files"] == FAILED
    assert main(["verify", str(run), "--device", "cpu"]) == 1


@pytest.mark.parametrize("name", [name for name, (_, found_by) in CHANGES.items() if found_by != "files"])
def test_forged_digests_do_not_help(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    tamper, found_by = CHANGES[name]
    tamper(run)
    write_manifest(run)
    if found_by == REFUSED:
        assert main(["predict", str(run), "picture.jpg", "--device", "cpu"]) == 2, "also where nobody verifies"
        assert str(run) in capsys.readouterr().err
        assert main(["verify", str(run), "--device", "cpu"]) == 2
        told = capsys.readouterr().err
        assert len(told.splitlines()) == 1
    else:
        found = results(check(run))
        assert found["files"] == PROVEN
        assert found[found_by] == FAILED


def test_values_that_are_no_numbers_are_refused_by_the_tensor_s_name(run: Path) -> None:
    change_tensor(LAST, spoil)(run)
    with pytest.raises(Exception, match=r"last_layer\.weight has values that are not finite"):
        load(run, "cpu")


def test_a_run_of_an_earlier_version_loads_and_is_told_of(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "manifest.json").unlink()
    assert main(["verify", str(run), "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "files: NOT proven: " in shown
    assert "manifest.json" in shown
    assert "pictures: proven: boxes and pictures of 9 of 9 prototypes" in shown
    assert main(["calibrate", str(run), "--device", "cpu"]) == 0
    assert not (run / "manifest.json").exists(), "digests of files that nobody vouches for would mean nothing"
    (run / "manifest.json").symlink_to("manifest.json")
    assert main(["verify", str(run), "--device", "cpu"]) == 2
    assert "manifest.json" in capsys.readouterr().err


def test_what_explain_keeps_is_in_the_manifest(run: Path, trained: Path) -> None:
    picture = next(path for path in (run / "prototypes").glob("source-*.jpg"))
    explain(load(run, "cpu"), picture, attribution="gradient", top_classes=1)
    compared = compare_with_manifest(run)
    assert compared is not None
    assert compared[1] == []
    (run / "attribution.safetensors").write_bytes(b"another place")
    compared = compare_with_manifest(run)
    assert compared is not None
    assert compared[1] == ["attribution.safetensors (changed)"]


def test_what_cannot_be_proven_is_said_with_the_reason(run: Path, trained: Path, tmp_path: Path) -> None:
    (run / "calibration.json").unlink()
    write_manifest(run)
    verification = check(run)
    assert verification.passed
    assert results(verification)["calibration"] == NOT_PROVEN
    other = make_tiny_birds(tmp_path / "other", seed=5)
    assert main(["calibrate", str(run), "--data", str(other), "--device", "cpu"]) == 0
    verification = check(run)
    assert verification.passed
    (finding,) = [finding for finding in verification.findings if finding.what == "calibration"]
    assert "other images" in finding.why
    fewer = tmp_path / "fewer"
    shutil.copytree(trained.parent / "birds", fewer)
    next((fewer / "val").rglob("*.jpg")).unlink()
    verification = verify_folder(trained, str(fewer), "cpu", QUIET)
    assert verification.passed
    assert results(verification)["calibration"] == NOT_PROVEN


def test_runs_made_of_runs_keep_their_digests_right(trained: Path, tmp_path: Path) -> None:
    """Pruned, edited, combined, calibrated, measured and given away; and no verb washes off what was changed before."""
    pruned, edited, both, given = (tmp_path / name for name in ("pruned", "edited", "both", "given"))
    commands: list[list[object]] = [
        ["prune", trained, "--k", 3, "--threshold", 1, "--out", pruned],
        ["edit", pruned, "--ban", 0, "--out", edited],
        ["combine", edited, trained, "--out", both],
        ["calibrate", both / "members" / "0"],
        ["calibrate", both],
        ["evaluate", edited, "--interpretability"],
    ]
    for command in commands:
        assert main([*map(str, command), "--device", "cpu"]) == 0
    load(both, "cpu").save_pretrained(given)
    for run in (pruned, edited, both, both / "members" / "0", both / "members" / "1"):
        verification = check(run)
        assert verification.passed, verification.findings
        assert set(results(verification).values()) == {PROVEN}
    verification = verify_folder(given, str(trained.parent / "birds"), "cpu", QUIET)
    assert verification.passed, verification.findings
    assert set(results(verification).values()) == {PROVEN}
    change_tensor(VECTORS, lambda v: v + 1e-6)(edited)
    assert main(["calibrate", str(edited), "--device", "cpu"]) == 0
    (files, *_) = check(edited).findings
    assert files.result == FAILED
    assert "model.safetensors (changed)" in files.why
    assert "calibration" not in files.why


def test_boxes_are_proven_by_pictures_whose_similarities_stay() -> None:
    assert check_boxes(BoxProof(8, 16, MOST_CHANGE)).result == PROVEN
    assert check_boxes(BoxProof(8, 16, 2 * MOST_CHANGE)).result == FAILED
    assert check_boxes(BoxProof(0, 0, 0.0)).result == NOT_PROVEN, "where no picture could be read"
    assert not Verification(16, 8, 0.0, (), findings=(check_boxes(BoxProof(8, 16, 1.0)),)).passed
