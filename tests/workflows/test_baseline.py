"""The baseline: training's own classifier, resumable, evaluated, refused elsewhere; and the comparison."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from helpers.interrupted import signalled
from helpers.runs import DEFAULT, PAPER, likethat, make_tiny_birds
from PIL import Image
from safetensors.torch import save_file

from likethat.cli.parser import main
from likethat.data.decode import read_image, to_input
from likethat.errors import UserError
from likethat.models.backbone import create_backbone
from likethat.models.baseline import BaselineClassifier
from likethat.report.comparison import class_activation, comparison_figure
from likethat.runs import layout
from likethat.runs.baseline import load_baseline, read_baseline
from likethat.runs.classifier import load


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("baseline")
    birds = make_tiny_birds(folder / "birds")
    assert main(["train", str(birds), "--out", str(folder / "run"), *DEFAULT]) == 0
    assert main(["baseline", str(birds), "--out", str(folder / "baseline"), *DEFAULT]) == 0
    return folder


def lines_of(run: Path) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in (run / layout.METRICS).read_text().splitlines()]
    for line in lines:
        line.pop("seconds", None)
    return lines


def picture_of(folder: Path) -> Path:
    return next(path for path in sorted((folder / "birds" / "test").rglob("*")) if path.is_file())


def test_it_is_the_classifier_that_training_begins_with(folder: Path) -> None:
    baseline, trained = lines_of(folder / "baseline"), lines_of(folder / "run")
    assert [line["stage"] for line in baseline] == ["baseline", "baseline", "test"]
    assert baseline[:2] == trained[1:3]  # after the parts
    assert layout.read_config(folder / "baseline")["kind"] == "baseline"


def test_the_last_epoch_is_kept(folder: Path) -> None:
    baseline = load_baseline(folder / "baseline", "cpu")
    val = [path for path in sorted((folder / "birds" / "val").rglob("*")) if path.is_file()]
    right = []
    for path in val:
        attention = class_activation(baseline, read_image(path))
        right.append(attention.class_name == path.parent.name)
    assert sum(right) / len(right) == lines_of(folder / "baseline")[1]["val"]["accuracy"]  # type: ignore[index]


@pytest.mark.parametrize("learns", [False, True])
def test_a_baseline_that_has_learned_nothing_is_told(folder: Path, tmp_path: Path, learns: bool) -> None:
    """As a network without BatchNorm's may end, whose learning rates rise within a few steps."""
    rates = "--head-lr 0 --baseline-lr 0"
    if learns:
        rates = "--head-lr 0.01 --baseline-lr 0.003 --batch-norm-images 1 --batch-size 6 --baseline-epochs 30"
    done = likethat("baseline", folder / "birds", "--out", tmp_path / "run", *DEFAULT, *rates.split())
    assert done.stderr.count("the baseline has learned nothing") == (not learns)


def test_to_know_how_frequent_classes_are_is_to_have_learned_nothing(tmp_path: Path) -> None:
    """Of noise there is nothing else to know. The cross entropy is then far below that of even odds."""
    generator = np.random.default_rng(0)
    for label, count in (("common", 22), ("rare", 4)):
        (tmp_path / "noise" / label).mkdir(parents=True)
        for number in range(count):
            noise = generator.integers(0, 256, (48, 48, 3), np.uint8)
            Image.fromarray(noise).save(tmp_path / "noise" / label / f"{number}.png")
    rates = "--head-lr 0.02 --baseline-lr 1e-5 --batch-size 6 --baseline-epochs 10"
    done = likethat("baseline", tmp_path / "noise", "--out", tmp_path / "run", *DEFAULT, *rates.split())
    assert float(lines_of(tmp_path / "run")[-2]["train"]["cross_entropy"]) < 0.65  # type: ignore[index]
    assert "the baseline has learned nothing" in done.stderr


def test_evaluate_and_info(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, told = str(folder / "baseline"), lines_of(folder / "baseline")[-1]
    for data in ([], ["--data", str(folder / "birds")]):
        assert main(["evaluate", run, "--json", *data]) == 0
        assert json.loads(capsys.readouterr().out) | {"stage": "test"} == told
    assert main(["info", run]) == 0
    assert "baseline test_resnet" in capsys.readouterr().out
    assert f"{100 * told['accuracy']:.1f} %" in (folder / "baseline" / layout.REPORT).read_text()  # type: ignore[operator]


def test_other_commands_refuse_it(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = str(folder / "baseline"), str(tmp_path / "out")
    commands = (
        ["verify", run],
        ["predict", run, str(picture_of(folder))],
        ["prune", run, "--out", out],
        ["combine", str(folder / "run"), run, "--out", out],
        ["compare", run, run, str(picture_of(folder)), "--out", f"{out}.png"],
    )
    for command in commands:
        assert main(command) == 2, command
        assert "is a baseline" in capsys.readouterr().err
    train = ["train", str(folder / "birds"), "--out", run, *DEFAULT, "--resume"]
    assert main(train) == 2
    assert "baseline run" in capsys.readouterr().err
    assert main(["compare", str(folder / "run"), str(folder / "run"), str(picture_of(folder)), "--out", "x.png"]) == 2
    assert "no baseline" in capsys.readouterr().err
    assert main(["baseline", str(folder / "birds"), "--out", out, *PAPER]) == 2
    assert "--baseline-epochs" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_killed_baseline_goes_on(folder: Path, tmp_path: Path) -> None:
    command = ["baseline", str(folder / "birds"), "--out", str(tmp_path / "baseline"), *DEFAULT]
    assert signalled(command, "baseline", 5, save_every=0).returncode == -9
    assert not (tmp_path / "baseline" / layout.MODEL).exists()
    assert main([*command, "--resume"]) == 0
    assert (tmp_path / "baseline" / layout.MODEL).read_bytes() == (folder / "baseline" / layout.MODEL).read_bytes()
    assert lines_of(tmp_path / "baseline") == lines_of(folder / "baseline")
    assert main([*command, "--resume"]) == 0  # finished already


def test_training_from_a_finished_baseline_is_training_at_once(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = ["train", str(folder / "birds"), "--out", str(out), *DEFAULT, "--from-baseline"]
    assert main([*command, str(folder / "baseline" / layout.MODEL)]) == 0  # as good as the folder
    assert (out / layout.MODEL).read_bytes() == (folder / "run" / layout.MODEL).read_bytes()
    parts, _, _, *rest = lines_of(folder / "run")
    assert lines_of(out) == [parts, *rest]


def test_training_from_a_timm_checkpoint(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    baseline = load_baseline(folder / "baseline", "cpu").model
    network = timm.create_model("test_resnet", num_classes=3)
    state = {
        **baseline.backbone.net.state_dict(),
        **{f"fc.{name}": v for name, v in baseline.head.state_dict().items()},
    }
    network.load_state_dict(state)
    torch.save({"state_dict": network.state_dict()}, tmp_path / "tuned.pth")
    file = ["--from-baseline", str(tmp_path / "tuned.pth")]
    assert main(["train", str(folder / "birds"), "--out", str(tmp_path / "run"), *DEFAULT, *file]) == 0
    assert (tmp_path / "run" / layout.MODEL).read_bytes() == (folder / "run" / layout.MODEL).read_bytes()
    assert "Nothing tells which images" in capsys.readouterr().err
    timm.models.save_for_hf(network, tmp_path / "hub", safe_serialization=True)  # config.json beside model.safetensors
    baseline_again = BaselineClassifier(create_backbone("test_resnet", "none", (64, 64)), 3)
    read_baseline(baseline_again, tmp_path / "hub" / "model.safetensors", layout.read_record(folder / "baseline"))
    torch.testing.assert_close(baseline_again.head.weight, baseline.head.weight)


@pytest.mark.parametrize(
    ("name", "is_baseline"),
    [("test_efficientnet", True), ("test_byobnet", True), ("test_convnext", False), ("test_vit", False)],
)
def test_a_timm_checkpoint_is_the_same_function_or_refused(
    name: str, is_baseline: bool, folder: Path, tmp_path: Path
) -> None:
    """A norm behind the mean, or a class token, is not what a baseline computes."""
    torch.manual_seed(0)
    size = (160, 160)
    network = timm.create_model(name, num_classes=5).eval()
    save_file(network.state_dict(), tmp_path / "tuned.safetensors")
    baseline = BaselineClassifier(create_backbone(name, "none", size), 5)
    record = layout.read_record(folder / "baseline")
    if not is_baseline:
        with pytest.raises(UserError, match="patches cannot be read off it"):
            read_baseline(baseline, tmp_path / "tuned.safetensors", record)
        return
    read_baseline(baseline, tmp_path / "tuned.safetensors", record)
    x = torch.rand(2, 3, *size)
    with torch.no_grad():
        expected = network((x - baseline.backbone.mean) / baseline.backbone.std)
        torch.testing.assert_close(baseline.eval()(x), expected, atol=1e-5, rtol=0)


def test_a_classifier_that_does_not_fit_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = ["train", str(folder / "birds"), "--out", str(tmp_path / "run"), *DEFAULT]
    torch.save(timm.create_model("test_resnet", num_classes=5).state_dict(), tmp_path / "five.pth")
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "config.json").write_text('{"architecture": "test_resnet"}')
    other = make_tiny_birds(tmp_path / "other", seed=1)
    for more, sentence in (
        (["--from-baseline", str(folder / "run")], "no baseline"),
        (["--from-baseline", str(folder / "birds")], "no baseline"),
        (["--from-baseline", str(tmp_path / "hub")], "no baseline"),
        (["--from-baseline", str(tmp_path / "five.pth")], "to these 3 classes"),
        (["--from-baseline", str(tmp_path / "gone.pth")], "does not exist; name a baseline run"),
        (["--from-baseline", str(folder / "baseline"), "--backbone", "test_resnet", "--input-size", "96"], "64x64"),
        (["--from-baseline", str(folder / "baseline"), "--shift", "4"], "was trained with --shift 0; pass the same"),
    ):
        assert main([*train, *more]) == 2, more
        assert sentence in capsys.readouterr().err
    from_baseline = ["--from-baseline", str(folder / "baseline")]
    assert main(["train", str(other), "--out", str(tmp_path / "run"), *DEFAULT, *from_baseline]) == 2
    assert "another split" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_activation_map_is_the_logit_patch_by_patch(folder: Path) -> None:
    baseline, image = load_baseline(folder / "baseline", "cpu"), read_image(picture_of(folder))
    attention = class_activation(baseline, image)
    pixels, _ = to_input(image, None, (64, 64))
    x_13HW = torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255
    with torch.no_grad():
        logits_K, feature_CHW = baseline.model(x_13HW)[0], baseline.model.backbone(x_13HW)[0]
    best = int(logits_K.argmax())
    assert attention.class_name == baseline.classes[best]
    assert attention.probability == pytest.approx(float(logits_K.softmax(0)[best]), abs=1e-6)
    assert float(attention.map_HW.mean()) == pytest.approx(float(logits_K[best]), abs=1e-5)
    weight_C, bias = baseline.model.head.weight[best].detach(), float(baseline.model.head.bias[best].detach())
    for row in range(feature_CHW.shape[1]):
        for column in range(feature_CHW.shape[2]):
            alone = float(feature_CHW[:, row, column] @ weight_C) + bias
            assert float(attention.map_HW[row, column]) == pytest.approx(alone, abs=1e-5)


def test_comparison(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["compare", str(folder / "run"), str(folder / "baseline"), str(picture_of(folder))]
    assert main([*arguments, "--out", str(tmp_path / "figure.png")]) == 0
    written = Image.open(tmp_path / "figure.png").convert("RGB")
    classifier, baseline = load(folder / "run", "cpu"), load_baseline(folder / "baseline", "cpu")
    figure = comparison_figure(classifier, baseline, picture_of(folder))
    assert written.tobytes() == figure.tobytes()
    assert len(figure.getcolors(2**24)) > 1000, "it shows pictures"
    assert main([*arguments, "--out", str(tmp_path / "figure.jpg")]) == 2
    assert ".png" in capsys.readouterr().err
