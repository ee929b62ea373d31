"""Corrections of a finished run: every number against a slow version, nothing lost, the original untouched."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.last_layer import kkt_residual
from helpers.runs import DEFAULT, PAPER, TINY, make_tiny_birds, make_tiny_run

from likethat.cli.parser import main
from likethat.data.cache import decode_samples
from likethat.data.loaders import hold
from likethat.errors import UserError
from likethat.explaining.explanation import explain
from likethat.inference import latents as latents_module
from likethat.inference.passes import last_layer_images, score_images
from likethat.inference.source_image import leave_source_out
from likethat.runs import layout
from likethat.runs.classifier import load
from likethat.runs.data import open_run_data
from likethat.training.last_layer import solve_last_layer
from likethat.workflows.edit.editor import Editor, open_editor

ROGUE = "<script>alert('crown')</script> & \"red\" [/b]"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # At these rates the first prototypes have connections, so that sheets have rows of them.
    return make_tiny_run(tmp_path_factory.mktemp("edit"), [*DEFAULT, "--no-relative-lr"])


@pytest.fixture(scope="module")
def edited(run: Path) -> Path:
    """By the command line: one prototype of the first class named, the last one replaced; one of the second banned."""
    out = run.parent / "edited"
    edits = ["--name", "0", ROGUE, "--replace", "2", "1", "--ban", "4", "--why", "a ruler", "--who", "Ada"]
    assert main(["edit", str(run), *edits, "--out", str(out), "--device", "cpu"]) == 0
    return out


@pytest.fixture
def editor(run: Path) -> Iterator[Editor]:
    with open_editor(run, device="cpu") as editor:
        yield editor


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def scores_of(run: Path, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and labels of a part, by the whole network."""
    classifier = load(run, "cpu")
    dataset = open_run_data(classifier, None)
    samples = dataset.part(part)
    pixels = decode_samples(dataset.root, samples, classifier.networks[0].backbone.input_size).pixels
    images = hold(pixels, samples, torch.device("cpu"))
    if part == "train":  # as the last layer sees them
        images = last_layer_images(images, layout.read_record(run).config)
    return score_images(classifier.networks[0], images), images.label_N


def problem_of(run: Path, keep: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the last layer of a run that never had the other prototypes solves: scores, labels, classes."""
    classifier = load(run, "cpu")
    paths = [sample.path for sample in open_run_data(classifier, None).train]
    source_P = torch.tensor([paths.index(prototype.path) for prototype in classifier.prototypes])[keep]
    class_P = classifier.networks[0].prototype_layer.class_P[keep]
    score_NP, label_N = scores_of(run, "train")
    own_KP = torch.arange(3)[:, None] == class_P
    image_N = torch.arange(len(score_NP)) % len(paths)  # all pictures in one view, then in the next
    fair_NP = leave_source_out(score_NP[:, keep], image_N[:, None], source_P, own_KP)
    return fair_NP, label_N, class_P


def accuracy_of(weight_KP: torch.Tensor, run: Path, keep: list[int]) -> float:
    """On validation images."""
    val_NP, val_N = scores_of(run, "val")
    guesses = (val_NP[:, keep] @ weight_KP.T).argmax(1).tolist()
    return sum(guess == label for guess, label in zip(guesses, val_N.tolist(), strict=True)) / len(val_N)


def solved_from_scratch(run: Path, keep: list[int]) -> tuple[torch.Tensor, float]:
    """That last layer and its validation accuracy."""
    settings = layout.read_record(run).config.train
    weight_KP = solve_last_layer(
        *problem_of(run, keep), 3, lam=settings.l1, ridge=settings.ridge, own_positive=settings.own_positive
    ).weight_KP
    return weight_KP, accuracy_of(weight_KP, run, keep)


def test_a_ban_leaves_the_last_layer_of_the_others(run: Path, editor: Editor) -> None:
    edit = editor.ban(4)
    keep = [0, 1, 2, 3, 5, 6, 7, 8]
    weight_KP, accuracy = solved_from_scratch(run, keep)
    assert torch.equal(editor.classifier.weight_KP, weight_KP)
    assert edit.after["accuracy"] == pytest.approx(accuracy)
    cycles = [line["val"]["accuracy"] for line in layout.read_metrics(run) if line["stage"] == "last_layer"]
    assert edit.before["accuracy"] == max(cycles)  # the best one is kept
    assert [prototype.id for prototype in editor.classifier.prototypes] == keep

    editor.merge([8, 6])
    weight_KP, accuracy = solved_from_scratch(run, [0, 1, 2, 3, 5, 7, 8])
    assert torch.equal(editor.classifier.weight_KP, weight_KP)
    assert editor.history[-1].after["accuracy"] == pytest.approx(accuracy)


def line_of(run: Path, stage: str) -> dict[str, Any]:
    return [line for line in layout.read_metrics(run) if line["stage"] == stage][-1]


def test_the_order_of_edits_does_not_matter(editor: Editor) -> None:
    editor.ban(1)
    editor.ban(5)
    first = editor.classifier.weight_KP
    editor.undo()
    editor.undo()
    editor.ban(5)
    editor.ban(1)
    assert torch.equal(editor.classifier.weight_KP, first)


def test_undone_and_redone_edits_give_the_same_bytes(run: Path, editor: Editor, tmp_path: Path) -> None:
    picture = sorted((run.parent / "birds" / "test").rglob("*.jpg"))[0]
    before = explain(editor.classifier, picture).to_dict(maps=True)
    editor.name(0, "red crown")
    editor.replace(2, editor.candidates(2)[0], why="sky", who="Ada")
    editor.ban([4])
    after = explain(editor.classifier, picture).to_dict(maps=True)
    editor.save(tmp_path / "a" / "out")
    assert [editor.undo().kind for _ in range(3)] == ["ban", "replace", "name"]
    assert explain(editor.classifier, picture).to_dict(maps=True) == before
    with pytest.raises(UserError, match="no edit to undo"):
        editor.undo()
    with pytest.raises(UserError, match="nothing to save"):
        editor.save(tmp_path / "none")
    assert [editor.redo().kind for _ in range(3)] == ["name", "replace", "ban"]
    assert explain(editor.classifier, picture).to_dict(maps=True) == after
    with pytest.raises(UserError, match="no edit to redo"):
        editor.redo()
    editor.save(tmp_path / "b" / "out")
    saved, again = digests(tmp_path / "a" / "out"), digests(tmp_path / "b" / "out")
    # The second one says that test images were judged once more.
    assert {name for name in saved if saved[name] != again[name]} == {"manifest.json", "metrics.jsonl", "report.html"}
    assert saved.keys() == again.keys()
    assert {"edits.jsonl", "model.safetensors", "prototypes.json", "report.html"} <= saved.keys()

    editor.undo()
    editor.name(1, "tail")
    assert [edit.kind for edit in editor.history] == ["name", "replace", "name"]
    with pytest.raises(UserError, match="no edit to redo"):  # a new edit takes the place of what was undone
        editor.redo()


def test_candidates_are_what_a_search_by_hand_finds(editor: Editor) -> None:
    classifier, dataset = editor.original, editor.dataset
    network = classifier.networks[0]
    taken = {(p.path, p.row, p.column) for p in classifier.prototypes}
    candidates = editor.candidates(3, count=50)
    label = classifier.prototypes[3].label
    images = [editor.sample(candidate).path for candidate in candidates]
    assert len(images) == len(set(images)) == 6  # one patch of each image of the class
    leads = [candidate.lead for candidate in candidates]
    assert leads == sorted(leads, reverse=True)
    with torch.no_grad():
        maps = [
            network.prototype_layer.patches(
                network.latent(classifier.prepare(dataset.root / s.path).pixels[0][None] / 255)
            )[0]
            for s in dataset.train
        ]
    for candidate in candidates:
        sample, patch = editor.sample(candidate), candidate.patch
        assert sample.label == label
        assert (sample.path, patch.row, patch.column) not in taken
        vector = maps[patch.image][:, patch.row, patch.column]
        scores = [max(0.0, float((vector @ map_DHW.flatten(1)).max())) for map_DHW in maps]
        means = []
        for k in range(3):
            of_class = [score for i, score in enumerate(scores) if dataset.train[i].label == k and i != patch.image]
            means.append(sum(of_class) / len(of_class))
        assert candidate.own == pytest.approx(means.pop(label), abs=1e-5)
        assert candidate.other == pytest.approx(max(means), abs=1e-5)
        similarity = max(0.0, float(vector @ network.prototype_layer.vectors()[3].detach()))
        assert candidate.similarity == pytest.approx(similarity, abs=1e-5)
        shown, share = editor.picture(candidate)
        assert shown.size == (64, 64)
        rows, columns = network.backbone.map_size
        assert share == pytest.approx(
            (patch.column / columns, patch.row / rows, (patch.column + 1) / columns, (patch.row + 1) / rows)
        )


def test_a_new_prototype_is_the_patch_it_names(run: Path, edited: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["edit", str(run), "--candidates", "2", "--json", "--device", "cpu"]) == 0
    chosen = json.loads(capsys.readouterr().out)["candidates"][1]
    before, after = load(run, "cpu"), load(edited, "cpu")
    assert len(after.prototypes) == 8
    new = after.prototypes[2]
    assert (new.path, new.row, new.column) == (chosen["path"], chosen["row"], chosen["column"])
    assert (new.path, new.row, new.column) not in {(p.path, p.row, p.column) for p in before.prototypes}
    assert new.moved == 0
    assert main(["verify", str(edited), "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["max_error"] < 1e-5
    # The scores of the prototype that came later are those the whole network gives, up to rounding. By how much that
    # moves the weights depends on the machine; that they are the best ones does not.
    keep, settings = list(range(8)), layout.read_record(edited).config.train
    problem = (after.weight_KP, *problem_of(edited, keep))
    assert kkt_residual(*problem, lam=settings.l1, ridge=settings.ridge, own_positive=settings.own_positive) < 1e-4
    assert line_of(edited, "edit")["after"]["accuracy"] == pytest.approx(accuracy_of(after.weight_KP, edited, keep))
    assert {path.name for path in (edited / "prototypes").iterdir()} == {
        Path(name).name for prototype in after.prototypes for name in (prototype.crop, prototype.source)
    }


def test_prototypes_of_the_paper_with_a_window(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Free prototypes of two cells under the log similarity, where nothing is left out of training."""
    birds, run, out = make_tiny_birds(tmp_path / "birds"), tmp_path / "run", tmp_path / "out"
    assert main(["train", str(birds), "--out", str(run), *PAPER, "--prototype-shape", "2x1"]) == 0
    assert main(["edit", str(run), "--replace", "4", "--ban", "0", "--out", str(out), "--device", "cpu"]) == 0
    capsys.readouterr()
    assert main(["verify", str(out), "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["max_error"] < 1e-5
    classifier, settings = load(out, "cpu"), layout.read_record(out).config.train
    score_NP, label_N = scores_of(out, "train")
    class_P = classifier.networks[0].prototype_layer.class_P
    problem = (classifier.weight_KP, score_NP, label_N, class_P)
    assert kkt_residual(*problem, lam=settings.l1, ridge=settings.ridge, own_positive=settings.own_positive) < 1e-4
    assert main(["certify", str(out)]) == 0


def test_a_merged_prototype_keeps_a_name(editor: Editor) -> None:
    editor.name(5, "tail")
    editor.merge([3, 5, 4])
    assert [p.name for p in editor.classifier.prototypes] == [None, None, None, "tail", None, None, None]
    assert [p.id for p in editor.classifier.prototypes] == [0, 1, 2, 3, 6, 7, 8]
    assert str(editor.history[-1]) == "merged 5, 4 into 3"
    editor.name(3, "")
    assert {p.name for p in editor.classifier.prototypes} == {None}
    with pytest.raises(UserError, match="at least one"):
        editor.ban([])


def test_the_history_says_who_when_and_why(run: Path, edited: Path) -> None:
    lines = layout.read_edits(edited)
    assert [line["kind"] for line in lines] == ["name", "replace", "ban"]
    assert {(line["who"], line["why"], line["run"]) for line in lines} == {("Ada", "a ruler", str(run.resolve()))}
    assert all(line["when"].endswith("+00:00") for line in lines)
    assert lines[2]["patches"][0]["path"] == load(run, "cpu").prototypes[4].path
    assert line_of(edited, "edit")["from"] == str(run.resolve())
    assert line_of(edited, "edit")["before"] == lines[0]["before"]
    assert line_of(edited, "edit")["after"] == lines[2]["after"]
    with open_editor(edited, device="cpu") as editor:
        editor.ban(6, who="Grace")
        editor.save(edited.parent / "twice")
    again = layout.read_edits(edited.parent / "twice")
    assert again[:3] == lines
    assert again[3]["who"] == "Grace"


def test_names_are_shown_and_escaped(
    run: Path, edited: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = sorted((run.parent / "birds" / "test").rglob("*.jpg"))[0]
    assert main(["explain", str(edited), str(picture), "--out", str(tmp_path / "why"), "--top-classes", "3"]) == 0
    assert main(["atlas", str(edited), "--out", str(tmp_path / "atlas")]) == 0
    shown = "&lt;script&gt;alert(&#39;crown&#39;)&lt;/script&gt; &amp; &#34;red&#34; [/b] (prototype 0)"
    for page in (tmp_path / "why" / "explanations.html", edited / "report.html"):
        text = page.read_text()
        assert shown in text
        assert "<script>alert" not in text
    atlas = (tmp_path / "atlas" / "index.html").read_text()
    assert "<script>alert" not in atlas
    assert "\\u003cscript>alert('crown')\\u003c/script> & \\\"red\\\" [/b] (prototype 0)" in atlas
    document = json.loads((tmp_path / "why" / "explanations.json").read_text())
    names = {row["prototype"]: row["name"] for sheet in document["images"][0]["classes"] for row in sheet["rows"]}
    assert names[0] == ROGUE
    assert names[1] is None
    assert json.loads((tmp_path / "atlas" / "atlas.json").read_text())["prototypes"][0]["name"] == ROGUE
    assert main(["info", str(edited)]) == 0  # brackets are no markup of the terminal's


def test_a_run_without_names_still_loads(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "old")
    document = json.loads((tmp_path / "old" / "prototypes.json").read_text())
    for entry in document["prototypes"]:
        del entry["name"]
    (tmp_path / "old" / "prototypes.json").write_text(json.dumps(document))
    assert load(tmp_path / "old", "cpu").prototypes == load(run, "cpu").prototypes


def test_an_edited_run_is_a_run_like_any_other(run: Path, edited: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(edited), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == line_of(edited, "test")["accuracy"]
    assert main(["certify", str(edited), "--json"]) == 0
    capsys.readouterr()
    assert main(["info", str(edited), "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["edited_from"] == str(run.resolve())
    assert described["validation"]["after_editing"] == line_of(edited, "edit")["after"]["accuracy"]
    pruned, both = run.parent / "pruned", run.parent / "both"
    assert main(["prune", str(edited), "--out", str(pruned), "--keep-one"]) == 0
    assert layout.read_edits(pruned) == layout.read_edits(edited)
    capsys.readouterr()
    assert main(["info", str(pruned), "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["connections_to_other_classes"] == line_of(pruned, "prune")["nonzero_negative"]  # the later step
    assert list(described["validation"])[-2:] == ["before_pruning", "after_pruning"]
    names = [prototype.name for prototype in load(pruned, "cpu").prototypes]
    kept = any(
        (p.path, p.row) == (q.path, q.row) for p in load(pruned).prototypes for q in [load(edited).prototypes[0]]
    )
    assert (ROGUE in names) == kept
    assert main(["combine", str(run), str(edited), "--out", str(both)]) == 0
    assert load(both, "cpu").prototypes[9].name == ROGUE
    assert main(["edit", str(both), "--ban", "1", "--out", str(run.parent / "no")]) == 2
    assert "edit the runs it was combined from" in capsys.readouterr().err


def test_effect_on_a_picture(run: Path, editor: Editor) -> None:
    path = sorted((run.parent / "birds" / "test").rglob("*.jpg"))[0]
    picture = editor.original.prepare(path)
    editor.ban(0)
    editor.name(1, "tail")
    told = editor.effect(picture)
    for when, model in (("before", editor.original), ("after", editor.classifier)):
        prediction = model.predict(path)
        assert told[when]["predicted"] == prediction.class_name
        assert told[when]["probabilities"] == pytest.approx(prediction.probabilities, abs=1e-6)
        points = sum(row[when] for row in told["points"])
        assert points == pytest.approx(told[when]["logits"][told["class"]], abs=1e-5)
    rows = {row["prototype"]: row for row in told["points"]}
    assert rows[0]["after"] == 0
    assert rows[1]["name"] == "tail"
    other = editor.original.classes[2]
    assert editor.effect(picture, other)["class"] == other
    with pytest.raises(UserError, match="no class called"):
        editor.effect(picture, "dodo")


def test_mistakes_are_told_and_nothing_is_written(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, beside = digests(run), sorted(path.name for path in run.parent.iterdir())
    out = run.parent / "never"

    def told(*edits: str, to: Path | None = out) -> str:
        assert main(["edit", str(run), *edits, *(["--out", str(to)] if to else [])]) == 2
        assert sorted(path.name for path in run.parent.iterdir()) == beside
        assert digests(run) == before
        return capsys.readouterr().err

    assert "would lose its last prototype" in told("--ban", "0", "1", "2")
    assert "Prototype 4 was removed by an earlier edit" in told("--ban", "4", "--name", "4", "crown")
    assert "no prototype 9; they are numbered 0 to 8" in told("--ban", "9")
    assert "is of" in told("--merge", "0", "3")
    assert "two prototypes or more" in told("--merge", "3")
    assert "numbered from 0" in told("--replace", "3", "99")
    assert "a prototype already" in told(
        "--replace", "3", "0", "--replace", "4", "0", "--replace", "5", "0", "--replace", "3"
    )
    assert "takes a prototype and" in told("--replace", "3", "1", "2")
    assert "'crown' is none" in told("--ban", "crown")
    assert "at most 200" in told("--name", "0", 201 * "x")
    assert "Nothing to edit" in told()
    assert "--out RUN" in told("--ban", "1", to=None)
    assert "stays as it is" in told("--ban", "1", "--overwrite", to=run)
    assert "stays as it is" in told("--ban", "1", "--overwrite", to=run / "inside")
    assert "only lists" in told("--candidates", "1", "--ban", "1")


def test_other_pictures_are_noticed(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = make_tiny_birds(tmp_path / "other", seed=1)
    assert main(["edit", str(run), "--ban", "1", "--data", str(other), "--out", str(tmp_path / "out")]) == 2
    assert "not those that" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_baseline_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    baseline = tmp_path / "baseline"
    assert main(["baseline", str(run.parent / "birds"), "--out", str(baseline), *TINY, "--baseline-epochs", "1"]) == 0
    capsys.readouterr()
    assert main(["edit", str(baseline), "--ban", "1", "--out", str(tmp_path / "out")]) == 2
    assert "baseline without prototypes" in capsys.readouterr().err


def test_maps_too_large_for_memory_stay_on_disk(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_editor(run, device="cpu") as editor:
        editor.ban(4)
        expected = editor.classifier.weight_KP
    monkeypatch.setattr(latents_module, "MEMORY_SHARE", 0.0)
    with open_editor(run, device="cpu") as editor:
        folder = Path(editor._workshop.scratch.name)
        assert (folder / "train.bin").stat().st_size > 0
        editor.ban(4)
        assert torch.equal(editor.classifier.weight_KP, expected)
    assert not folder.exists()
