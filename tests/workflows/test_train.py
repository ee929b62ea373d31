"""A run as a user sees it: made, proven, asked, moved, damaged."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers.runs import DEFAULT, PAPER, TINY, likethat, make_tiny_birds
from PIL import Image
from safetensors.torch import load_file, save_file

import likethat as package
from likethat.cli.parser import main
from likethat.errors import UserError


@pytest.fixture(scope="module")
def birds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_birds(tmp_path_factory.mktemp("birds") / "data")


@pytest.fixture(scope="module")
def run(birds: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    told = likethat("train", birds, "--out", folder, *DEFAULT, "--tensorboard").stderr
    assert told.count("so the training accuracy falls") == 1, "once, in the joint stage"
    assert told.index("joint epoch 1 of 3") < told.index("so the training accuracy falls")
    return folder


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    shutil.copytree(run, tmp_path / "copy")
    return tmp_path / "copy"


def one_sentence(stderr: str) -> str:
    lines = [line for line in stderr.strip().splitlines() if line]
    assert len(lines) == 1, stderr
    assert lines[0].startswith("likethat: ")
    return lines[0]


def test_run_folder_holds_what_is_promised(run: Path) -> None:
    for name in ("config.json", "model.safetensors", "prototypes.json", "metrics.jsonl", "report.html"):
        assert (run / name).exists()
    assert not (run / "checkpoints").exists(), "a finished run needs no state"
    prototypes = json.loads((run / "prototypes.json").read_text())["prototypes"]
    assert len(prototypes) == 9
    for prototype in prototypes:
        assert len(prototype["sha256"]) == 64
        assert prototype["moved"] >= 0
        x0, y0, x1, y1 = prototype["cell"]
        assert (x1 - x0, y1 - y0) == (16, 16)  # a 4x4 map over 64 pixels
        assert (prototype["column"] * 16, prototype["row"] * 16) == (x0, y0)
        for picture in ("crop", "source"):
            assert min(Image.open(run / prototype[picture]).size) > 0
    assert not list(run.rglob("*.pkl")) + list(run.rglob("*.pt")) + list(run.rglob("*.pth"))
    stages = [json.loads(line)["stage"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    one_cycle = ["joint", "project", "last_layer"]
    assert stages == ["parts", *["baseline"] * 2, "choose", "joint", *one_cycle, *one_cycle, "test_projection", "test"]
    assert list((run / "tensorboard").iterdir())


@pytest.mark.parametrize("preset", ["default", "paper"])
def test_verify_proves_every_prototype(birds: Path, run: Path, tmp_path: Path, preset: str) -> None:
    if preset == "paper":
        run = tmp_path / "run"
        likethat("train", birds, "--out", run, *PAPER)
    document = json.loads(likethat("verify", run, "--json").stdout)
    assert document["passed"]
    assert document["prototypes"] == 9
    assert document["max_error"] < 1e-5


def test_verify_finds_a_changed_image_a_missing_one_and_a_changed_model(
    birds: Path, copy: Path, tmp_path: Path
) -> None:
    prototypes = json.loads((copy / "prototypes.json").read_text())["prototypes"]
    paths = list(dict.fromkeys(prototype["path"] for prototype in prototypes))
    data = tmp_path / "data"
    shutil.copytree(birds, data)
    Image.new("RGB", (64, 64)).save(data / paths[0])
    (data / paths[1]).unlink()
    done = likethat("verify", copy, "--data", data, "--json", check=1)
    failures = {failure["path"]: failure["reason"] for failure in json.loads(done.stdout)["failures"]}
    assert set(failures) == {paths[0], paths[1]}
    assert "changed" in failures[paths[0]]
    assert "cannot be read" in failures[paths[1]]
    tensors = load_file(copy / "model.safetensors")
    tensors["prototype_layer.prototype_PDhw"][4] += 1e-3
    save_file(tensors, copy / "model.safetensors")
    done = likethat("verify", copy, "--json", check=1)
    assert [failure["prototype"] for failure in json.loads(done.stdout)["failures"]] == [4]
    assert "NOT proven" in likethat("verify", copy, check=1).stdout


@pytest.fixture(scope="module")
def paper_run(birds: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("paper") / "run"
    likethat("train", birds, "--out", folder, *PAPER, "--joint-epochs", "2")
    return folder


def test_nothing_before_the_last_layer_moves_after_projection(paper_run: Path) -> None:
    """The published code let BatchNorm drift here. With BatchNorm training on, the proof must still hold."""
    assert json.loads(likethat("verify", paper_run, "--json").stdout)["passed"]


def test_test_images_are_measured_before_and_after_the_projection(birds: Path, paper_run: Path) -> None:
    """Picture by picture, with the paper's first last layer and the prototypes as they stood."""
    told = [json.loads(line) for line in (paper_run / "metrics.jsonl").read_text().splitlines()][-2]
    model = package.load(paper_run, "cpu")
    network = model.networks[0]
    layer = network.prototype_layer
    assert not torch.equal(layer.prototype_PDhw, layer.unprojected_PDhw)
    own_KP = network.own_KP.float()
    for when, prototypes in (("after", layer.prototype_PDhw.clone()), ("before", layer.unprojected_PDhw)):
        layer.prototype_PDhw.data = prototypes
        entropy, right = [], []
        for path in sorted((birds / "test").rglob("*.jpg")):
            score_P = model.outputs([model.prepare(path)])[0].score_BP[0]
            logits_K, label = (1.5 * own_KP - 0.5) @ score_P, model.classes.index(path.parent.name)
            entropy.append(-float(logits_K.log_softmax(0)[label]))
            right.append(int(logits_K.argmax()) == label)
        assert told[when]["cross_entropy"] == pytest.approx(sum(entropy) / 9, rel=1e-4)
        assert told[when]["accuracy"] == pytest.approx(sum(right) / 9)


def test_evaluate_agrees_with_training_and_with_predict(birds: Path, run: Path) -> None:
    evaluation = json.loads(likethat("evaluate", run, "--json").stdout)
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert evaluation["accuracy"] == last["accuracy"]
    assert evaluation["images"] == 9
    images = sorted((birds / "test").rglob("*.jpg"))
    answers = json.loads(likethat("predict", run, *images, "--json").stdout)["images"]
    right = [answer["class_name"] == Path(answer["path"]).parent.name for answer in answers]
    assert sum(right) / 9 == pytest.approx(evaluation["accuracy"])
    assert sum(answers[0]["probabilities"].values()) == pytest.approx(1)


def test_tables_list_what_was_held_out_and_what_is_wrong(birds: Path, run: Path, tmp_path: Path) -> None:
    shown = likethat("evaluate", run, "--csv", tmp_path / "test.csv").stdout
    assert "top-5" not in shown, "of three classes"
    with (run / "images.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    held_out = [row for row in rows if row["part"] in ("test", "val")]
    assert {(row["part"], row["image"]) for row in rows} == {
        (path.relative_to(birds).parts[0], path.relative_to(birds).as_posix()) for path in birds.rglob("*.jpg")
    }
    answers = json.loads(likethat("predict", run, *(birds / row["image"] for row in held_out), "--json").stdout)
    for row, answer in zip(held_out, answers["images"], strict=True):
        assert row["class"] == Path(row["image"]).parent.name
        assert row["predicted"] == answer["class_name"]
        assert float(row["probability"]) == pytest.approx(answer["probability"], abs=2e-4)
        assert row["right"] == ("yes" if row["predicted"] == row["class"] else "no")
    assert {(row["predicted"], row["right"]) for row in rows if row["part"] == "train"} == {("", "")}
    right = sum(row["right"] == "yes" for row in held_out if row["part"] == "test")
    assert f"{right} of 9 are right" in shown
    with (tmp_path / "test.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == [row for row in rows if row["part"] == "test"]
    assert "images.csv" in json.loads((run / "manifest.json").read_text())["files"]
    assert f"{9 - right} of 9" in (run / "report.html").read_text()
    refused = likethat("evaluate", run, "--csv", tmp_path / "a.csv", "--interpretability", check=2)
    assert "--csv" in one_sentence(refused.stderr)


def test_other_data_is_evaluated_whole_and_the_same_data_elsewhere_on_its_test_part(
    birds: Path, run: Path, tmp_path: Path
) -> None:
    shutil.copytree(birds, tmp_path / "moved")
    assert json.loads(likethat("evaluate", run, "--data", tmp_path / "moved", "--json").stdout)["images"] == 9
    shutil.copytree(make_tiny_birds(tmp_path / "new", seed=5) / "train", tmp_path / "flat")
    evaluation = json.loads(likethat("evaluate", run, "--data", tmp_path / "flat", "--json").stdout)
    assert (evaluation["images"], evaluation["part"]) == (18, "all")
    (tmp_path / "flat" / "Dodo").mkdir()
    for number in range(3):
        Image.new("RGB", (9, 9), (number, 0, 0)).save(tmp_path / "flat" / "Dodo" / f"{number}.png")
    refused = likethat("evaluate", run, "--data", tmp_path / "flat", check=2)
    assert "Dodo" in one_sentence(refused.stderr)


def test_python_interface(birds: Path, run: Path, tmp_path: Path) -> None:
    model = package.load(run, device="cpu")
    image = next((birds / "test").rglob("*.jpg"))
    prediction = model.predict(image)
    assert prediction.class_name in model.classes
    same = [model.predict(source) for source in (str(image), image.read_bytes(), Image.open(image))]
    assert all(other == prediction for other in same)
    for other in model.predict([image, image]):
        assert other.class_name == prediction.class_name
        assert other.probability == pytest.approx(prediction.probability, abs=1e-5)
    network = model.networks[0]
    assert isinstance(network, torch.nn.Module)
    output = network(torch.rand(2, 3, 64, 64))
    assert torch.allclose(output.score_BP @ network.last_layer.weight.T, output.logits_BK, atol=1e-5)
    options = {"backbone": "test_resnet", "weights": "none", "input_size": 64, "latent_width": 16, "batch_size": 8}
    trained = package.train(
        birds, out=tmp_path / "r", device="cpu", prototypes_per_class=2, baseline_epochs=1, joint_epochs=1, **options
    )
    assert len(trained.prototypes) == 6


def test_a_run_explains_without_the_data_set(run: Path, birds: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "alone")
    image = tmp_path / "new.jpg"
    shutil.copy(next((birds / "test").rglob("*.jpg")), image)
    hidden = birds.with_name("hidden")
    birds.rename(hidden)
    try:
        assert likethat("predict", tmp_path / "alone", image).stdout.startswith(str(image))
        assert "--data" in one_sentence(likethat("evaluate", tmp_path / "alone", check=2).stderr)
        assert "--data" in one_sentence(likethat("verify", tmp_path / "alone", check=2).stderr)
        assert likethat("verify", tmp_path / "alone", "--data", hidden).returncode == 0
    finally:
        hidden.rename(birds)


def test_existing_folders_are_not_lost(birds: Path, run: Path, tmp_path: Path) -> None:
    before = (run / "model.safetensors").read_bytes()
    assert "--overwrite" in one_sentence(likethat("train", birds, "--out", run, *DEFAULT, check=2).stderr)
    assert (run / "model.safetensors").read_bytes() == before
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.txt").write_text("years of work")
    for flag in ([], ["--overwrite"], ["--resume"]):
        likethat("train", birds, "--out", tmp_path / "thesis", *DEFAULT, *flag, check=2)
        assert (tmp_path / "thesis" / "chapter1.txt").read_text() == "years of work"
    # A mistake elsewhere in the command must not cost the run that was to be replaced.
    likethat("train", birds / "typo", "--out", run, *DEFAULT, "--overwrite", check=2)
    likethat("train", birds, "--out", run, *DEFAULT, "--weights", "typo.pth", "--overwrite", check=2)
    assert (run / "model.safetensors").read_bytes() == before
    assert "finished already" in likethat("train", birds, "--out", run, *DEFAULT, "--resume").stderr


def test_a_finished_run_whose_report_is_gone_is_not_trained_again(birds: Path, copy: Path) -> None:
    before = (copy / "model.safetensors").stat().st_mtime_ns
    (copy / "report.html").unlink()
    assert "finished already" in likethat("train", birds, "--out", copy, *DEFAULT, "--resume").stderr
    assert (copy / "model.safetensors").stat().st_mtime_ns == before
    assert "unfinished" not in likethat("info", copy).stdout


def test_runs_may_be_kept_among_the_images(birds: Path, tmp_path: Path) -> None:
    flat = tmp_path / "flat"
    shutil.copytree(birds / "train", flat)
    run = flat / "run"
    likethat("train", flat, "--out", run, *DEFAULT)
    likethat("atlas", run, "--out", flat / "atlas")
    likethat("explain", run, next(flat.glob("*/*.jpg")), "--out", flat / "explanations")
    likethat("evaluate", run)
    likethat("prune", run, "--keep-one", "--out", flat / "smaller" / "pruned")
    likethat("train", flat, "--out", flat / "runs" / "again", *DEFAULT)
    weights = (run / "model.safetensors").read_bytes()
    assert (flat / "runs" / "again" / "model.safetensors").read_bytes() == weights
    for name in ("report.html", "model.safetensors"):
        (run / name).unlink()
    likethat("train", flat, "--out", run, *DEFAULT, "--resume")
    assert (run / "model.safetensors").read_bytes() == weights


@pytest.mark.parametrize("verb", ["train", "baseline", "prune", "combine", "edit", "demo"])
def test_a_config_file_of_another_program_makes_no_run(
    birds: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    mine = tmp_path / "run"
    mine.mkdir()
    (mine / "config.json").write_text('{"model_type": "vit", "architectures": ["ViTModel"]}')
    (mine / "chapter1.txt").write_text("years of work")
    words: dict[str, list[object]] = {
        "train": [birds, *DEFAULT],
        "baseline": [birds, *DEFAULT],
        "prune": [run],
        "combine": [run, run],
        "edit": [run, "--ban", 0, "--why", "test"],
        "demo": [],
    }
    out = tmp_path if verb == "demo" else mine
    assert main([verb, *map(str, words[verb]), "--out", str(out), "--overwrite"]) == 2
    assert "another --out" in one_sentence(capsys.readouterr().err)
    assert sorted(path.name for path in mine.iterdir()) == ["chapter1.txt", "config.json"]


def test_links_in_an_overwritten_run_go_and_what_they_point_to_stays(birds: Path, copy: Path, tmp_path: Path) -> None:
    (tmp_path / "album").mkdir()
    (tmp_path / "album" / "owl.jpg").write_bytes(b"owl")
    (copy / "album").symlink_to(tmp_path / "album")
    (copy / "owl.jpg").symlink_to(tmp_path / "album" / "owl.jpg")
    (copy / "broken").symlink_to(tmp_path / "nowhere")
    (copy / "prototypes" / "album").symlink_to(tmp_path / "album")
    assert main(["train", str(birds), "--out", str(copy), *DEFAULT, "--overwrite"]) == 0
    assert not [path for path in copy.rglob("*") if path.is_symlink()]
    assert (tmp_path / "album" / "owl.jpg").read_bytes() == b"owl"


def test_a_run_under_version_control_is_not_overwritten(
    birds: Path, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copy / ".git").mkdir()
    command = ["train", str(birds), "--out", str(copy), *DEFAULT]
    assert main([*command, "--overwrite"]) == 2
    assert "history would be lost" in one_sentence(capsys.readouterr().err)
    assert (copy / "model.safetensors").is_file()
    assert main([*command, "--resume"]) == 0
    capsys.readouterr()
    copy.rename(copy.with_name("run"))
    assert main(["demo", "--out", str(copy.parent), "--overwrite"]) == 2
    assert "history would be lost" in one_sentence(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda run: (run / "config.json").unlink(), "not a run folder"),
        (lambda run: (run / "config.json").write_text("{"), "damaged"),
        (lambda run: (run / "config.json").write_text("[]"), "damaged"),
        (lambda run: (run / "model.safetensors").write_bytes(b"\0" * 100), "damaged"),
        (lambda run: (run / "model.safetensors").unlink(), "unfinished"),
        (lambda run: (run / "prototypes.json").write_text('{"prototypes": [{}]}'), "damaged"),
        (lambda run: shutil.rmtree(run), "no run folder"),
    ],
)
def test_damaged_runs_get_a_sentence(copy: Path, damage: object, words: str) -> None:
    damage(copy)  # type: ignore[operator]
    with pytest.raises(UserError, match=words):
        package.load(copy, device="cpu")


def test_a_newer_run_asks_for_an_update(copy: Path, birds: Path) -> None:
    document = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**document, "format": 99, "likethat": "7.0"}))
    message = one_sentence(likethat("predict", copy, next((birds / "test").rglob("*.jpg")), check=2).stderr)
    assert "newer likethat (7.0)" in message


def test_bad_images_stop_training_before_any_work_or_are_skipped(birds: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(birds, data)
    victims = sorted((data / "train").rglob("*.jpg"))[:4]
    victims[0].write_bytes(b"")
    victims[1].write_bytes(victims[1].read_bytes()[:300])
    victims[2].write_text("<html>not found</html>")
    shutil.copy(sorted((data / "test").rglob("*.jpg"))[0], victims[3])
    check = json.loads(likethat("data", "check", data, "--json", check=1).stdout)
    assert len(check["problems"]) == 4
    done = likethat("train", data, "--out", tmp_path / "run", *DEFAULT, check=2)
    for victim in victims[:3]:
        assert str(victim.relative_to(data)) in done.stderr
    assert "--skip-bad" in done.stderr
    assert "baseline epoch" not in done.stderr
    assert not (tmp_path / "run").exists()
    done = likethat("train", data, "--out", tmp_path / "run", *DEFAULT, "--skip-bad")
    assert "without 4 bad files" in done.stderr
    assert json.loads(likethat("verify", tmp_path / "run", "--json").stdout)["passed"]
    assert json.loads(likethat("evaluate", tmp_path / "run", "--json").stdout)["images"] == 8


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "/nowhere", "--out", "x"], "/nowhere"),
        (["train", "DATA", "--out", "x", "--batch-size", "few"], "--batch-size"),
        (["train", "DATA", "--out", "x", "--backbone", "resnet_9000"], "resnet_9000"),
        (["train", "DATA", "--out", "x", "--device", "tpu"], "tpu"),
        (["train", "DATA", "--out", "x", "--preset", "best"], "best"),
        (["train", "DATA"], "--out"),
        (["fly"], "fly"),
        (["data", "synth", "DATA"], "not empty"),
        (["data", "synth", "x", "--species", "99"], "--species"),
    ],
)
def test_mistakes_get_one_sentence_and_exit_code_2(
    birds: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    filled = [word.replace("DATA", str(birds)).replace("RUN", str(run)) for word in arguments]
    done = likethat(*filled, check=2)
    assert words in one_sentence(done.stderr)
    assert done.stdout == ""


def test_predict_skips_what_is_no_picture_and_answers_for_the_rest(
    birds: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def predicted(*arguments: object, check: int = 0) -> tuple[str, str]:
        assert main(["predict", str(run), *map(str, arguments), "--device", "cpu"]) == check
        return tuple(capsys.readouterr())

    bad, good = ["/nowhere.jpg", str(birds / "species.json")], sorted((birds / "test").rglob("*.jpg"))[:2]
    out, err = predicted(good[0], *bad, good[1], good[0])
    answered = [line.rpartition(":")[0] for line in out.splitlines() if line.startswith("/")]
    assert answered == [str(good[number]) for number in (0, 1, 0)]
    assert [line.split(": ")[1] for line in err.splitlines()] == [f"skipped {path}" for path in bad]
    document = json.loads(predicted(*bad, good[1], "--json")[0])
    assert document["images"] == json.loads(predicted(good[1], "--json")[0])["images"]
    assert [entry["path"] for entry in document["skipped"]] == bad
    assert "cannot be opened" in document["skipped"][0]["reason"]
    out, err = predicted(*bad, check=2)
    assert out == ""
    assert "Nothing was predicted" in err.splitlines()[-1]


def test_info_tells_of_the_cycle_that_was_kept(copy: Path) -> None:
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["stage"] == "last_layer":
            line["val"]["accuracy"] = 0.9 - 0.1 * line["cycle"]
            line["nonzero_negative"] = 100 + line["cycle"]
        if line["stage"] == "project":
            line["before"]["accuracy"] = 0.5 + 0.1 * line["cycle"]
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    description = json.loads(likethat("info", copy, "--json").stdout)
    assert description["connections_to_other_classes"] == 100
    assert description["validation"]["before_projection"] == 0.5
    assert description["validation"]["after_last_layer"] == 0.9


def test_more_prototypes_than_patches_is_told(birds: Path, tmp_path: Path) -> None:
    options = [*TINY, "--prototypes-per-class", "100", "--baseline-epochs", "1", "--joint-epochs", "1"]
    message = likethat("train", birds, "--out", tmp_path / "run", *options, check=2).stderr.strip().splitlines()[-1]
    assert "--prototypes-per-class" in message
    assert not (tmp_path / "run" / "metrics.jsonl").exists(), "told before anything was trained"


@pytest.mark.parametrize(("size", "map_size"), [(64, "4x4"), (112, "7x7")])
def test_a_coarse_map_is_warned_of(
    birds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], size: int, map_size: str
) -> None:
    small = ["--baseline-epochs", "0", "--fit-head", "--joint-epochs", "0", "--input-size", str(size)]
    assert main(["train", str(birds), "--out", str(tmp_path / "run"), *TINY, *small]) == 0
    told = "".join(capsys.readouterr())
    assert f" {map_size} map" in told
    assert ("Warning: a map of 4x4 is coarser than 7x7" in " ".join(told.split())) == (size == 64)
