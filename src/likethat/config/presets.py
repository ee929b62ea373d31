"""The presets, and configurations made of them, of a file and of options; what no run could be made with is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from likethat.config.settings import (
    ANY_VALUES,
    AUTO_WIDTH,
    DEFAULTS_OF_OLDER_RUNS,
    MOST_INPUT,
    PATCHES_OF_BASELINE,
    RENAMED_OPTIONS,
    SECTIONS,
    AugmentConfig,
    Config,
    ModelConfig,
    TrainConfig,
    options,
)
from likethat.config.values import coerce, read_toml
from likethat.errors import UserError
from likethat.windows import NO_WINDOWS, check_windows


def paper(backbone: str) -> Config:
    """Return the published recipe. An epoch is 30 augmented views of every image; D is as the authors set it."""
    return Config(
        preset="paper",
        model=ModelConfig(
            weights="torchvision",
            add_on="regular",
            fine_map=False,
            latent_width=256 if backbone.split(".")[0] == "resnet34" else 128,
            prototypes_per_class=10,
            similarity="log",
            box_margin=0.0,
        ),
        augment=AugmentConfig(
            skew=0.2, distortion=0.0, compose=False, zoom=1.0, jitter=0.0, noise=0.0, erase=0.0, cutmix=0.0
        ),
        train=TrainConfig(
            views=30,
            baseline_epochs=0,
            warm_epochs=5,
            joint_epochs=(6, 10, 10),
            batch_norm_images=0,
            tie=False,
            backbone_lr=1e-4,
            add_on_lr=3e-3,
            prototype_lr=3e-3,
            relative_lr=False,
            lr_step=5,
            weight_decay=1e-3,
            decoupled_decay=False,
            label_smoothing=0.0,
            distillation=0.0,
            cluster=0.8,
            separation=0.08,
            locality=0.0,
            context=0.0,
            place=0.0,
            l1=1e-4,
            own_positive=False,
        ),
    )


def default(backbone: str) -> Config:
    """Return our recipe: fine-tune a baseline, take the patches that show each part most typically, refine both."""
    return Config()


def quick(backbone: str) -> Config:
    """Return a first answer: a backbone as it is, prototypes among its patches, linear layers that are solved."""
    return Config(
        preset="quick",
        train=TrainConfig(
            baseline_epochs=0,
            fit_head=True,
            add_on_start="lda",
            joint_epochs=(0,),
            distillation=0.0,
            last_layer_views=1,
        ),
    )


PRESETS = {"default": default, "paper": paper, "quick": quick}


def resolve(preset: str = "default", file: Path | None = None, **overrides: Any) -> Config:
    """Return the preset with the TOML file's values and then the overrides put in, each checked against its type."""
    from_file = read_toml(file, SECTIONS) if file else {}
    values = {**from_file, **overrides}
    if preset not in PRESETS:
        raise UserError(f"There is no preset called '{preset}'; choose {' or '.join(PRESETS)}.")
    config = PRESETS[preset](str(values.get("backbone", ModelConfig.backbone)))
    known = options()
    for name, value in values.items():
        if name not in known:
            raise UserError(f"There is no option called '{name}'; `likethat train --help` lists them.")
        section, entry, kind = known[name]
        value = entry.metadata["words"].get(value, value) if isinstance(value, str) else value
        value = coerce(name, value, kind, entry.metadata["choices"], tuple(entry.metadata["words"]))
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    _check(config)
    return config


def from_dict(saved: dict[str, Any]) -> Config:
    """Read a configuration as `Config.to_dict` gave it, perhaps through JSON."""
    renamed = {
        section: {RENAMED_OPTIONS.get(name, name): value for name, value in saved[section].items()}
        for section in SECTIONS
    }
    # A run of an earlier version lacks the options that came later.
    values = {name: renamed[section][name] for name, (section, _, _) in options().items() if name in renamed[section]}
    return resolve(saved["preset"], **{**DEFAULTS_OF_OLDER_RUNS, **values})


def _check(config: Config) -> None:
    """Refuse numbers that would train nothing or crash later."""
    width, (low, high), free = config.model.latent_width, config.data.value_range, not config.train.has_baseline
    shift, side = config.model.shift, min(config.model.input_size)
    rules = [
        *[
            (getattr(config.train, name) >= 0, f"--{name.replace('_', '-')} must not be negative")
            for name in (
                *("baseline_lr", "head_lr", "backbone_lr", "add_on_lr", "prototype_lr", "weight_decay"),
                *("l1", "locality", "context", "place", "baseline_epochs", "warm_epochs", "lr_step"),
            )
        ],
        (config.train.batch_size >= 2, "--batch-size must be at least 2"),
        *[
            (getattr(config.train, name) >= 1, f"--{name.replace('_', '-')} must be at least 1")
            for name in ("views", "last_layer_views")
        ],
        (
            not config.train.tie or config.train.has_baseline,
            "--tie needs --baseline-epochs above 0, --from-baseline or --fit-head",
        ),
        (
            not config.train.fit_head or (config.train.baseline_epochs == 0 and not config.train.from_baseline),
            "--fit-head takes the place of --baseline-epochs and --from-baseline; pass one of them",
        ),
        (free or config.model.add_on == "linear", f"{PATCHES_OF_BASELINE} need --add-on linear"),
        (free or config.model.prototype_shape == (1, 1), f"{PATCHES_OF_BASELINE} need --prototype-shape 1x1"),
        (len(config.train.joint_epochs) > 0, "--joint-epochs needs at least one number"),
        (all(epochs >= 0 for epochs in config.train.joint_epochs), "--joint-epochs must not be negative"),
        (config.model.prototypes_per_class >= 1, "--prototypes-per-class must be at least 1"),
        (not (free and config.train.decisive_parts), f"--decisive-parts are for {PATCHES_OF_BASELINE}"),
        (not (free and config.train.add_on_start == "lda"), f"--add-on-start lda is for {PATCHES_OF_BASELINE}"),
        (
            config.model.similarity != "linear" or not config.train.exclusive,
            "--exclusive compares scores that are 0 or above, and --similarity linear has others",
        ),
        (width >= 1 or width == AUTO_WIDTH, "--latent-width must be at least 1, or auto"),
        (
            width != AUTO_WIDTH or not free,
            "--latent-width auto compares widths by a baseline's patches (--baseline-epochs, "
            "--from-baseline); without one, name a number",
        ),
        (min(config.model.prototype_shape) >= 1, "--prototype-shape must be at least 1"),
        (config.model.box_margin >= 0, "--box-margin must not be negative"),
        (0 <= shift < side / 2, f"--shift must lie between 0 and half the side of a picture, which is {side} pixels"),
        (
            shift == 0 or config.model.windows == NO_WINDOWS,
            "--shift moves whole pictures, and --windows shows none; leave one of them out",
        ),
        (
            16 <= min(config.model.input_size) <= max(config.model.input_size) <= MOST_INPUT,
            f"--input-size must lie between 16 and {MOST_INPUT}",
        ),
        (0 < config.data.val_fraction < 1, "--val-fraction must lie between 0 and 1"),
        (low < high or (low, high) == ANY_VALUES, "--value-range takes two numbers, the lower one first"),
        (0 < config.data.test_fraction < 1, "--test-fraction must lie between 0 and 1"),
        (config.train.ridge > 0, "--ridge must be greater than 0, or the last layer has no optimum"),
        (0 <= config.train.label_smoothing < 1, "--label-smoothing must lie between 0 and 1"),
        (0 <= config.train.distillation <= 1, "--distillation must lie between 0 and 1"),
        (0 <= config.augment.skew < 0.5, "--skew must lie between 0 and 0.5"),
        (0 <= config.augment.flip <= 1, "--flip must lie between 0 and 1"),
        (0 < config.augment.zoom <= 1, "--zoom must lie between 0 and 1"),
        (0 <= config.augment.jitter < 1, "--jitter must lie between 0 and 1"),
        (0 <= config.augment.erase <= 1, "--erase must lie between 0 and 1"),
        (0 <= config.augment.cutmix <= 1, "--cutmix must lie between 0 and 1"),
    ]
    for holds, sentence in rules:
        if not holds:
            raise UserError(f"{sentence}.")
    check_windows(config.model.windows, config.model.input_size)
