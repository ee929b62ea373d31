"""What is wrapped around a step of gradient descent: capture as a CUDA graph, compiling, and several processes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from likethat.distributed import rank, world_size
from likethat.training.batches import FreshViews
from likethat.training.losses import Costs, CostsOf
from likethat.training.parallel import mean_over_processes

COMPILED_FROM = 20_000  # steps of a stage: it takes a minute, and each step then some milliseconds less
WARM_UP = 3  # steps before the capture, in which CUDA's libraries choose their kernels

GradientStep = Callable[..., Costs]  # of what is shown, its costs, an optimiser and perhaps the weight of the loss
TakeStep = Callable[[Tensor, int], Costs]  # of the numbers of a batch's images, and a seed
Tell = Callable[[str], None]


def wrap_step(
    step: GradientStep,
    costs_of: CostsOf,
    optimizer: torch.optim.Optimizer,
    source: FreshViews,
    tell: Tell,
    *,
    compile: bool = False,
) -> TakeStep:
    """Return what takes `step` on a batch, for one stage of training.

    On CUDA steps are captured as a graph. Several processes take a slice of the batch each, and nothing is captured.
    """
    costs_of = compiled(costs_of, tell) if compile else costs_of

    def whole_step(*gathered: Tensor) -> Costs:
        return step(source.show(*gathered), costs_of, optimizer)

    is_captured = source.device.type == "cuda" and world_size() == 1
    run_step = CapturedStep(whole_step, optimizer, tell) if is_captured else whole_step

    def take_step(index_B: Tensor, seed: int) -> Costs:
        """Take one step. All its randomness (views, dropout) follows from `seed`; nothing waits for the device."""
        torch.manual_seed(seed + rank())
        gathered = source.gather(index_B, seed)
        if world_size() == 1:
            return run_step(*gathered)
        shown = source.show(*gathered)
        share = len(shown[0]) / len(index_B)
        # Costs are means over pictures; gradients are averaged over processes, whatever the size of their slices.
        return mean_over_processes(step(shown, costs_of, optimizer, share * world_size()), share)

    return take_step


class CapturedStep:
    """A step on CUDA: captured once and replayed, so that its kernels follow each other unasked.

    The capture holds for one stage of training: what is trained, and in which mode, is part of it.
    """

    def __init__(self, step: Callable[..., Costs], optimizer: torch.optim.Optimizer, tell: Tell) -> None:
        self.step, self.optimizer, self.tell = step, optimizer, tell
        self.graph: torch.cuda.CUDAGraph | None = None
        self.steps = 0
        self.can_be_captured = True
        self.inputs: list[Tensor] = []
        self.costs: Costs = {}

    def __call__(self, *inputs: Tensor) -> Costs:
        """Take the step on these inputs, which have the same shapes in every call."""
        if self.can_be_captured and self.steps < WARM_UP:
            self.steps += 1
            return self._step_aside(*inputs)
        if self.can_be_captured and self.graph is None:
            self._capture(*inputs)
        if self.graph is None:
            return self.step(*inputs)
        for place, value in zip(self.inputs, inputs, strict=True):
            place.copy_(value)
        self.graph.replay()
        return self.costs

    def _step_aside(self, *inputs: Tensor) -> Costs:
        """Take a step on a stream of its own, as the capture will be."""
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            costs = self.step(*inputs)
        here.wait_stream(aside)
        return costs

    def _capture(self, *inputs: Tensor) -> None:
        """Capture the step, which computes nothing; the first replay is the step itself."""
        self.inputs = [value.clone() for value in inputs]
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self.costs = self.step(*self.inputs)
        except RuntimeError as error:  # a backbone that asks the device something in the middle of a step
            self.can_be_captured = False
            self.tell(
                f"note: steps cannot be captured as a CUDA graph with this backbone, so they run slower ({error})"
            )
            return
        self.graph = graph


def is_compiled(asked: bool | None, steps: int, device: torch.device, stage: str, tell: Tell) -> bool:
    """Return what was asked for; where nothing was, decide whether compiling a stage with so many steps to come pays,
    and say it. A CPU's is not compiled then."""
    if asked is not None or device.type != "cuda":
        return asked is True
    pays = steps >= COMPILED_FROM
    decision = "compiled, which takes about a minute" if pays else "not compiled"
    tell(f"{stage}: {steps:,} steps to come are {decision}; that pays from {COMPILED_FROM:,} on (--[no-]compile)")
    return pays


def compiled(costs_of: CostsOf, tell: Tell) -> CostsOf:
    """Return the same costs by kernels made for them; where that does not work, say so once and go without."""
    torch.compiler.reset()  # each stage trains other parameters; what was compiled for the last one is of no use
    quick, first = torch.compile(costs_of, dynamic=False), True

    def costs_now(*shown: Tensor) -> Costs:
        nonlocal quick, first
        if not first:
            return quick(*shown)
        first = False
        try:
            return quick(*shown)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            quick = costs_of
            reason = str(error).strip().partition("\n")[0]
            tell(f"note: steps cannot be compiled here, so they run slower ({reason})")
        return costs_of(*shown)

    return costs_now
