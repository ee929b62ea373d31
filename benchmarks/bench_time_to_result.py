"""Time to result: a whole run from start to report, seconds in every stage, next to a bare training loop.

python benchmarks/bench_time_to_result.py CUB_200_2011 --weights resnet34.safetensors [--device cuda] [OPTIONS OF TRAIN]

The bare loop fine-tunes the same backbone with a linear layer on as many images as gradient descent showed in the run,
with the same batches, views, precision, capture and compiling. It decodes nothing and measures nothing. The options
of `likethat train` are for both.

Epochs count as gradient descent. Their seconds hold all that is done between two steps, too: prototypes that follow the
network, and states that are saved. What an epoch measures on validation images has a row of its own; the share of all
that is not gradient descent is given with it and without it. Without a data set nothing is measured.

States are written while training goes on: what is timed of them is what training waits for.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from likethat.cli.training_options import add_options
from likethat.config.presets import resolve
from likethat.config.settings import Config, options
from likethat.data.loaders import Images
from likethat.models.backbone import place
from likethat.models.baseline import create_baseline
from likethat.models.prototypes import SIMILARITIES
from likethat.progress import Advance, Display
from likethat.runtime import exact_arithmetic, resolve_device, tf32_convolutions
from likethat.training.batches import FreshViews
from likethat.training.loop import gradient_step
from likethat.training.losses import Costs, baseline_costs
from likethat.training.plan import PlanEntry, epochs_of, set_learning_rates, set_mode, steps_of_epoch
from likethat.training.state import RunState, Saver
from likethat.training.wrap_step import is_compiled, wrap_step
from likethat.workflows import train as workflow
from likethat.workflows.train import train

DESCENT = ("baseline", "warm", "joint")
GOAL = 0.15  # share of the time that is not gradient descent
MEASURED_STEPS = 200  # of the bare loop, after as many to settle as a capture needs
VALIDATION = "validation images"  # after each epoch
READING, AFTERWARDS = "reading images", ("test images", "pictures of prototypes")  # before and after all stages
OPENING = "data set opened, pixels onto the device"
# What else a run calls outside its stages and tasks, by rows of the table.
CALLS: dict[str, list[tuple[Any, str]]] = {
    OPENING: [(workflow, "prepare")],  # less the reading in it
    "weights": [(workflow, "create_protopnet"), (workflow, "place"), (workflow, "save_tensors")],
    "states saved at the end of stages": [(Saver, "save"), (Saver, "__exit__")],
    "calibration, pages, digests": [(workflow, "conclude")],
}
REST = "rest"


class TimedDisplay(Display):
    """Shows what a display shows, and adds up the seconds of each task, and of calls outside tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: Counter[str] = Counter()
        self.is_in_task = False

    @contextmanager
    def task(self, name: str) -> Iterator[Advance]:
        started, self.is_in_task = time.monotonic(), True
        with super().task(name) as advance:
            yield advance
        self.seconds[name] += time.monotonic() - started
        self.is_in_task = False

    @contextmanager
    def calls_timed(self) -> Iterator[None]:
        """Add up the seconds of CALLS in the block, by row. A state that is saved in an epoch is in the epoch's."""
        with ExitStack() as stack:
            for row, calls in CALLS.items():
                for owner, name in calls:
                    stack.enter_context(patch.object(owner, name, self._timed(getattr(owner, name), row)))
            yield

    def _timed(self, function: Callable[..., Any], row: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started, is_counted = time.monotonic(), not self.is_in_task
            result = function(*args, **kwargs)
            self.seconds[row] += is_counted * (time.monotonic() - started)
            return result

        return call


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?", help="the data set, such as CUB_200_2011")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--preset", default="default")
    parser.add_argument("--out", type=Path, help="keeps the run here (default: nowhere)")
    add_options(parser)
    args = parser.parse_args()
    if args.data is None:
        print("time to result: name a data set, such as CUB_200_2011, and --weights to measure it")
        return 0
    asked = {name: getattr(args, name) for name in options() if getattr(args, name) is not None}
    config = resolve(args.preset, **asked)
    with tempfile.TemporaryDirectory() as scratch:
        run = args.out or Path(scratch) / "run"
        seconds = whole_run(args.data, run, args, asked)
        found = json.loads((run / "config.json").read_text())["data"]
    images, device = found["counts"]["train"], resolve_device(args.device)
    trained = [stage for stage in DESCENT if stage in seconds]
    steps = {stage: epochs_of(stage, config.train) * steps_of_epoch(images, config.train) for stage in trained}
    bare = bare_step_seconds(config, images, len(found["classes"]), device, sum(steps.values())) if steps else 0.0
    return print_table(seconds, steps, bare, config)


def whole_run(data: Path, run: Path, args: argparse.Namespace, asked: dict[str, object]) -> dict[str, float]:
    """Train from start to report; return the seconds of every stage, of the tasks besides, and of the whole."""
    display, started = TimedDisplay(), time.monotonic()
    with display.calls_timed():
        classifier = train(data, run, preset=args.preset, device=args.device, overwrite=True, display=display, **asked)
    whole = time.monotonic() - started
    records = [json.loads(line) for line in (classifier.path / "metrics.jsonl").read_text().splitlines()]
    by_stage: Counter[str] = Counter()
    for record in records:
        by_stage[record["stage"]] += record.get("seconds", 0.0)
    known = {READING: display.seconds[READING]}
    known |= {stage: seconds for stage, seconds in by_stage.items() if seconds}
    known |= {name: display.seconds[name] for name in AFTERWARDS}
    known |= {row: display.seconds[row] for row in CALLS}
    known[OPENING] -= known[READING]
    return {**known, REST: whole - sum(known.values()), "whole run": whole, VALIDATION: display.seconds[VALIDATION]}


def bare_step_seconds(config: Config, count: int, classes: int, device: torch.device, steps: int) -> float:
    """Return the seconds of a step of the bare loop, on random pictures: they cost what others cost."""
    exact_arithmetic()
    settings, size = config.train, min(config.train.batch_size, count)
    held = 4 * size
    pixel_NHW3 = torch.randint(256, (held, *config.model.input_size, 3), dtype=torch.uint8, device=device)
    images = Images(pixel_NHW3, torch.arange(held, device=device) % classes, device)
    model = place(create_baseline(config.model, classes), device)
    optimizer = RunState(None, model).optimizer_for("baseline", settings)
    set_mode(model, "baseline", count, settings)

    def costs_of(x_B3HW: Tensor, label_BV: Tensor, *_: Tensor) -> Costs:
        return baseline_costs(model(x_B3HW), label_BV[:, 0], settings)

    compile = is_compiled(config.train.compile, steps, device, "bare loop", lambda _: None)
    step = wrap_step(
        partial(gradient_step, similarity=SIMILARITIES[config.model.similarity]),
        costs_of,
        optimizer,
        FreshViews(images, config.augment, model.backbone.cells),
        print,
        compile=compile,
    )
    started = 0.0
    timed = MEASURED_STEPS if device.type == "cuda" else 5
    for number in range(-10 if device.type == "cuda" else -1, timed):
        if number == 0:
            started = now(device)
        set_learning_rates(optimizer, PlanEntry("baseline"), max(number, 0) / timed, settings)
        with tf32_convolutions():
            step(torch.arange(size) + size * (number % 4), number + 100)
    return (now(device) - started) / timed


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic()


def print_table(seconds: dict[str, float], steps: dict[str, int], bare: float, config: Config) -> int:
    whole, validation, all_steps = seconds["whole run"], seconds.pop(VALIDATION), sum(steps.values())
    print(
        f"{config.model.backbone}, preset {config.preset}: {all_steps:,} steps of {config.train.batch_size} pictures\n"
    )
    print("| stage | seconds | share | bare loop, as many images |\n|---|---|---|---|")
    for name, value in seconds.items():
        beside = f"{bare * steps[name]:.1f} s" if steps.get(name) else ""
        print(f"| {name} | {value:.1f} | {value / whole:.1%} | {beside} |")
    print(f"| of it, validation images in epochs | {validation:.1f} | {validation / whole:.1%} | |")
    other = whole - sum(seconds.get(stage, 0.0) for stage in DESCENT)
    print(f"\nA bare loop of as many images: {bare * all_steps:.1f} s, {1000 * bare:.2f} ms a step.")
    print(f"The whole run takes {whole / max(bare * all_steps, 1e-9):.2f} times as long.")
    print(f"All that is not gradient descent: {other:.1f} s, {other / whole:.1%} of the run (goal: under {GOAL:.0%}).")
    other += validation
    print(f"With the validation images after each epoch: {other:.1f} s, {other / whole:.1%}.")
    return 0 if (other - validation) / whole < GOAL else 1


if __name__ == "__main__":
    raise SystemExit(main())
