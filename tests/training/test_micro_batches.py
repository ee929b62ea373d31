"""Batches in parts: the step is that of the whole batch, in every stage, and takes less memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from likethat.config.presets import resolve
from likethat.config.settings import Config
from likethat.data.loaders import Images
from likethat.models.backbone import place
from likethat.models.baseline import BaselineClassifier
from likethat.models.protopnet import create_protopnet
from likethat.training import micro_batches
from likethat.training.batches import FreshViews, Shown
from likethat.training.choose import start_from_baseline
from likethat.training.loop import batch_costs, gradient_step
from likethat.training.micro_batches import bytes_kept, bytes_of_picture, parts_of, save_memory
from likethat.training.parts import find_parts
from likethat.training.plan import learns_statistics, set_mode, start_stage
from likethat.training.state import RunState

SIDE, CLASSES, BATCH = 128, 3, 11  # in parts of two and one
CPU = torch.device("cpu")


def make_config(*, learns: bool, **options: object) -> Config:
    settings = {"backbone": "test_resnet", "weights": "none", "latent_width": 16, "input_size": SIDE, **options}
    return resolve("default", None, **settings, batch_norm_images=1 if learns else 1000, cluster=0.8, separation=0.08)


def make_images() -> Images:
    generator = torch.Generator().manual_seed(1)
    pixel_NHW3 = torch.randint(256, (36, SIDE, SIDE, 3), generator=generator, dtype=torch.uint8)
    return Images(pixel_NHW3, torch.arange(36) % CLASSES, CPU)


def after_steps(stage: str, config: Config, at_once: int | None) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """What two steps of plain gradient descent leave, which does not blow up the last bit of a gradient as Adam does:
    how parameters and statistics have moved, and the costs."""
    torch.manual_seed(0)
    images, model = make_images(), place(create_protopnet(config.model, [4] * CLASSES), CPU)
    state = RunState(model, BaselineClassifier(model.backbone, CLASSES))
    assert state.baseline is not None
    if stage != "baseline":
        state.parts = find_parts(model.eval().backbone, images, 4)
        state.projection = start_from_baseline(model, state.baseline, images, state.parts)
        state.make_teacher()
    module = state.trained(stage)
    start_stage(state.model, state.baseline, stage, config.train)
    optimizer = torch.optim.SGD([value for value in module.parameters() if value.requires_grad], lr=0.05)
    for layers in (state.backbone, module.head if stage == "baseline" else module.add_on):
        layers.double()  # in fp32 what is nearly zero may fall to either side of a ReLU
    before = {name: value.clone() for name, value in module.state_dict().items()}
    middle_Nm2 = None if state.parts is None else state.parts.middles(state.backbone.cells)
    source = FreshViews(images, config.augment, state.backbone.cells, middle_Nm2)
    learns, step = learns_statistics(stage, len(images), config.train), gradient_step
    if at_once is not None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(micro_batches, "MOST_BYTES", at_once * bytes_of_picture(state.backbone))
            step = save_memory(gradient_step, state.backbone, BATCH, learns_statistics=learns)
        assert step is not gradient_step
    set_mode(module, stage, len(images), config.train)
    costs = []
    for number in range(2):
        shown = source.show(*source.gather(torch.arange(BATCH) + BATCH * number, number))
        costs.append(step(shown, lambda *values: batch_costs(state, stage, config, *values), optimizer))
    return {name: value - before[name] for name, value in module.state_dict().items()}, costs


@pytest.mark.parametrize("stage", ["baseline", "joint"])
@pytest.mark.parametrize("backbone", ["test_resnet", "test_convnext"])
def test_parts_of_a_batch_take_the_step_of_the_whole(stage: str, backbone: str) -> None:
    config = make_config(learns=backbone == "test_convnext", backbone=backbone)  # which has no BatchNorm
    (whole, costs), (parts, their_costs) = (after_steps(stage, config, at_once) for at_once in (None, 2))
    for name, value in whole.items():
        scale = float(value.abs().max())
        assert float((value - parts[name]).abs().max()) <= 1e-5 * scale, name
    torch.testing.assert_close(their_costs, costs, rtol=2e-5, atol=2e-5)
    assert costs[0]["loss"] != costs[1]["loss"]
    if stage == "joint":
        assert float(costs[0]["locality"]) > 0
        # Not in the first step: an untrained cell sees nothing but what the attack leaves as it is.
        assert float(costs[1]["context"]) > 1e-5
        assert {"cluster", "separation", "distillation", "place"} < costs[0].keys()


def test_batch_norm_that_learns_sees_the_whole_batch_and_learns_it_once() -> None:
    config = make_config(learns=True)
    (whole, costs), (saving, their_costs) = (after_steps("baseline", config, at_once) for at_once in (None, 2))
    assert any(name.endswith("running_mean") for name in whole)
    assert {name: int(value) for name, value in whole.items() if name.endswith("tracked")}.popitem()[1] == 2
    for name, value in whole.items():
        assert torch.equal(value, saving[name]), name
    assert costs == their_costs


def test_less_is_kept_for_the_way_back() -> None:
    """Counted where autograd keeps it: of some pictures, and with blocks computed again."""
    config = make_config(learns=True, backbone="resnet18")
    backbone = place(create_protopnet(config.model, [1] * CLASSES), CPU).backbone
    alone, x_B3HW = bytes_of_picture(backbone), torch.rand(8, 3, SIDE, SIDE)
    assert alone > 20 * x_B3HW[0].nbytes
    assert bytes_kept(backbone, x_B3HW) == pytest.approx(8 * alone, rel=0.01)
    with micro_batches._recomputing(backbone.net):
        again = bytes_kept(backbone.train(), x_B3HW)
    assert again < 0.6 * bytes_kept(backbone, x_B3HW)
    backbone.requires_grad_(False)
    assert bytes_of_picture(backbone) == 0


def test_one_part_is_the_batch_itself_and_small_batches_are_left_alone() -> None:
    shown = Shown(*(torch.zeros(5, 1, 1, 1, 1) for _ in Shown._fields))
    for at_once in (None, 5, 9):
        ((part, share),) = parts_of(shown, at_once)
        assert part is shown
        assert share == 1
    backbone = create_protopnet(make_config(learns=False).model, [1]).backbone
    assert save_memory(gradient_step, backbone, 80, learns_statistics=False) is gradient_step


def test_a_part_has_the_picture_before_it_where_it_is_compared_with_that() -> None:
    x_B3HW = torch.arange(7.0)[:, None, None, None].expand(7, 3, 2, 2)
    same_BHW = torch.zeros(7, 1, 1, dtype=torch.bool)
    same_BHW[0] = same_BHW[3] = True
    shown = Shown(x_B3HW, torch.arange(7)[:, None], *(torch.zeros(7, 1),) * 3, same_BHW, torch.zeros(7, 1))
    parts = list(parts_of(shown, 3))
    assert [part.x_B3HW[:, 0, 0, 0].tolist() for part, _ in parts] == [[6, 0, 1], [2, 3], [4, 5, 6]]
    assert [part.own(part.x_B3HW)[:, 0, 0, 0].tolist() for part, _ in parts] == [[0, 1], [2, 3], [4, 5, 6]]
    assert [part.label_BV[:, 0].tolist() for part, _ in parts] == [[0, 1], [2, 3], [4, 5, 6]]
    assert sum(share for _, share in parts) == pytest.approx(1)


def test_a_network_that_cannot_compute_its_blocks_again_keeps_all() -> None:
    with micro_batches._recomputing(nn.Identity()):
        pass
