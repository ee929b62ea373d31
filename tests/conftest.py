"""Small real models and images shared by the tests."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from likethat.config import resolve
from likethat.data.loaders import Images
from likethat.models.protopnet import ProtoPNet, create_protopnet

SERVING = ("fastapi", "uvicorn", "python_multipart", "httpx", "schemathesis")
MISSING = [name for name in SERVING if find_spec(name) is None]
collect_ignore_glob = ["test_serve_*.py"] if MISSING else []

SHARED = Path(__file__).parents[2] / "shared"


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
