"""Room for tables that may be larger than memory: those lie in a file as float16, which processes fill together."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from likethat.distributed import any_process, barrier, is_main_process, local_world_size, world_size
from likethat.runtime import check_disk, open_to_fill, physical_memory

MEMORY_SHARE = 0.25  # of the device's memory that a table may take

Rows = Iterable[tuple[int, Tensor]]  # some rows of a table after others: the number of the first, and what is in them


def too_large(size: int, device: torch.device) -> bool:
    """Return whether a table of so many bytes would take too much memory of any process."""
    return any_process(size > MEMORY_SHARE * _memory(device))


@contextlib.contextmanager
def gone_afterwards(file: Path) -> Iterator[None]:
    """Remove the file at the end of the block, however that ends."""
    try:
        yield
        barrier()  # every process has done with it
    finally:
        if is_main_process():
            _remove(file)


def fill_file(file: Path, shape: tuple[int, ...], what: str, rows: Rows) -> Tensor:
    """Return the table in `file`, which the processes fill together; `what` names it where the disk is too small."""
    if is_main_process():
        make_file(file, shape, what)
    barrier()
    with open_to_fill(file) as filled:
        for first, values in rows:
            filled.seek(2 * first * math.prod(shape[1:]))
            filled.write(values.cpu().half().numpy().tobytes())
    barrier()
    table = map_file(file, shape)
    if world_size() == 1:
        _remove(file)  # the memory stays mapped, and nothing is left behind by a process that is killed
    return table


def make_file(file: Path, shape: tuple[int, ...], what: str) -> None:
    """Make a file that holds zeros."""
    file.parent.mkdir(parents=True, exist_ok=True)
    check_disk(file.parent, 2 * math.prod(shape), what)
    with file.open("wb") as table:
        table.truncate(2 * math.prod(shape))


def map_file(file: Path, shape: tuple[int, ...]) -> Tensor:
    return torch.from_file(str(file), shared=True, size=math.prod(shape), dtype=torch.float16).view(shape)


def _remove(file: Path) -> None:
    with contextlib.suppress(OSError):  # Windows removes no file that is mapped
        file.unlink()


def _memory(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else physical_memory() // local_world_size()
