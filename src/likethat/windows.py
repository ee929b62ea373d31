"""Windows that a picture is cut into, where every cell of the latent map shall see one of them and nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass

from likethat.errors import UserError

NO_WINDOWS = (0, 0)  # as the option has it: cells see whatever the network lets them see
SMALLEST = 16  # pixels of a side


@dataclass(frozen=True)
class Windows:
    """Squares of `size` pixels, one every `stride` pixels, row by row."""

    size: int
    stride: int

    def grid(self, size_hw: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of windows in a picture of that size."""
        height, width = size_hw
        return (height - self.size) // self.stride + 1, (width - self.size) // self.stride + 1

    def cost(self, size_hw: tuple[int, int]) -> float:
        """Pixels of all windows for one pixel of the picture."""
        return math.prod(self.grid(size_hw)) * self.size**2 / math.prod(size_hw)

    def cover(self, size_hw: tuple[int, int]) -> bool:
        """Say whether every pixel of a picture of that size lies in a window, and every window in the picture."""
        fit = all(side >= self.size and (side - self.size) % self.stride == 0 for side in size_hw)
        return fit and (self.stride <= self.size or self.grid(size_hw) == (1, 1))


def check_windows(values: tuple[int, int], size_hw: tuple[int, int]) -> None:
    """Say what is wrong with windows of this size and stride in a picture of that size, and which ones would do."""
    if values == NO_WINDOWS:
        return
    (size, stride), (height, width) = values, size_hw
    if size > min(size_hw):
        raise UserError(
            f"--windows of {size} pixels are larger than the {height}x{width} picture; make them smaller or "
            "--input-size larger."
        )
    if size < SMALLEST or stride < 1:
        raise UserError(f"--windows takes a size of at least {SMALLEST} and a stride of at least 1, like 80,24.")
    if not Windows(size, stride).cover(size_hw):
        same_size = [Windows(size, other) for other in range(1, size + 1)]
        same_stride = [Windows(other, stride) for other in range(max(SMALLEST, stride), min(size_hw) + 1)]
        nearest = [
            min(fitting, key=lambda windows: abs(windows.size - size) + abs(windows.stride - stride))
            for choice in (same_size, same_stride)
            if (fitting := [windows for windows in choice if windows.cover(size_hw)])
        ]
        raise UserError(
            f"--windows {size},{stride} leave a rim of the {height}x{width} picture or gaps in it unseen; take "
            f"{' or '.join(f'{windows.size},{windows.stride}' for windows in nearest)}."
        )
