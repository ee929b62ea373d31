"""Compiled steps do what steps do; where nothing can be compiled, training goes on without."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from likethat.config.settings import AugmentConfig
from likethat.data.cells import tiles
from likethat.data.loaders import Images
from likethat.training.batches import FreshViews
from likethat.training.loop import gradient_step
from likethat.training.losses import Costs
from likethat.training.wrap_step import COMPILED_FROM, compiled, is_compiled, wrap_step

HEADER = Path(sysconfig.get_path("include")) / "Python.h"
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or not HEADER.is_file(), reason="compiling for the CPU needs g++ and Python.h"
)


def make_images() -> Images:
    generator = torch.Generator().manual_seed(1)
    pixel_NHW3 = torch.randint(256, (12, 16, 16, 3), generator=generator, dtype=torch.uint8)
    return Images(pixel_NHW3, torch.arange(12) % 3, torch.device("cpu"))


def two_stages(*, compile: bool) -> tuple[list[Tensor], list[Tensor]]:
    """The losses of two steps with a frozen first layer and of two with all layers; that layer after each stage."""
    torch.manual_seed(0)
    first, second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 3, 1)
    losses, layers, said = [], [], list[str]()

    def costs_of(x_B3HW: Tensor, label_BV: Tensor, *_: Tensor) -> Costs:
        return {"loss": nn.functional.cross_entropy(second(first(x_B3HW).relu()).amax((2, 3)), label_BV[:, 0])}

    for frozen in (True, False):
        first.requires_grad_(not frozen)
        moving = [value for layer in (first, second) for value in layer.parameters() if value.requires_grad]
        optimizer = torch.optim.SGD(moving, lr=0.5)
        source = FreshViews(make_images(), AugmentConfig(), tiles((4, 4)))
        take_step = wrap_step(gradient_step, costs_of, optimizer, source, said.append, compile=compile)
        losses += [take_step(torch.arange(6) + 6 * number, number)["loss"] for number in range(2)]
        layers.append(first.weight.detach().clone())
    assert not said, said
    return losses, layers


@needs_compiler
def test_compiled_steps_are_the_same_steps_and_unfreeze_what_the_next_stage_trains() -> None:
    losses, layers = two_stages(compile=False)
    compiled_losses, compiled_layers = two_stages(compile=True)
    torch.testing.assert_close(compiled_losses, losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(compiled_layers, layers, rtol=1e-5, atol=1e-6)
    assert not torch.equal(*compiled_layers)


def test_without_a_compiler_it_is_said_once_and_the_costs_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, "/nowhere"))
    said: list[str] = []

    def costs_of(x_B3HW: Tensor, label_B: Tensor, image_BV: Tensor) -> Costs:
        return {"loss": (x_B3HW.sin() * label_B[:, None, None, None]).exp().mean() / image_BV.sum()}

    inputs = torch.rand(2, 3, 4, 4), torch.tensor([0, 1]), torch.tensor([[3], [4]])
    quick = compiled(costs_of, said.append)
    assert quick(*inputs)["loss"].equal(costs_of(*inputs)["loss"])
    assert quick(*inputs)["loss"].equal(costs_of(*inputs)["loss"])
    assert len(said) == 1
    assert said[0].startswith("note: steps cannot be compiled here, so they run slower (")
    assert "\n" not in said[0]


def test_an_error_of_a_step_is_no_reason_to_go_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.compile` is replaced by nothing at all: it is about what happens to errors."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    said: list[str] = []
    errors: list[RuntimeError | None] = [None, RuntimeError("of the data")]

    def costs_of(x_B3HW: Tensor, label_B: Tensor, image_BV: Tensor) -> Costs:
        if (error := errors.pop(0)) is not None:
            raise error
        return {"loss": x_B3HW.mean()}

    inputs = torch.rand(2, 3, 4, 4), torch.tensor([0, 1]), torch.tensor([[3], [4]])
    quick = compiled(costs_of, said.append)
    quick(*inputs)
    with pytest.raises(RuntimeError, match="of the data"):
        quick(*inputs)
    errors.append(torch.OutOfMemoryError("none left"))
    with pytest.raises(torch.OutOfMemoryError):
        compiled(costs_of, said.append)(*inputs)
    assert not said


def test_compiling_is_decided_by_the_steps_to_come_and_said() -> None:
    said: list[str] = []
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert is_compiled(None, COMPILED_FROM, cuda, "joint", said.append)
    assert not is_compiled(None, COMPILED_FROM - 1, cuda, "baseline", said.append)
    assert [line.partition(";")[0] for line in said] == [
        "joint: 20,000 steps to come are compiled, which takes about a minute",
        "baseline: 19,999 steps to come are not compiled",
    ]
    assert not is_compiled(None, 10 * COMPILED_FROM, cpu, "joint", said.append)
    assert is_compiled(True, 1, cpu, "joint", said.append)
    assert not is_compiled(False, 10 * COMPILED_FROM, cuda, "joint", said.append)
    assert len(said) == 2, "on a CPU nothing is said"
