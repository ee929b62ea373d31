"""One step of gradient descent: on a GPU recorded once and replayed, so that its kernels follow each other unasked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from likethat.config import AugmentConfig
from likethat.data.augment import Views, draw_views, of_shown, show, shown_shares
from likethat.data.loaders import Images, to_unit
from likethat.distributed import own_part, rank, total, world
from likethat.inference.passes import mixed_precision
from likethat.runtime import send
from likethat.training.losses import Costs
from likethat.training.parallel import CostsOf, Shown

WARM_UP = 3  # steps before the recording, in which CUDA's libraries choose their kernels


class Source(Protocol):
    """What steps learn from."""

    @property
    def device(self) -> torch.device: ...

    def gather(self, index_B: Tensor, seed: int) -> list[Tensor]:
        """All that this process's part of a batch is made of, on the device."""

    def show(self, *gathered: Tensor) -> Shown:
        """Made of it."""


@dataclass(frozen=True)
class FreshViews:
    """Views of pictures, drawn anew in every step."""

    images: Images
    config: AugmentConfig

    @property
    def device(self) -> torch.device:
        return self.images.device

    def gather(self, index_B: Tensor, seed: int) -> list[Tensor]:
        """Every process draws the views of the whole batch. It takes its slice and the picture before, of which the
        first of the slice may show a piece."""
        height, width = self.images.pixel_NHW3.shape[1:3]
        views = draw_views(len(index_B), height / width, self.config, torch.Generator().manual_seed(seed))
        if world() > 1:
            part = own_part(len(index_B))
            own_b = torch.arange(part.start - 1, part.stop) % len(index_B)
            index_B, views = index_B[own_b], views[own_b]
        views = views.to(self.device)
        return [*self.images.raw_batch(index_B), send(index_B, self.device), *vars(views).values()]

    def show(self, *gathered: Tensor) -> Shown:
        pixel_BHW3, label_B, image_B, *drawn = gathered
        views = Views(*drawn)
        x_B3HW = show(to_unit(pixel_BHW3), views)
        shown = (x_B3HW, of_shown(label_B, views), shown_shares(views), of_shown(image_B, views))
        return shown if world() == 1 else tuple(value[1:] for value in shown)


class TrainStep:
    """Views of a batch, costs, gradients, update. `costs_of` takes what the source shows.

    The recording holds for one stage of training: what is trained, and in which mode, is part of it. Several processes
    take a slice of the batch each, and nothing is recorded.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        costs_of: CostsOf,
        source: Source,
        tell: Callable[[str], None],
        *,
        compile: bool = False,
    ) -> None:
        self.optimizer, self.source, self.tell = optimizer, source, tell
        self.costs_of = compiled(costs_of, tell) if compile else costs_of
        self.graph: torch.cuda.CUDAGraph | None = None
        self.steps = 0
        self.recordable = source.device.type == "cuda" and world() == 1
        self.inputs: list[Tensor] = []
        self.costs: Costs = {}

    def __call__(self, index_B: Tensor, seed: int) -> Costs:
        """All randomness of the step (views, dropout) follows from `seed`. Nothing in it waits for the device."""
        torch.manual_seed(seed + rank())
        inputs = self.source.gather(index_B, seed)
        if self.recordable and self.steps < WARM_UP:
            self.steps += 1
            return self._descend_aside(*inputs)
        if self.recordable and self.graph is None:
            self._record(inputs)
        if self.graph is None:
            return self._descend(*inputs, batch=len(index_B))
        for place, value in zip(self.inputs, inputs, strict=True):
            place.copy_(value)
        self.graph.replay()
        return self.costs

    def _descend(self, *inputs: Tensor, batch: int | None = None) -> Costs:
        """`batch` is the size of the whole batch, of which several processes have a slice each."""
        shown = self.source.show(*inputs)
        share = len(shown[0]) / (batch or len(shown[0]))
        with mixed_precision(self.source.device):
            costs = self.costs_of(*shown)
        self.optimizer.zero_grad(set_to_none=True)
        # Costs are means over pictures; gradients are averaged over processes, whatever the size of their slices.
        loss = costs["loss"] if world() == 1 else costs["loss"] * (share * world())
        loss.backward()
        self.optimizer.step()
        return _over_all({name: value.detach() for name, value in costs.items()}, share)

    def _descend_aside(self, *inputs: Tensor) -> Costs:
        """On a stream of its own, as the recording will be."""
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            costs = self._descend(*inputs)
        here.wait_stream(aside)
        return costs

    def _record(self, inputs: list[Tensor]) -> None:
        """Recording computes nothing; the first replay is the step itself."""
        self.inputs = [value.clone() for value in inputs]
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self.costs = self._descend(*self.inputs)
        except RuntimeError as error:  # a backbone that asks the device something in the middle of a step
            self.recordable = False
            self.tell(f"note: steps cannot be recorded with this backbone, so they run slower ({error})")
            return
        self.graph = graph


def compiled(costs_of: CostsOf, tell: Callable[[str], None]) -> CostsOf:
    """The same costs by kernels made for them; where that does not work, it is said once and goes without."""
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


def _over_all(costs: Costs, share: float) -> Costs:
    """The means over the whole batch, of which this process has seen a share."""
    if world() == 1:
        return costs
    values = total(torch.stack([value.float() for value in costs.values()]) * share)
    return dict(zip(costs, values.unbind(), strict=True))
