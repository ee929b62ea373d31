"""Combined runs: sums of logits, one scoring sheet, and every command works on them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers.explain_run import make_run
from helpers.runs import PAPER, make_tiny_run

from likethat.cli.parser import main
from likethat.explaining.explanation import explain
from likethat.models.protopnet import summed_logits
from likethat.runs import layout
from likethat.runs.classifier import Classifier, load
from likethat.runs.data import open_run_data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of different backbones, input sizes, presets and numbers of prototypes, and their combination."""
    folder = tmp_path_factory.mktemp("combine")
    make_tiny_run(folder).rename(folder / "a")
    other = [*PAPER, *"--backbone test_efficientnet --input-size 96 --prototypes-per-class 2 --seed 1".split()]
    assert main(["train", str(folder / "birds"), "--out", str(folder / "b"), *other]) == 0
    assert main(["combine", str(folder / "a"), str(folder / "b"), "--out", str(folder / "ab")]) == 0
    return folder


def logits(classifier: Classifier, pictures: list[Path]) -> torch.Tensor:
    return summed_logits(classifier.outputs([classifier.prepare(picture) for picture in pictures]))


def pictures_of(folder: Path) -> list[Path]:
    return sorted((folder / "birds" / "test").rglob("*.jpg")) or sorted((folder / "birds" / "test").rglob("*.png"))


def test_logits_are_sums(folder: Path) -> None:
    a, b, ab = (load(folder / name, "cpu") for name in ("a", "b", "ab"))
    pictures = pictures_of(folder)
    assert len(pictures) == 9
    assert torch.allclose(logits(ab, pictures), logits(a, pictures) + logits(b, pictures), atol=1e-5)
    assert ab.classes == a.classes
    probability_K = (logits(a, pictures[:1]) + logits(b, pictures[:1]))[0].double().softmax(0)
    found = ab.predict(pictures[0]).probabilities
    assert [found[name] for name in ab.classes] == pytest.approx(probability_K.tolist(), abs=1e-6)


def test_prototypes_are_numbered_through(folder: Path) -> None:
    a, b, ab = (load(folder / name, "cpu") for name in ("a", "b", "ab"))
    assert [prototype.id for prototype in ab.prototypes] == list(range(9 + 6))
    assert [prototype.member for prototype in ab.prototypes] == [0] * 9 + [1] * 6
    for prototype, own, source in zip(
        ab.prototypes, [*a.prototypes, *b.prototypes], [folder / "a"] * 9 + [folder / "b"] * 6, strict=True
    ):
        assert (prototype.path, prototype.row, prototype.box) == (own.path, own.row, own.box)
        assert (folder / "ab" / prototype.crop).read_bytes() == (source / own.crop).read_bytes()
        assert (folder / "ab" / prototype.source).read_bytes() == (source / own.source).read_bytes()
    assert torch.equal(ab.weight_KP, torch.cat([a.weight_KP, b.weight_KP], 1))


def test_one_scoring_sheet(folder: Path) -> None:
    ab, picture = load(folder / "ab", "cpu"), pictures_of(folder)[0]
    explanation = explain(ab, picture, top_classes=3)
    logits_K = logits(ab, [picture])[0]
    for sheet in explanation.classes:
        assert {row.match.prototype.member for row in sheet.rows} == {0, 1}
        assert sum(row.points for row in sheet.rows) == pytest.approx(sheet.logit, abs=1e-4)
        assert sheet.logit == pytest.approx(float(logits_K[ab.classes.index(sheet.name)]), abs=1e-5)
    explanation.save(folder / "sheet.png")


def test_commands_work_on_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(folder / "ab")
    assert main(["verify", run, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prototypes"] == 15
    assert main(["evaluate", run, "--json"]) == 0
    accuracy = json.loads(capsys.readouterr().out)["accuracy"]
    ab = load(run, "cpu")
    dataset = open_run_data(ab, None)
    guess_N = logits(ab, [dataset.root / sample.path for sample in dataset.test]).argmax(1).tolist()
    right = [guess == sample.label for guess, sample in zip(guess_N, dataset.test, strict=True)]
    assert accuracy == sum(right) / len(right)
    lines = [json.loads(line) for line in (folder / "ab" / layout.METRICS).read_text().splitlines()]
    assert [line["stage"] for line in lines] == ["combine", "test"]
    assert lines[1]["accuracy"] == accuracy
    for member, name in zip(lines[0]["members"], "ab", strict=True):
        alone = [json.loads(line) for line in (folder / name / layout.METRICS).read_text().splitlines()][-1]
        assert member["accuracy"] == alone["accuracy"]
    assert main(["info", run, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["backbone"] == "test_resnet + test_efficientnet"
    assert told["prototypes"] == 15
    assert main(["predict", run, str(pictures_of(folder)[0])]) == 0
    assert "Members" in (folder / "ab" / layout.REPORT).read_text()
    assert not list((folder / "ab").rglob("checkpoints"))


def test_members_of_combined_runs_are_taken_one_by_one(folder: Path, tmp_path: Path) -> None:
    assert main(["combine", str(folder / "ab"), str(folder / "a"), "--out", str(tmp_path / "aba")]) == 0
    aba, pictures = load(tmp_path / "aba", "cpu"), pictures_of(folder)
    assert len(aba.networks) == 3
    a, b = (logits(load(folder / name, "cpu"), pictures) for name in "ab")
    assert torch.allclose(logits(aba, pictures), 2 * a + b, atol=1e-5)
    assert main(["verify", str(tmp_path / "aba")]) == 0
    for number in range(3):
        assert len(load(tmp_path / "aba" / "members" / str(number), "cpu").networks) == 1


def test_pruning_prunes_each_member_by_itself(folder: Path, tmp_path: Path) -> None:
    for name in ("a", "b", "ab"):
        assert main(["prune", str(folder / name), "--out", str(tmp_path / name), "--keep-one"]) == 0
    for number, name in enumerate("ab"):
        for file in (layout.MODEL, layout.PROTOTYPES, layout.CONFIG):
            member = tmp_path / "ab" / "members" / str(number) / file
            assert member.read_bytes() == (tmp_path / name / file).read_bytes()
    assert main(["verify", str(tmp_path / "ab")]) == 0
    pictures = pictures_of(folder)
    a, b, ab = (logits(load(tmp_path / name, "cpu"), pictures) for name in ("a", "b", "ab"))
    assert torch.allclose(ab, a + b, atol=1e-5)


def test_a_budget_holds_for_all_members_together(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prune", str(folder / "ab"), "--out", str(tmp_path / "lean"), "--budget", "25", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    lean = load(tmp_path / "lean", "cpu")
    assert int((lean.weight_KP != 0).sum()) == told["connections"] <= 25
    assert (tmp_path / "lean" / layout.PATH).is_file()
    dataset = open_run_data(lean, None)
    guess_N = logits(lean, [dataset.root / sample.path for sample in dataset.val]).argmax(1).tolist()
    right = [guess == sample.label for guess, sample in zip(guess_N, dataset.val, strict=True)]
    assert sum(right) / len(right) == told["after"]["accuracy"]
    assert told["connections"] <= told["path"][told["chosen"]]["connections"], "solved again without those that left"

    # Fewer connections than prototypes: some leave, of each member in proportion, and no class loses its last one.
    assert main(["prune", str(folder / "ab"), "--out", str(tmp_path / "few"), "--budget", "8", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert 6 <= told["connections"] <= told["prototypes"] <= 8
    few = load(tmp_path / "few", "cpu")
    label_C, prototype_C = few.weight_KP.nonzero().unbind(1)
    assert len(label_C) == told["connections"]
    assert label_C.tolist() == [few.prototypes[number].label for number in prototype_C.tolist()], "own ones alone"
    for number in range(2):
        assert min(layout.read_record(tmp_path / "few" / "members" / str(number)).prototypes_of_class) >= 1
    assert main(["prune", str(folder / "ab"), "--out", str(tmp_path / "none"), "--budget", "5"]) == 2
    assert "in each of the 2 networks, so --budget must be 6 or more" in capsys.readouterr().err


def test_classes_are_matched_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Here without the data, which leaves the accuracy out."""
    first = make_run(tmp_path / "1", ("finch", "owl", "wren"), seed=0)
    second = make_run(tmp_path / "2", ("wren", "finch", "owl"), per_class=3, seed=1)
    for made in (first, second):
        (made.path / layout.METRICS).write_text("")
        (made.path / layout.REPORT).write_text("old")
    out = tmp_path / "both"
    assert main(["combine", str(first.path), str(second.path), "--out", str(out)]) == 0
    assert "without measuring the accuracy" in capsys.readouterr().err
    one, two, both = (load(path, "cpu") for path in (first.path, second.path, out))
    picture = first.root / first.samples[0].path
    expected = {name: float(logits(one, [picture])[0, k]) for k, name in enumerate(one.classes)}
    for k, name in enumerate(two.classes):
        expected[name] += float(logits(two, [picture])[0, k])
    assert both.classes == ("finch", "owl", "wren")
    assert logits(both, [picture])[0].tolist() == pytest.approx([expected[name] for name in both.classes], abs=1e-5)
    assert [p.class_name for p in both.prototypes if p.member == 1] == ["finch"] * 3 + ["owl"] * 3 + ["wren"] * 3
    was = {(p.path, p.row, p.column): p for p in two.prototypes}
    for prototype in both.prototypes[len(one.prototypes) :]:
        old = was[prototype.path, prototype.row, prototype.column]
        assert prototype.class_name == old.class_name
        assert (out / prototype.crop).read_bytes() == (second.path / old.crop).read_bytes()
        member = load(out / "members" / "1", "cpu").networks[0].prototype_layer
        vectors = (member.prototype_PDhw[prototype.id - len(one.prototypes)], two.networks[0].prototype_layer)
        assert torch.equal(vectors[0], vectors[1].prototype_PDhw[old.id])
    assert (out / "members" / "1" / layout.REPORT).read_text() != "old"


def test_mistakes(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unlike = make_run(tmp_path / "unlike", ("finch", "owl", "wren"))

    def told(*runs: Path, out: Path = tmp_path / "out") -> str:
        assert main(["combine", *map(str, runs), "--out", str(out)]) == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    text = told(folder / "a", unlike.path)
    assert "finch, owl, wren" in text
    assert all(name in text for name in load(folder / "a", "cpu").classes)
    assert "at least two" in told(folder / "a")
    assert "no run folder" in told(folder / "a", folder / "none")
    assert "--overwrite" in told(folder / "a", folder / "b", out=folder / "ab")
    assert "inside" in told(folder / "a", folder / "b", out=folder / "a" / "inside")


def test_different_splits_need_other_test_data(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What one member holds out for test, the other was trained on."""
    shutil.copytree(folder / "ab", tmp_path / "mixed")
    for number in range(2):
        file = tmp_path / "mixed" / "members" / str(number) / layout.CONFIG
        document = json.loads(file.read_text())
        document["data"] |= {"root": str(folder / "birds" / "train"), "fingerprint": f"split {number}"}
        document["config"]["train"]["seed"] = number
        file.write_text(json.dumps(document))
    assert main(["evaluate", str(tmp_path / "mixed")]) == 2
    assert "--data" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path / "mixed"), "--data", str(folder / "birds")]) == 0
