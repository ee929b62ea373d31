"""Steps that are captured or compiled do what plain steps do; bf16 is near fp32, and exact where it says so."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch
from helpers.gpu import CUDA, ON_GPU
from torch import Tensor

from likethat.config.presets import resolve
from likethat.config.settings import Config
from likethat.data.loaders import Images
from likethat.inference.passes import classify_images, mixed_precision
from likethat.models.backbone import place
from likethat.models.baseline import BaselineClassifier
from likethat.models.protopnet import create_protopnet
from likethat.models.prototypes import angular_distances, mixed_angular_distances
from likethat.progress import Display
from likethat.runtime import StopFlag, exact_arithmetic, tf32_convolutions
from likethat.training.batches import FreshViews
from likethat.training.choose import start_from_baseline
from likethat.training.course import Course
from likethat.training.loop import batch_costs, gradient_step
from likethat.training.losses import Costs
from likethat.training.parts import find_parts
from likethat.training.plan import PlanEntry, set_learning_rates, set_mode
from likethat.training.state import RunState, copy_run_state, load_run_state
from likethat.training.wrap_step import TakeStep, wrap_step

pytestmark = ON_GPU

CLASSES, STEPS = 3, 9


def make_config() -> Config:
    options = {"backbone": "resnet18", "weights": "none", "latent_width": "64", "input_size": "64"}
    # Rates at which nine steps go somewhere; BatchNorm learns its statistics in the baseline stage.
    return resolve("default", None, batch_norm_images="10", baseline_lr="1e-3", backbone_lr="1e-3", **options)


def make_images() -> Images:
    """Noise in which a class has a colour, so that there is something to learn."""
    generator = torch.Generator().manual_seed(1)
    pixel_NHW3, label_N = torch.rand(48, 64, 64, 3, generator=generator), torch.arange(48) % CLASSES
    pixel_NHW3[torch.arange(48), :, :, label_N] *= 0.2
    return Images((pixel_NHW3 * 255).byte().to(CUDA), label_N.to(CUDA), CUDA)


def make_state(config: Config, images: Images, stage: str) -> RunState:
    """A run that has come to a stage."""
    exact_arithmetic()
    torch.manual_seed(0)
    model = place(create_protopnet(config.model, [4] * CLASSES), CUDA)
    baseline = BaselineClassifier(model.backbone, CLASSES).to(CUDA)
    state = RunState(model, baseline)
    if stage == "joint":
        state.parts = find_parts(model.backbone.eval(), images, 4)
        state.projection = start_from_baseline(model, baseline, images, state.parts)
        state.make_teacher()
    return state


def taker(state: RunState, stage: str, config: Config, images: Images, kind: str) -> TakeStep:
    """What takes steps of a kind: 'plain', 'captured' or 'compiled'."""
    cells = state.backbone.cells
    middle_Nm2 = None if state.parts is None else state.parts.middles(cells)
    source, optimizer = FreshViews(images, config.augment, cells, middle_Nm2), state.optimizer_for(stage, config.train)
    said: list[str] = []

    def costs_of(*shown: Tensor) -> Costs:
        return batch_costs(state, stage, config, *shown)

    def plain_step(index_B: Tensor, seed: int) -> Costs:
        torch.manual_seed(seed)
        return gradient_step(source.show(*source.gather(index_B, seed)), costs_of, optimizer)

    if kind == "plain":
        return plain_step
    step = wrap_step(gradient_step, costs_of, optimizer, source, said.append, compile=kind == "compiled")

    def told_step(index_B: Tensor, seed: int) -> Costs:
        costs = step(index_B, seed)
        assert not said, said
        return costs

    return told_step


def take_steps(step: TakeStep, state: RunState, stage: str, config: Config, numbers: range) -> list[float]:
    """Losses of steps under rates that change from one to the next."""
    set_mode(state.trained(stage), stage, 48, config.train)
    losses = []
    for number in numbers:
        optimizer = state.optimizer_for(stage, config.train)
        set_learning_rates(optimizer, PlanEntry(stage, 0, 8 + number), 0.0, config.train)
        losses.append(float(step(torch.arange(16) + 16 * (number % 3), number)["loss"]))
    return losses


@pytest.fixture(scope="module")
def plain() -> dict[str, list[float]]:
    config, images = make_config(), make_images()
    found = {}
    for stage in ("baseline", "joint"):
        state = make_state(config, images, stage)
        step = taker(state, stage, config, images, "plain")
        found[stage] = take_steps(step, state, stage, config, range(STEPS))
        assert max(found[stage]) - min(found[stage]) > 0.05, "the steps went nowhere"
    return found


@pytest.mark.parametrize("stage", ["baseline", "joint"])
def test_captured_steps_are_the_steps(plain: dict[str, list[float]], stage: str) -> None:
    config, images = make_config(), make_images()
    state = make_state(config, images, stage)
    step = taker(state, stage, config, images, "captured")
    assert take_steps(step, state, stage, config, range(STEPS)) == pytest.approx(plain[stage], rel=0.01)


@pytest.mark.parametrize("stage", ["baseline", "joint"])
@pytest.mark.skipif(shutil.which("gcc") is None and shutil.which("cc") is None, reason="compiling needs a C compiler")
def test_compiled_steps_are_the_steps(plain: dict[str, list[float]], stage: str) -> None:
    config, images = make_config(), make_images()
    state = make_state(config, images, stage)
    step = taker(state, stage, config, images, "compiled")
    assert take_steps(step, state, stage, config, range(STEPS)) == pytest.approx(plain[stage], rel=0.05)


@pytest.mark.parametrize("stage", ["baseline", "joint"])
def test_a_restored_optimiser_takes_captured_steps_on(
    plain: dict[str, list[float]], tmp_path_factory: pytest.TempPathFactory, stage: str
) -> None:
    config, images = make_config(), make_images()
    state = make_state(config, images, stage)
    step = taker(state, stage, config, images, "captured")
    losses = take_steps(step, state, stage, config, range(5))
    run = tmp_path_factory.mktemp("run")
    course = Course(images, images, ("a", "b", "c"), config, run, "of the images", Display(quiet=True), StopFlag())
    copy_run_state(state, course)()
    resumed = make_state(config, images, "baseline")
    load_run_state(resumed, course)
    old, new = (its.optimizer_for(stage, config.train) for its in (state, resumed))
    for old_group, new_group in zip(old.param_groups, new.param_groups, strict=True):
        for before, after in zip(old_group["params"], new_group["params"], strict=True):
            assert new.state[after]["step"].device == CUDA
            for quantity in ("exp_avg", "exp_avg_sq"):
                assert new.state[after][quantity].stride() == after.stride()
                assert torch.equal(new.state[after][quantity], old.state[before][quantity])
    step = taker(resumed, stage, config, images, "captured")
    losses += take_steps(step, resumed, stage, config, range(5, STEPS))
    assert losses == pytest.approx(plain[stage], rel=0.01)


def of_both(call: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    exact = call()
    with mixed_precision(CUDA):
        return exact, call()


def test_inference_in_bf16_is_near_fp32() -> None:
    config, images = make_config(), make_images()
    state = make_state(config, images, "joint")
    model, x_B3HW = state.protopnet.eval(), images.batch(torch.arange(16))[0]
    with torch.no_grad():
        exact_BDHW, mixed_BDHW = of_both(lambda: model.latent(x_B3HW))
    assert (exact_BDHW.dtype, mixed_BDHW.dtype) == (torch.float32, torch.bfloat16)
    exact_NK, mixed_NK = of_both(lambda: classify_images(model, images))
    assert not torch.equal(exact_NK, mixed_NK)
    torch.testing.assert_close(mixed_NK, exact_NK, rtol=0.05, atol=0.05 * float(exact_NK.abs().max()))


@torch.no_grad()
def test_the_log_similarity_is_trained_on_tf32() -> None:
    """Rounding takes little of the similarity of a patch to itself; in bf16 it takes a large part."""
    exact_arithmetic()
    torch.manual_seed(0)
    options = {"backbone": "resnet18", "weights": "none", "input_size": 64, "prototypes_per_class": 4}
    model = place(create_protopnet(resolve("paper", **options).model, [4] * CLASSES), CUDA).eval()
    x_B3HW, layer = make_images().batch(torch.arange(12))[0], model.prototype_layer
    layer.prototype_PDhw.copy_(model.latent(x_B3HW)[:, :, :1, :1])
    largest = model(x_B3HW).similarity_BPHW[:, :, 0, 0].diagonal()
    with mixed_precision(CUDA, layer.similarity), tf32_convolutions():
        assert model.latent(x_B3HW).dtype == torch.float32
        tf32 = model(x_B3HW).similarity_BPHW[:, :, 0, 0].diagonal()
    with mixed_precision(CUDA):
        bf16 = model(x_B3HW).similarity_BPHW[:, :, 0, 0].diagonal()
    assert not torch.backends.cudnn.allow_tf32
    assert float((largest - tf32).mean()) < 0.2 * float((largest - bf16).mean())


@torch.no_grad()
def test_distances_of_bf16_maps_are_as_exact_as_fp32() -> None:
    generator = torch.Generator().manual_seed(0)
    z_BDHW = torch.randn(4, 64, 5, 3, generator=generator).bfloat16()
    prototype_PD = torch.nn.functional.normalize(torch.randn(7, 64, generator=generator), dim=1)
    unit_BDHW = torch.nn.functional.normalize(z_BDHW.double(), dim=1)
    expected_BPHW = 2 - 2 * torch.einsum("bdhw,pd->bphw", unit_BDHW, prototype_PD.double())
    found = mixed_angular_distances(z_BDHW.to(CUDA), prototype_PD.to(CUDA)).distances()
    torch.testing.assert_close(found.cpu().double(), expected_BPHW, rtol=0, atol=2e-6)
    plain = angular_distances(torch.nn.functional.normalize(z_BDHW.float(), dim=1).to(CUDA), prototype_PD.to(CUDA))
    torch.testing.assert_close(found, plain.distances(), rtol=0, atol=2e-6)
