"""Optional TensorBoard events of a run, beside its metrics.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from likethat.errors import UserError
from likethat.training.course import Observer


def tensorboard_observer(run: Path) -> Observer:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError("TensorBoard is not installed; run `pip install 'likethat[tensorboard]'`.") from error
    writer = SummaryWriter(run / "tensorboard")

    def observe(number: int, record: dict[str, Any]) -> None:
        for name, value in _numbers(record):
            writer.add_scalar(f"{record['stage']}/{name}", value, number)
        writer.flush()

    return observe


def _numbers(record: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for name, value in record.items():
        if isinstance(value, dict):
            found += _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and name not in ("cycle", "epoch"):
            found.append((prefix + name, value))
    return found
