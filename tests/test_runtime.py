"""What is freed is kept while a network trains on a CPU, and given back afterwards."""

from __future__ import annotations

import ctypes
import resource
import sys
from pathlib import Path

import pytest
import torch

from likethat.runtime import freed_memory_kept

SIZE = 2**26  # numbers, of 4 bytes


def resident() -> int:
    """Return the bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_is_freed_is_kept_in_the_block_alone() -> None:
    ctypes.CDLL(None).malloc_trim(0)  # or what other tests have freed would be used again
    before = resident()
    with freed_memory_kept(torch.device("cpu")):
        torch.ones(SIZE)
        kept = resident() - before
    assert kept > 3.5 * SIZE
    assert resident() - before < 0.5 * SIZE
    torch.ones(SIZE)
    assert resident() - before < 0.5 * SIZE


@pytest.mark.skipif(sys.platform != "linux", reason="reads page faults as Linux counts them")
def test_large_arrays_are_not_cleared_anew_after_the_block() -> None:
    """As glibc adapts itself in a process that frees large arrays, unless somebody has set its thresholds."""

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(20):
            torch.ones(2**21)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    with freed_memory_kept(torch.device("cpu")):
        faults()
    faults()
    assert faults() < 2**21 * 4 / resource.getpagesize(), "less than a single one of them"
