"""What is measured at which size, and the networks and pictures for it. Random weights cost what trained ones cost."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from likethat.config.presets import resolve
from likethat.config.settings import Config
from likethat.data.loaders import Images
from likethat.models.backbone import place
from likethat.models.baseline import BaselineClassifier
from likethat.models.protopnet import ProtoPNet, create_protopnet

BACKBONES = ("resnet34", "vgg19", "densenet121", "tf_efficientnet_lite0", "convnext_tiny")


@dataclass(frozen=True)
class Setting:
    device: torch.device
    backbones: tuple[str, ...]  # passes over images, explanations and the last layer are measured with the first
    input_size: int
    classes: int
    per_class: int  # prototypes
    batch: int  # of a training step
    forward_batch: int
    images: int  # of a pass
    scored: int  # images that the last layer is fitted to
    steps: int  # in a turn
    rounds: int
    compile: bool = False  # both sides of a ratio

    @property
    def prototypes(self) -> int:
        return self.classes * self.per_class

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(map(str, range(self.classes)))

    def config(self, preset: str, backbone: str) -> Config:
        return resolve(
            preset,
            backbone=backbone,
            weights="none",
            input_size=self.input_size,
            prototypes_per_class=self.per_class,
            batch_size=self.batch,
        )

    def networks(self, config: Config) -> tuple[ProtoPNet, BaselineClassifier]:
        """Return a ProtoPNet and the bare classifier on the same backbone, in evaluation mode."""
        torch.manual_seed(0)
        model = place(create_protopnet(config.model, [self.per_class] * self.classes), self.device)
        baseline = BaselineClassifier(model.backbone, self.classes).to(self.device)
        return model.eval(), baseline.eval()

    def pictures(self, count: int, *, held: bool = True) -> Images:
        """Return random pictures on the device or, if not `held`, in memory, from where each batch is sent."""
        generator = torch.Generator().manual_seed(0)
        shape = (count, self.input_size, self.input_size, 3)
        pixel_NHW3 = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        label_N = torch.arange(count, device=self.device) % self.classes
        return Images(pixel_NHW3.to(self.device) if held else pixel_NHW3, label_N, self.device)


def setting_of(device: torch.device, quick: bool, compile: bool) -> Setting:
    """Return a setting of the size of CUB-200 or, if `quick`, of the demo's size on the smallest backbone."""
    large = device.type == "cuda"
    if quick:
        return Setting(
            device, ("tf_efficientnet_lite0",), input_size=160, classes=8, per_class=10, batch=32 if large else 8,
            forward_batch=64 if large else 8, images=256 if large else 32, scored=800, steps=10 if large else 1,
            rounds=9 if large else 5, compile=compile,
        )  # fmt: skip
    return Setting(
        device, BACKBONES, input_size=224, classes=200, per_class=10, batch=80 if large else 8,
        forward_batch=256 if large else 8, images=2000 if large else 200, scored=5994, steps=10 if large else 1,
        rounds=7 if large else 3, compile=compile,
    )  # fmt: skip
