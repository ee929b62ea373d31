"""How often the test images of a run were looked at: a figure that chose nothing is worth more than one that did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

FIRST = ("first", "second", "third")


def count_looks(metrics: Sequence[dict[str, Any]]) -> int:
    """Return how often test images judged this model, or one that it was made of, by the lines of metrics.jsonl."""
    judged = [line for line in metrics if line["stage"] == "test"]
    return max([len(judged), *(line.get("looks", 1) for line in judged)])


def nth_time(looks: int) -> str:
    """Return "for the first time", "for the 12th time" and so on."""
    if looks <= len(FIRST):
        return f"for the {FIRST[looks - 1]} time"
    ending = "th" if 10 < looks % 100 < 20 else {1: "st", 2: "nd", 3: "rd"}.get(looks % 10, "th")
    return f"for the {looks}{ending} time"
