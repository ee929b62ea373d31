"""Presets, TOML files and flags: later ones win, and mistakes get a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from likethat.config.presets import PRESETS, from_dict, resolve
from likethat.config.settings import RENAMED_OPTIONS
from likethat.errors import UserError


def test_flags_beat_the_file_and_the_file_beats_the_preset(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(
        'backbone = "resnet34"\n[train]\nbatch_size = 16\njoint_epochs = [2, 3]\n[model]\ninput_size = 96\n'
    )
    config = resolve("paper", file, batch_size="8")
    assert config.model.backbone == "resnet34"
    assert config.train.batch_size == 8
    assert config.train.joint_epochs == (2, 3)
    assert config.model.input_size == (96, 96)
    assert config.train.views == 30


def test_paper_preset_is_the_published_recipe() -> None:
    config = resolve("paper", backbone="resnet34")
    assert config.model.latent_width == 256
    assert resolve("paper", backbone="resnet34.a1_in1k").model.latent_width == 256
    assert resolve("paper", backbone="vgg19").model.latent_width == 128
    assert config.model.similarity == "log"
    train = config.train
    assert (train.batch_size, train.views, train.warm_epochs) == (80, 30, 5)
    assert (train.backbone_lr, train.add_on_lr, train.prototype_lr, train.weight_decay) == (1e-4, 3e-3, 3e-3, 1e-3)
    assert (train.cluster, train.separation, train.l1) == (0.8, 0.08, 1e-4)
    views = config.augment  # a third each rotated, skewed and sheared; half of them flipped
    assert (views.rotation, views.skew, views.shear, views.flip) == (15, 0.2, 10, 0.5)
    assert (views.compose, views.distortion, views.zoom, views.jitter, views.erase) == (False, 0, 1, 0, 0)


@pytest.mark.parametrize("preset", PRESETS)
def test_configuration_survives_json(preset: str) -> None:
    config = resolve(preset, input_size="128x96", seed=7)
    assert from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_the_configuration_of_an_older_run_may_name_options_that_are_gone() -> None:
    saved = resolve("paper").to_dict()
    saved["train"] |= {"warm_views": 3, "warm_up": 0.1}
    assert from_dict(saved) == resolve("paper")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": "many"}, "--batch-size takes a whole number"),
        ({"batch_size": 2.5}, "--batch-size takes a whole number"),
        ({"latent_width": "wide"}, "--latent-width takes a whole number or auto"),
        ({"batch_size": 1}, "at least 2"),
        ({"input_size": "12x34x56"}, "--input-size takes"),
        ({"similarity": "euclid"}, "--similarity takes log, linear, cosine"),
        ({"nonsense": 1}, "no option called 'nonsense'"),
        ({"joint_epochs": "3,x"}, "--joint-epochs takes"),
        ({"skip_bad": "yes"}, "--skip-bad takes true or false"),
        ({"ridge": 0}, "--ridge must be greater than 0"),
        ({"label_smoothing": 2}, "--label-smoothing must lie"),
        ({"backbone_lr": -1}, "--backbone-lr must not be negative"),
        ({"skew": 0.6}, "--skew must lie"),
        ({"shift": 32, "input_size": 64}, "--shift must lie between 0 and half the side of a picture, which is 64"),
        ({"shift": 5, "windows": (80, 24)}, "leave one of them out"),
        ({"decisive_parts": True, "baseline_epochs": 0, "tie": False}, "--decisive-parts are for prototypes of a base"),
        ({"add_on_start": "lda", "baseline_epochs": 0, "tie": False}, "--add-on-start lda is for prototypes of a base"),
        ({"add_on_start": "random"}, "--add-on-start takes pca, lda"),
        ({"exclusive": True, "similarity": "linear"}, "--exclusive compares scores that are 0 or above"),
    ],
)
def test_mistakes_get_a_sentence(options: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        resolve("default", **options)


def test_bad_files_and_presets(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("batch_size = = 3")
    with pytest.raises(UserError, match="not valid TOML"):
        resolve("default", tmp_path / "bad.toml")
    with pytest.raises(UserError, match="does not exist"):
        resolve("default", tmp_path / "none.toml")
    with pytest.raises(UserError, match="cannot be read"):
        resolve("default", tmp_path)
    with pytest.raises(UserError, match="no preset called 'best'"):
        resolve("best")


def test_a_run_of_an_earlier_version_keeps_what_it_was_trained_with() -> None:
    saved = json.loads(json.dumps(resolve("default", cutmix=0, distillation=0.5).to_dict()))
    del saved["augment"]["cutmix"]  # the option came later
    assert from_dict(saved) == resolve("default", cutmix=0, distillation=0.5)
    del saved["train"]["last_layer_views"]
    assert from_dict(saved) == resolve("default", cutmix=0, distillation=0.5, last_layer_views=1)


def test_a_quick_run_of_an_earlier_version_began_with_principal_components() -> None:
    saved = json.loads(json.dumps(resolve("quick").to_dict()))
    assert saved["train"].pop("add_on_start") == "lda"
    assert from_dict(saved) == resolve("quick", add_on_start="pca")


def test_an_older_run_names_its_options_otherwise(tmp_path: Path) -> None:
    values = {"classifier_epochs": 7, "from_classifier": "old", "classifier_lr": 1e-3, "norm_images": 5}
    assert values.keys() == RENAMED_OPTIONS.keys()
    saved = json.loads(json.dumps(resolve("default").to_dict()))
    for old, new in RENAMED_OPTIONS.items():
        del saved["train"][new]
        saved["train"][old] = values[old]
    assert from_dict(saved) == resolve("default", **{RENAMED_OPTIONS[old]: value for old, value in values.items()})
    (tmp_path / "c.toml").write_text("classifier_epochs = 7")  # files are written for this version
    with pytest.raises(UserError, match="no option called 'classifier_epochs'"):
        resolve("default", tmp_path / "c.toml")


def test_compiling_is_left_to_the_run_unless_it_is_said(tmp_path: Path) -> None:
    assert resolve().train.compile is None
    assert from_dict(resolve().to_dict()) == resolve()
    for value, expected in ((True, True), (False, False), ("auto", None)):
        assert resolve(compile=value).train.compile is expected
    (tmp_path / "auto.toml").write_text('compile = "auto"')
    assert resolve(file=tmp_path / "auto.toml").train.compile is None
    with pytest.raises(UserError, match="--compile takes true or false or auto, not 'often'"):
        resolve(compile="often")
