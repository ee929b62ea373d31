"""How the memory of passes over the training images grows with them: choosing prototypes, projection, nearest patches,
the last layer and pruning on a tiny network, each size in a process of its own.

    python benchmarks/bench_large_passes.py [--sizes 2000,8000,32000] [--full]

Bounds on what is in memory of candidates and scores are lowered, so that everything works as it does when nothing fits.
Memory is what the process allocates above what it had before; pages of files, which the system takes back when it needs
them, are not counted. Growth is in bytes per image, between the smallest size and the largest. Exit code 1 where it is
above what is stated. Linux only.

With --full: what 1,000 classes and 20,000 prototypes need with the bounds as they are, measured with 5,000 images; a
million adds to that what is stated.
"""

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from likethat.bench.measure import Goal, verdict

BOUND = 2**18  # bytes of candidates, and of scores, in memory at a time
EVERY = 0.002  # seconds between two looks at the memory
MILLION = 1_000_000
ITERATIONS = 2  # of the last layer; later ones need no more memory
# The C library gives back at once what is freed, so that the process has what is in use and no more.
THRIFTY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
# Bytes that an image may add. Of choosing: place, evidence and number of its patch, its losses under ten scales; of the
# others: an order of the images, losses.
STATED = {"choosing prototypes": 150, "projection": 50, "nearest patches": 25, "last layer": 50, "pruning": 50}


class Small:
    sizes, classes, per_class, side, width = "2000,8000,32000", 100, 2, 32, 16  # a picture is one patch


class Full:
    sizes, classes, per_class, side, width = "5000", 1000, 20, 64, 128  # four patches


def peak_of(function: Callable[[], object]) -> int:
    """Bytes that the process allocates while the function runs."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = most = allocated()
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(EVERY):
            most = max(most, allocated())

    watcher = threading.Thread(target=watch)
    watcher.start()
    function()
    done.set()
    watcher.join()
    return most - before


def allocated() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def measure(folder: Path, count: int, case: type[Small] | type[Full]) -> dict[str, int]:
    """In a fresh process."""
    import torch

    from likethat.config.presets import resolve
    from likethat.data.loaders import Images
    from likethat.inference import memory_map, score_cache
    from likethat.inference.nearest import nearest_patches
    from likethat.models.baseline import BaselineClassifier
    from likethat.models.protopnet import create_protopnet
    from likethat.training import choose, last_layer_problem, project
    from likethat.training.last_layer import solve_last_layer
    from likethat.training.parts import find_parts
    from likethat.training.pruning import prune

    if case is Small:
        choose.MOST_BYTES = project.MOST_BYTES = last_layer_problem.BLOCK = BOUND
        prune.BLOCK = BOUND // 4  # numbers
    memory_map.MEMORY_SHARE = 0.0
    config = resolve(backbone="test_resnet", weights="none", input_size=case.side, latent_width=case.width)
    classes, shape = case.classes, (count, case.side, case.side, 3)
    model = create_protopnet(config.model, [case.per_class] * classes).eval()
    baseline = BaselineClassifier(model.backbone, classes)
    pixels = np.lib.format.open_memmap(folder / "pixels.npy", mode="w+", dtype=np.uint8, shape=shape)
    noise = np.random.default_rng(0)
    for start in range(0, count, 1000):
        pixels[start : start + 1000] = noise.integers(0, 256, pixels[start : start + 1000].shape, np.uint8)
    images = Images(torch.from_numpy(pixels), torch.arange(count) % classes, torch.device("cpu"))
    layer, names = model.prototype_layer, tuple(map(str, range(classes)))
    source_P = torch.arange(len(layer.class_P))
    terms = {"lam": config.train.l1, "ridge": config.train.ridge, "max_iterations": ITERATIONS}

    def last_layer(images: Images) -> None:
        with score_cache.cached_scores(model, images, source_P, folder / "scores") as score_NP:
            solve_last_layer(score_NP, images.label_N, layer.class_P, classes, **terms)

    def pruning(images: Images) -> None:
        score_NP = score_cache.cache_scores(model, images, None, folder / "scores")
        scores = prune.CachedScores(score_NP, images.label_N, layer.class_P, classes, source_P, len(images), folder)
        kept = scores.select(torch.arange(0, len(source_P), 2)).fair()
        solve_last_layer(kept.score_NP, kept.label_N, kept.class_P, classes, **terms)

    def choosing(images: Images) -> None:
        parts = find_parts(baseline.eval().backbone, images, case.per_class)
        choose.start_from_baseline(model, baseline, images, parts)

    steps: tuple[Callable[[Images], object], ...] = (
        choosing,
        lambda images: project.project(model, images, names),
        lambda images: nearest_patches(model, images, prune.NEAREST),
        last_layer,
        pruning,
    )
    few = Images(images.pixel_NHW3[: 5 * classes], images.label_N[: 5 * classes], images.device)
    for step in steps if case is Small else ():
        step(few)  # what is needed once
    return {name: peak_of(lambda step=step: step(images)) for name, step in zip(STATED, steps, strict=True)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--measure", nargs=2, metavar=("FOLDER", "COUNT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    case = Full if args.full else Small
    if args.measure:
        print(json.dumps(measure(Path(args.measure[0]), int(args.measure[1]), case)))
        return 0
    sizes = [int(size) for size in (args.sizes or case.sizes).split(",")]
    environment, figures = {**os.environ, **THRIFTY}, []
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, *["--full"] * args.full, "--measure", folder, str(size)]
            figures.append(
                json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)
            )
    print(f"{'MB at images':21}" + "".join(f"{size:>10,}" for size in (*sizes, MILLION)) + "  bytes per image  stated")
    met = True
    for name, stated in STATED.items():
        peaks = [entry[name] for entry in figures]
        growth = (peaks[-1] - peaks[0]) / (sizes[-1] - sizes[0]) if len(sizes) > 1 else stated
        goal = Goal(stated)
        met &= goal.met_by(growth)
        peaks.append(peaks[-1] + max(growth, 0) * (MILLION - sizes[-1]))  # extrapolated
        shown = "".join(f"{peak / 1e6:10.1f}" for peak in peaks)
        print(f"{name:21}{shown}{growth:17.0f}  {goal.next_to(growth)}")
    print(verdict(met))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
