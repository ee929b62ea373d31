"""Time to result: a whole run from start to report, seconds in every stage, next to a bare training loop.

python benchmarks/bench_time_to_result.py CUB_200_2011 --weights resnet34.safetensors [--device cuda] [OPTIONS OF TRAIN]

The bare loop fine-tunes the same backbone with a linear layer on as many images as gradient descent showed in the run,
with the same batches, views, precision, recording and compiling. It decodes nothing and measures nothing. The options
of `likethat train` are for both. What an epoch measures on validation images counts as gradient descent. Without a
data set nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from likethat.cli.training_options import add_options
from likethat.config import Config, options, resolve
from likethat.data.loaders import Images
from likethat.models.backbone import place
from likethat.models.baseline import create_baseline
from likethat.progress import Display
from likethat.runtime import exact_arithmetic, resolve_device
from likethat.training.batches import FreshViews
from likethat.training.loop import gradient_step
from likethat.training.losses import Costs, baseline_costs
from likethat.training.plan import PlanEntry, epochs_of, set_learning_rates, set_mode, steps_of_epoch
from likethat.training.state import RunState
from likethat.training.wrap_step import is_compiled, wrap_step
from likethat.workflows.train import train

DESCENT = ("baseline", "warm", "joint")
GOAL = 0.15  # share of the time that is not gradient descent
MEASURED_STEPS = 200  # of the bare loop, after as many to settle as a recording needs


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
    images = found["counts"]["train"]
    steps = {stage: epochs_of(stage, config.train) * steps_of_epoch(images, config.train) for stage in DESCENT}
    bare = bare_step_seconds(config, images, len(found["classes"]), resolve_device(args.device), sum(steps.values()))
    return print_table(seconds, steps, bare, config)


def whole_run(data: Path, run: Path, args: argparse.Namespace, asked: dict[str, object]) -> dict[str, float]:
    """Train from start to report; return the seconds of the whole and of what metrics.jsonl tells."""
    started = time.monotonic()
    classifier = train(data, run, preset=args.preset, device=args.device, overwrite=True, display=Display(), **asked)
    whole = time.monotonic() - started
    records = [json.loads(line) for line in (classifier.path / "metrics.jsonl").read_text().splitlines()]
    by_stage: Counter[str] = Counter()
    for record in records:
        by_stage[record["stage"]] += record.get("seconds", 0.0)
    known = {stage: by_stage[stage] for stage in by_stage if by_stage[stage]}
    return {**known, "reading, test images, pictures, report": whole - sum(known.values()), "whole run": whole}


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
        gradient_step,
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
        step(torch.arange(size) + size * (number % 4), number + 100)
    return (now(device) - started) / timed


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic()


def print_table(seconds: dict[str, float], steps: dict[str, int], bare: float, config: Config) -> int:
    whole, all_steps = seconds["whole run"], sum(steps.values())
    print(
        f"{config.model.backbone}, preset {config.preset}: {all_steps:,} steps of {config.train.batch_size} pictures\n"
    )
    print("| stage | seconds | share | bare loop, as many images |\n|---|---|---|---|")
    for name, value in seconds.items():
        beside = f"{bare * steps[name]:.1f} s" if steps.get(name) else ""
        print(f"| {name} | {value:.1f} | {value / whole:.1%} | {beside} |")
    descent = sum(seconds.get(stage, 0.0) for stage in DESCENT)
    other = 1 - descent / whole
    print(f"\nA bare loop of as many images: {bare * all_steps:.1f} s, {1000 * bare:.2f} ms a step.")
    print(f"The whole run takes {whole / max(bare * all_steps, 1e-9):.2f} times as long.")
    print(
        f"All that is not gradient descent: {whole - descent:.1f} s, {other:.1%} of the run (goal: under {GOAL:.0%})."
    )
    return 0 if other < GOAL else 1


if __name__ == "__main__":
    raise SystemExit(main())
