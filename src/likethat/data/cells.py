"""Where in a picture the cells of a map look. A picture goes from -1 to 1 along both sides."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Cells:
    """The cells of a map, each a square of `extent` units, one every `stride` units. Pairs are along y and along x."""

    size_hw: tuple[int, int]  # how many
    side: tuple[int, int]  # of the picture, in these units
    extent: int = 1
    stride: int = 1

    @property
    def half(self) -> tuple[float, float]:
        """Return half the side of a cell."""
        return self.extent / self.side[0], self.extent / self.side[1]

    @property
    def step(self) -> tuple[float, float]:
        """Return how far apart neighbours are."""
        return 2 * self.stride / self.side[0], 2 * self.stride / self.side[1]

    def coordinates(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return y and x of the middle of every cell, both H x W."""
        y_H, x_W = (self._middle(torch.arange(count, device=device), axis) for axis, count in enumerate(self.size_hw))
        return y_H[:, None].expand(self.size_hw), x_W.expand(self.size_hw)

    def places(self, cell: Tensor) -> Tensor:
        """Return x and y of the middle of cells that are numbered row by row: ... x 2."""
        columns = self.size_hw[1]
        return torch.stack([self._middle(cell % columns, 1), self._middle(cell // columns, 0)], -1)

    def _middle(self, number: Tensor, axis: int) -> Tensor:
        return (number * 2 * self.stride + self.extent) / self.side[axis] - 1


def tiles(size_hw: tuple[int, int]) -> Cells:
    """Return cells that lie side by side and fill the picture."""
    return Cells(size_hw, size_hw)
