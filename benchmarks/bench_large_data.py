"""How opening, checking and caching an image folder grow with its files: many tiny pictures, each size in a process of
its own.

    python benchmarks/bench_large_data.py [--sizes 2000,8000,32000] [--classes 100]

Seconds and memory are per 1,000 files, as shares of those at the smallest size: 1 is linear growth. Memory is what the
process grew by, less the pixels. Exit code 1 where a share is above its goal.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from likethat.bench.measure import Goal, verdict, with_peak

GOAL = Goal(1.5)
SIDE = 8  # pixels of a picture


def make_files(root: Path, files: int, classes: int) -> None:
    noise = np.random.default_rng(0)
    for number in range(files):
        folder = root / f"class_{number % classes:04}"
        folder.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(noise.integers(0, 256, (SIDE, SIDE, 3), np.uint8))
        picture.save(folder / f"{number:07}.png", compress_level=0)


def measure(root: Path, cache_file: Path) -> dict[str, float]:
    """In a fresh process: seconds of each step, and the bytes that the process grew by."""
    import torch

    from likethat.data.cache import load_dataset
    from likethat.data.check import check_dataset
    from likethat.data.dataset import fingerprint
    from likethat.data.formats import open_dataset

    seconds = {}

    def timed(name: str, function, times: int = 1):
        """The median of several times, where nothing is left behind by the first."""
        taken = []
        for _ in range(times):
            started = time.perf_counter()
            result = function()
            taken.append(time.perf_counter() - started)
        seconds[name] = statistics.median(taken)
        return result

    def all_steps():
        dataset = timed("scan", lambda: open_dataset(root), times=5)
        timed("check", lambda: check_dataset(dataset))
        timed("cache", lambda: load_dataset(dataset, (SIDE, SIDE), cache_file=cache_file))
        loaded = timed("cache again", lambda: load_dataset(dataset, (SIDE, SIDE), cache_file=cache_file), times=5)
        timed("fingerprint", lambda: fingerprint(dataset, loaded.report.sha256), times=5)
        return dataset

    peak, dataset = with_peak(all_steps, torch.device("cpu"))
    pixels = len(dataset.all_samples()) * SIDE * SIDE * 3
    return {**seconds, **({} if peak is None else {"memory": max(peak - pixels, 0)})}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="2000,8000,32000")
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--measure", nargs=2, type=Path, metavar=("FOLDER", "CACHE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(*args.measure)))
        return 0
    sizes = [int(size) for size in args.sizes.split(",")]
    figures = []
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            root, cache_file = Path(folder) / "images", Path(folder) / "cache" / "pixels.npy"
            make_files(root, size, args.classes)
            command = [sys.executable, __file__, "--measure", str(root), str(cache_file)]
            shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            figures.append({name: value / size * 1000 for name, value in json.loads(shown).items()})
    print(f"per 1,000 files{'':14}" + "".join(f"{size:>12,}" for size in sizes) + "  worst share  goal")
    met = True
    for name in figures[0]:
        unit, scale = ("MB", 1e-6) if name == "memory" else ("ms", 1e3)
        worst = max(entry[name] for entry in figures[1:]) / figures[0][name] if len(figures) > 1 else 1.0
        met &= GOAL.met_by(worst)
        shown = "".join(f"{scale * entry[name]:12.2f}" for entry in figures)
        print(f"{name + ', ' + unit:29}{shown}{worst:13.2f}  {GOAL.next_to(worst)}")
    print(verdict(met))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
