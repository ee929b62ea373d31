"""`likethat edit --without`: nothing of the pictures stays in the run but what the backbone learned."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers.last_layer import kkt_residual
from helpers.runs import QUICK, likethat, make_tiny_run

from likethat.data.cache import decode_samples
from likethat.data.loaders import hold
from likethat.errors import UserError
from likethat.inference.passes import last_layer_images, score_images
from likethat.inference.source_image import leave_source_out
from likethat.runs import layout
from likethat.runs.classifier import Classifier, load
from likethat.runs.data import open_run_data
from likethat.workflows.edit.editor import open_editor
from likethat.workflows.edit.history import read_history
from likethat.workflows.edit.withdraw import open_without


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("withdraw")
    make_tiny_run(folder, QUICK)
    return folder


@pytest.fixture
def place(trained: Path, tmp_path: Path) -> Path:
    """Data and run to change, with an atlas and a file of the user's in the run folder."""
    shutil.copytree(trained / "birds", tmp_path / "birds")
    shutil.copytree(trained / "run", tmp_path / "run")
    (tmp_path / "run" / "atlas").mkdir()
    for name in ("index.html", "atlas.json"):
        (tmp_path / "run" / "atlas" / name).write_text("{}")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    (tmp_path / "run" / "attribution.safetensors").write_bytes(b"maps of prototypes' pictures")
    return tmp_path


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def residual_of(classifier: Classifier, data: Path) -> float:
    """How far the last layer is from the best one for the images that the run still knows."""
    dataset = open_run_data(classifier, str(data))
    network, config = classifier.networks[0], layout.read_record(classifier.path).config
    pixels = decode_samples(dataset.root, dataset.train, network.backbone.input_size).pixels
    views = last_layer_images(hold(pixels, dataset.train, torch.device("cpu")), config)
    paths = [sample.path for sample in dataset.train]
    source_P = torch.tensor([paths.index(prototype.path) for prototype in classifier.prototypes])
    score_NP = score_images(network, views)
    image_N1 = (torch.arange(len(score_NP)) % len(paths))[:, None]
    fair_NP = leave_source_out(score_NP, image_N1, source_P, network.own_KP)
    problem = (classifier.weight_KP, fair_NP, views.label_N, network.prototype_layer.class_P)
    settings = config.train
    return kkt_residual(*problem, lam=settings.l1, ridge=settings.ridge, own_positive=settings.own_positive)


def test_pixels_prototypes_and_connections_go(place: Path) -> None:
    run, birds = place / "run", place / "birds"
    before = load(run, "cpu")
    victim = before.prototypes[0].path
    held_out = [next((birds / part).rglob("*.jpg")) for part in ("val", "test")]
    gone = {victim, *(path.relative_to(birds).as_posix() for path in held_out)}
    cut = [prototype.id for prototype in before.prototypes if prototype.path == victim]
    shown = [before.prototypes[number].crop for number in cut] + [before.prototypes[0].source]
    pixels = [base64.b64encode((run / name).read_bytes()) for name in shown]
    assert all(text in (run / "report.html").read_bytes() for text in pixels), "the test would see them"
    tested = held_out[1].relative_to(birds).as_posix()
    assert tested in (run / "confusions.html").read_text(), "with its pixels"
    command = ["edit", run, "--without", victim, *held_out, "--data", birds, "--why", "asked to", "--who", "Ada"]
    done = likethat(*command, "--device", "cpu")

    after = load(run, "cpu")
    assert len(after.prototypes) == len(before.prototypes)
    assert gone.isdisjoint(prototype.path for prototype in after.prototypes)
    vectors = [classifier.networks[0].prototype_layer.prototype_PDhw for classifier in (before, after)]
    for number, (old, new) in enumerate(zip(before.prototypes, after.prototypes, strict=True)):
        assert new.label == old.label
        assert torch.equal(vectors[0][number], vectors[1][number]) == (number not in cut)
    unprojected = after.networks[0].prototype_layer.unprojected_PDhw
    assert torch.equal(unprojected[cut], vectors[1][cut]), "nothing remembers the old patch"
    assert residual_of(after, birds) < 1e-4
    for name, content in ((path.name, path.read_bytes()) for path in run.rglob("*") if path.is_file()):
        assert not any(text in content or base64.b64decode(text) in content for text in pixels), name
    with (run / "images.csv").open() as file:
        assert gone.isdisjoint(row["image"] for row in csv.DictReader(file))
    assert tested not in (run / "confusions.html").read_text()
    assert not (run / "atlas").exists()
    assert not (run / "attribution.safetensors").exists()
    assert (run / "notes.txt").read_text() == "mine"

    (edit,) = read_history(run)
    assert (edit.kind, set(edit.withdrawn), edit.who, edit.why) == ("withdraw", gone, "Ada", "asked to")
    assert list(edit.prototypes) == cut
    assert [patch["path"] for patch in edit.new_patches] == [after.prototypes[number].path for number in cut]
    for text in ("backbone has still learned from them", "atlas; make these again", "notes.txt; look whether"):
        assert text in done.stdout
    assert "has still learned from them" in (run / "report.html").read_text()
    assert layout.read_record(run).data.counts == {"train": 17, "val": 8, "test": 8}

    for path in gone:  # now that the run does not need them
        (birds / path).unlink()
    assert json.loads(likethat("verify", run, "--data", birds, "--json", "--device", "cpu").stdout)["passed"]
    likethat("edit", run, "--ban", "4", "--data", birds, "--out", place / "later", "--device", "cpu")
    assert [line.kind for line in read_history(place / "later")] == ["withdraw", "ban"]


def test_into_another_run_the_first_stays_and_it_is_said(place: Path) -> None:
    run, birds = place / "run", place / "birds"
    kept, victim = digests(run), load(run, "cpu").prototypes[5].path
    options = ["--data", birds, "--out", place / "out", "--device", "cpu", "--json"]
    document = json.loads(likethat("edit", run, "--without", birds / victim, "--ban", "0", *options).stdout)
    assert digests(run) == kept
    assert any("still holds their pixels" in note for note in document["notes"])
    assert [edit["kind"] for edit in document["edits"]] == ["withdraw", "ban"]
    assert len(load(place / "out", "cpu").prototypes) == 8


def test_pictures_that_are_deleted_already_can_be_withdrawn(place: Path) -> None:
    run, birds = place / "run", place / "birds"
    victim = load(run, "cpu").prototypes[3].path
    (birds / victim).unlink()
    command = ["edit", run, "--without", victim, "--data", birds, "--device", "cpu"]
    assert "1 withdrawn pictures are gone already" in likethat(*command).stderr
    assert victim not in {prototype.path for prototype in load(run, "cpu").prototypes}
    verified = json.loads(likethat("verify", run, "--data", birds, "--json", "--device", "cpu").stdout)
    assert verified["passed"]


def test_a_withdrawal_is_not_undone(place: Path) -> None:
    run, birds = place / "run", str(place / "birds")
    victim = load(run, "cpu").prototypes[0].path
    with open_without(run, [victim], birds, "cpu") as editor:
        editor.ban(4)
        editor.undo()
        with pytest.raises(UserError, match="A withdrawal is not undone"):
            editor.undo()
        assert [edit.kind for edit in editor.history] == ["withdraw"]
        assert all(column.prototype.path != victim for column in editor.state.columns)
        assert all(editor.sample(candidate).path != victim for candidate in editor.candidates(0, count=50))
    with open_editor(run, birds, "cpu") as editor:
        editor.ban(4)
        with pytest.raises(UserError, match="would change"):  # only what is withdrawn leaves the run itself
            editor.save(run, overwrite=True)


def test_what_cannot_be_withdrawn_is_told_and_changes_nothing(place: Path) -> None:
    run, birds = place / "run", place / "birds"
    kept = digests(run)
    species = sorted(path.name for path in (birds / "train").iterdir())[0]
    for path, told in (
        (birds / "train" / species, "would have no training picture left"),
        ("none.jpg", "knows no picture"),
    ):
        done = likethat("edit", run, "--without", path, "--data", birds, "--device", "cpu", check=2)
        assert told in done.stderr
    assert "say where with --out" in likethat("edit", run, "--without", "train", "--ban", "3", check=2).stderr
    assert digests(run) == kept
