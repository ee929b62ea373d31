"""What a run learns from and by, where it is kept, and whom it tells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from likethat.config.settings import Config
from likethat.data.loaders import Images
from likethat.distributed import any_process
from likethat.errors import Interrupted
from likethat.progress import Display
from likethat.runtime import StopFlag

Observer = Callable[[int, dict[str, Any]], None]  # number of the record in metrics.jsonl, the record


@dataclass(frozen=True)
class Course:
    """All that a run is given; `observe` is called with every new record of metrics.jsonl."""

    train: Images
    val: Images
    classes: tuple[str, ...]
    config: Config
    run: Path
    fingerprint: str  # of the images
    display: Display
    stop: StopFlag
    observe: Observer | None = None
    weight_N: Tensor | None = None  # how much each training image counts; None where all count alike
    on_NHW: Tensor | None = None  # cells of each training image that prototypes may be taken from; None for all

    def check_stop(self) -> None:
        """Stop where any process was asked to: processes that train together stop together."""
        if any_process(self.stop.requested):
            raise Interrupted
