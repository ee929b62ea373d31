"""Models that are given away: the same model elsewhere, with a card, and nothing of the machine it was made on."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from helpers.runs import DEFAULT, make_tiny_birds

import likethat
from likethat import Classifier, UserError
from likethat.cli.parser import main
from likethat.explaining.explanation import explain

ROGUE = "<script>*Owl*</script>: [x](y)"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a class whose name is neither good HTML nor good Markdown, and an expert's corrections."""
    folder = tmp_path_factory.mktemp("hub")
    birds = make_tiny_birds(folder / "birds")
    for part in ("train", "val", "test"):
        first = sorted((birds / part).iterdir())[0]
        first.rename(birds / part / ROGUE.replace("/", "\u2215"))
    assert main(["train", str(birds), "--out", str(folder / "trained"), *DEFAULT]) == 0
    edits = ["--ban", "4", "--name", "0", "crown", "--who", "Grace Hopper", "--why", "secret"]
    assert main(["edit", str(folder / "trained"), *edits, "--out", str(folder / "run")]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def given(run: Path) -> Path:
    return likethat.load(run, "cpu").save_pretrained(run.parent / "given")


def test_the_model_is_the_same_elsewhere(run: Path, given: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(given, elsewhere)
    before, after = likethat.load(run, "cpu"), Classifier.from_pretrained(elsewhere, device="cpu")
    for name, value in before.members.state_dict().items():
        assert torch.equal(after.members.state_dict()[name], value)
    picture = sorted((run.parent / "birds" / "test").rglob("*.jpg"))[0]
    assert explain(after, picture).to_dict(maps=True) == explain(before, picture).to_dict(maps=True)
    explain(after, picture).save(tmp_path / "why.html")
    assert after.predict(picture) == before.predict(picture)
    assert main(["verify", str(elsewhere), "--data", str(run.parent / "birds")]) == 0
    assert main(["evaluate", str(elsewhere), "--data", str(run.parent / "birds")]) == 0


def test_the_layout_is_the_hubs_and_holds_no_private_matter(run: Path, given: Path) -> None:
    names = {path.name for path in given.iterdir()}
    assert {"config.json", "model.safetensors", "README.md", "prototypes.json", "prototypes"} <= names
    assert not names & {"edits.jsonl", "checkpoints", "report.html"}
    for path in given.rglob("*"):
        if path.suffix in (".json", ".jsonl", ".md"):
            text = path.read_text()
            assert str(run.parent) not in text, path
            assert "Hopper" not in text
            assert "secret" not in text
    assert all(path.suffix in (".json", ".jsonl", ".md", ".safetensors", ".jpg", "") for path in given.rglob("*"))


def test_the_card_tells_what_the_run_knows(run: Path, given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = (given / "README.md").read_text()
    _, head, text = card.split("---\n", 2)
    values = {line.split(": ", 1)[0]: json.loads(line.split(": ", 1)[1]) for line in head.splitlines()}
    assert values["library_name"] == "likethat"
    capsys.readouterr()
    assert main(["info", str(given), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["finished"]
    (index,) = values["model-index"]
    assert index["results"][0]["metrics"][0]["value"] == told["test"]["accuracy"]
    assert f"| accuracy | {told['test']['accuracy']:.1%} |" in text
    assert "18 train, 9 val, 9 test images" in text
    assert "8 prototypes, 2 to 3 of each class" in text
    assert "A person has named 1 of them" in text
    assert "Corrected by hand (1 x ban, 1 x name)" in text
    assert "top-5" not in text, "of three classes"
    assert "looked at 2 times" in text  # when the run was trained, and when it was corrected
    assert "## Limits" in text
    assert "<script>" not in text
    assert "&lt;script&gt;\\*Owl\\*&lt;∕script&gt;: \\[x\\](y)" in text


def test_a_combined_run_is_given_with_its_members(run: Path, tmp_path: Path) -> None:
    assert main(["combine", str(run), str(run.parent / "trained"), "--out", str(tmp_path / "both")]) == 0
    both = likethat.load(tmp_path / "both", "cpu")
    again = Classifier.from_pretrained(both.save_pretrained(tmp_path / "given"), "cpu")
    picture = sorted((run.parent / "birds" / "test").rglob("*.jpg"))[0]
    assert explain(again, picture).to_dict() == explain(both, picture).to_dict()
    assert "Combined from 2 networks" in (tmp_path / "given" / "README.md").read_text()


def test_an_id_is_looked_up_on_the_hub(given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the hub's own client, out of a cache as its downloads leave it."""
    constants = pytest.importorskip("huggingface_hub.constants")
    repository = tmp_path / "models--ada--birds"
    shutil.copytree(given, repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert Classifier.from_pretrained("ada/birds", "cpu").classes == likethat.load(given, "cpu").classes
    with pytest.raises(UserError, match="ada/owls is no folder, and the hub does not give it"):
        Classifier.from_pretrained("ada/owls")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match="pip install huggingface_hub"):
        Classifier.from_pretrained("ada/birds")


def test_mistakes_are_told(run: Path, given: Path, tmp_path: Path) -> None:
    model = likethat.load(run, "cpu")
    with pytest.raises(UserError, match="--overwrite"):
        model.save_pretrained(given)
    shutil.copytree(given, tmp_path / "clone")
    (tmp_path / "clone" / ".git").mkdir()
    with pytest.raises(UserError, match="git repository"):
        model.save_pretrained(tmp_path / "clone", overwrite=True)
    assert (tmp_path / "clone" / ".git").is_dir()
    (tmp_path / "vit").mkdir()
    (tmp_path / "vit" / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(UserError, match="not replaced"):
        model.save_pretrained(tmp_path / "vit", overwrite=True)
    assert (tmp_path / "vit" / "config.json").is_file()
    with pytest.raises(UserError, match="lie in one another"):
        model.save_pretrained(run / "inside")
    with torch.no_grad():
        model.networks[0].last_layer.weight += 1
    with pytest.raises(UserError, match="was changed since"):
        model.save_pretrained(tmp_path / "changed")
    with pytest.raises(UserError, match="There is no folder"):
        Classifier.from_pretrained(tmp_path / "none")
    with pytest.raises(UserError, match="There is no folder"):
        Classifier.from_pretrained("../none/at/all")


@pytest.mark.parametrize("name", ["../../owl.jpg", "/etc/owl.jpg"])
def test_somebody_elses_model_reads_no_files_outside_its_folder(given: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(given, tmp_path / "evil")
    document = json.loads((tmp_path / "evil" / "prototypes.json").read_text())
    document["prototypes"][0]["crop"] = name
    (tmp_path / "evil" / "prototypes.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match="outside its folder"):
        Classifier.from_pretrained(tmp_path / "evil")
