"""Every setting of a training run, each default in one place. Flags and TOML keys come from these dataclasses."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from likethat.windows import NO_WINDOWS

MOST_INPUT = 4096  # pixels of a side that networks see
ANY_VALUES = (0.0, 0.0)  # the kind of a file says which of its values are black and white
AUTO_WIDTH = -1  # of the latent map: the run chooses it by cross-validation
PATCHES_OF_BASELINE = "prototypes of a baseline (--baseline-epochs, --from-baseline, --fit-head)"
NO_WORDS: Mapping[str, Any] = types.MappingProxyType({})


def _option(default: Any, text: str, choices: tuple[str, ...] = (), words: Mapping[str, Any] = NO_WORDS) -> Any:
    """Return a field with its help; `words` may be written for values that say nothing by themselves."""
    return field(default=default, metadata={"help": text, "choices": choices, "words": words})


@dataclass(frozen=True)
class DataConfig:
    val_fraction: float = _option(
        0.1,
        "share of the images held out for validation where there is no val/; of training images where test/ is given",
    )
    test_fraction: float = _option(0.2, "share of the images held out for test where there is no test/")
    full_images: bool = _option(False, "use whole pictures where the data set has boxes to crop to")
    skip_bad: bool = _option(False, "train without unreadable and duplicate files instead of stopping")
    columns: str = _option("", "names that columns have in a table, like path=file,label=diagnosis,group=patient")
    images: str = _option("", "folder that a table's paths are relative to, itself relative to the table")
    value_range: tuple[float, float] = _option(
        ANY_VALUES, "values of pictures of more than 8 bits that become black and white", words={"auto": ANY_VALUES}
    )
    on_object: bool = _option(False, "take prototypes from the object, where the data has masks or boxes of it")


@dataclass(frozen=True)
class ModelConfig:
    backbone: str = _option("tf_efficientnet_lite0", "any timm model that yields a spatial map")
    weights: str = _option(
        "pretrained", "backbone weights: pretrained, torchvision (the paper's, if timm has them), none, or a file"
    )
    input_size: tuple[int, int] = _option((224, 224), "height and width pictures are resized to")
    windows: tuple[int, int] = _option(
        NO_WINDOWS,
        "SIZE,STRIDE in pixels, like 80,24: each cell of the latent map sees its own window of the picture alone",
        words={"none": NO_WINDOWS},
    )
    fine_map: bool = _option(True, "the network's last stride of 2 becomes 1: twice as many rows and columns of cells")
    shift: int = _option(0, "pixels that a network sees pictures moved up and left by: cells look beside their middle")
    add_on: str = _option("linear", "layers between backbone and prototypes", ("regular", "bottleneck", "linear"))
    latent_width: int = _option(
        512,
        "channels D of the latent map, with --add-on linear no more than the backbone has; auto: 128, 256 or 512 by "
        "cross-validation",
        words={"auto": AUTO_WIDTH},
    )
    prototypes_per_class: int = _option(6, "prototypes of each class")
    prototypes_of: str = _option("", "fewer for some classes: CLASS=N,CLASS=N; auto: for those with few images")
    prototype_shape: tuple[int, int] = _option((1, 1), "height and width of a prototype in the latent map")
    similarity: str = _option("cosine", "function of the distance that scores a patch", ("log", "linear", "cosine"))
    box_margin: float = _option(0.5, "cells that boxes have around the most active pixels; 0 for the paper's boxes")


@dataclass(frozen=True)
class AugmentConfig:
    rotation: float = _option(15.0, "largest rotation in degrees")
    skew: float = _option(0.05, "largest shift of a corner, as a share of the side")
    shear: float = _option(10.0, "largest shear in degrees")
    distortion: float = _option(0.01, "largest elastic shift, as a share of the side; 0 turns it off")
    flip: float = _option(0.5, "chance of a left-right flip")
    compose: bool = _option(True, "warp each view in all these ways together instead of in one of them, as published")
    zoom: float = _option(0.7, "smallest share of the sides that a view shows; 1 shows the whole picture")
    jitter: float = _option(0.3, "largest relative change of brightness, contrast and saturation")
    noise: float = _option(0.1, "largest standard deviation of a view's noise, of pixels from 0 to 1")
    erase: float = _option(0.25, "chance of a gray hole in a view")
    cutmix: float = _option(1.0, "chance, in joint training, that a piece of another picture covers part of a view")


@dataclass(frozen=True)
class TrainConfig:
    seed: int = _option(0, "seed of everything random")
    batch_size: int = _option(
        80, "images in a step; on a CPU and on MPS they are gone through a few at a time, so that 3 GB are enough"
    )
    views: int = _option(1, "augmented views of every training image in an epoch")
    baseline_epochs: int = _option(40, "epochs of the baseline whose patches become prototypes; 0 for none")
    from_baseline: str = _option(
        "", "finished baseline to take prototypes from instead: its run folder or a file of a timm model's weights"
    )
    fit_head: bool = _option(False, "solve for the baseline's linear layer on the backbone as it is, without epochs")
    decisive_parts: bool = _option(False, "a prototype of a class shows where it differs from the class most like it")
    add_on_start: str = _option(
        "pca",
        "what the linear add-on begins with: principal components of all features, or lda: discriminants of the parts",
        ("pca", "lda"),
    )
    warm_epochs: int = _option(0, "epochs with a frozen backbone")
    joint_epochs: tuple[int, ...] = _option((20, 5), "epochs of joint training before projections, one number a cycle")
    batch_norm_images: int = _option(1000, "training images from which on BatchNorm's statistics are learned too")
    tie: bool = _option(True, "prototypes stay as they were chosen or projected, instead of moving freely")
    baseline_lr: float = _option(2e-4, "learning rate of the backbone in the baseline stage")
    head_lr: float = _option(2e-3, "learning rate of the baseline's linear layer")
    backbone_lr: float = _option(2e-4, "learning rate of the backbone in the joint stage; see --relative-lr")
    add_on_lr: float = _option(4e-4, "learning rate of the add-on layers")
    prototype_lr: float = _option(3e-3, "learning rate of prototypes that are not tied")
    relative_lr: bool = _option(
        True, "--backbone-lr is for weights as large as ResNet-34's; larger ones take larger steps, in proportion"
    )
    lr_step: int = _option(0, "joint epochs after which learning rates fall to a tenth; 0 for a cosine to zero")
    weight_decay: float = _option(0.05, "weight decay of backbone, add-on layers and linear layer")
    decoupled_decay: bool = _option(True, "use AdamW's weight decay instead of Adam's")
    balance: bool = _option(False, "let every class count alike in steps and linear layers, however few images it has")
    label_smoothing: float = _option(0.1, "share of the target spread over all classes")
    distillation: float = _option(0.5, "share of the cross entropy taken against the baseline's probabilities")
    cluster: float = _option(0.0, "weight of the cluster cost")
    separation: float = _option(0.0, "weight of the separation cost")
    locality: float = _option(6.0, "weight of the locality cost: the same pixels give like patches, whatever is around")
    context: float = _option(0.8, "weight of the context cost: an invisible change around a patch takes little of it")
    on_mask: float = _option(0.0, "weight of the mask cost: prototypes of a class are found on its pictures' masks")
    place: float = _option(1.0, "weight of the place cost: prototypes are found on the part that they were cut from")
    l1: float = _option(1e-3, "lambda of the last layer: L1 weight of connections to other classes")
    ridge: float = _option(1e-4, "weight of the pull of connections to 1 (own class) or 0; makes the optimum exist")
    exclusive: bool = _option(False, "the pull of --ridge is stronger on prototypes that another class looks like, too")
    own_positive: bool = _option(True, "own connections are 0 or above: looking like a class never speaks against it")
    last_layer_views: int = _option(4, "views of every training image that the last layer learns from")
    compile: bool | None = _option(
        None,
        "compile the steps: they begin a minute later and then take less time; auto: on CUDA, where enough are to come",
        words={"auto": None},
    )

    @property
    def has_baseline(self) -> bool:
        """Return whether prototypes come from a baseline, its own or a given one."""
        return self.baseline_epochs > 0 or self.from_baseline != "" or self.fit_head


# Options with a default that changes training, which runs of earlier versions lack: what those were trained with.
DEFAULTS_OF_OLDER_RUNS: dict[str, Any] = {
    **dict.fromkeys(("noise", "locality", "context", "place", "cutmix", "box_margin"), 0.0),
    **dict.fromkeys(("fine_map", "own_positive", "relative_lr"), False),
    "last_layer_views": 1,
    "add_on_start": "pca",
}

# Options by the names that they have in the configurations of older runs.
RENAMED_OPTIONS = {
    "classifier_epochs": "baseline_epochs",
    "from_classifier": "from_baseline",
    "classifier_lr": "baseline_lr",
    "norm_images": "batch_norm_images",
}

SECTIONS = {"data": DataConfig, "model": ModelConfig, "augment": AugmentConfig, "train": TrainConfig}


@dataclass(frozen=True)
class Config:
    preset: str = "default"
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    augment: AugmentConfig = AugmentConfig()
    train: TrainConfig = TrainConfig()

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def options() -> dict[str, tuple[str, dataclasses.Field[Any], Any]]:
    """Return every option by name: its section, its field and its type. Names are unique over all sections."""
    found: dict[str, tuple[str, dataclasses.Field[Any], Any]] = {}
    for section, kind in SECTIONS.items():
        hints = typing.get_type_hints(kind)
        for entry in fields(kind):
            assert entry.name not in found, f"two options are called {entry.name}"
            found[entry.name] = (section, entry, hints[entry.name])
    return found
