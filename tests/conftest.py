"""Small real models and images shared by the tests."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch
from hypothesis import HealthCheck, settings

from likethat.config import resolve
from likethat.data.loaders import Images
from likethat.models.protopnet import ProtoPNet, create_protopnet

SERVING = ("fastapi", "uvicorn", "python_multipart", "httpx", "schemathesis")
MISSING = [name for name in SERVING if find_spec(name) is None]
collect_ignore_glob = ["serve/*"] if MISSING else []

# Properties are tried on the same examples every time, however slow the machine: a failure is never by chance.
# `pytest --hypothesis-profile default` looks for new ones.
settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("steady")

# What a person's shell may say must not reach the commands: how wide and colourful to print, or who serves to whom.
for name in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "LIKETHAT_TOKEN"):
    os.environ.pop(name, None)
for name in ("NO_PROXY", "no_proxy"):  # servers of tests are on this machine
    os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1", "localhost"]))


def pytest_report_header() -> str | None:
    return f"tests of the served page are left out: {', '.join(MISSING)} not installed" if MISSING else None


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def tiny_model(prototypes_of_class: list[int], **options: object) -> ProtoPNet:
    """A ProtoPNet on timm's smallest ResNet, random weights, 3x3 map."""
    settings = {"backbone": "test_resnet", "weights": "none", "input_size": 96, "latent_width": 16, **options}
    return create_protopnet(resolve("paper", **settings).model, prototypes_of_class)


def random_images(count: int, classes: int, size: int = 96) -> Images:
    pixels = (torch.rand(count, size, size, 3) * 255).byte()
    labels = torch.arange(count) % classes
    return Images(pixels, labels, torch.device("cpu"))
