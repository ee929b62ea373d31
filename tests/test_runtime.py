"""What is freed is kept while a network trains on a CPU, and given back afterwards."""

from __future__ import annotations

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
    before = resident()
    with freed_memory_kept(torch.device("cpu")):
        torch.ones(SIZE)
        kept = resident() - before
    assert kept > 3.5 * SIZE
    assert resident() - before < 0.5 * SIZE
    torch.ones(SIZE)
    assert resident() - before < 0.5 * SIZE
