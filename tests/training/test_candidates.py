"""Patches that could take a prototype's place."""

from __future__ import annotations

import torch

from likethat.training.candidates import spread_choice


def test_spread_choice_takes_one_of_each_heap() -> None:
    heaps = torch.eye(4).repeat_interleave(25, 0) + 0.01 * torch.randn(100, 4)
    chosen = spread_choice(heaps, torch.rand(100), 4)
    assert sorted((chosen // 25).tolist()) == [0, 1, 2, 3]
    assert len(set(spread_choice(torch.ones(10, 3), torch.rand(10), 6).tolist())) == 6, "equal candidates, no repeats"
