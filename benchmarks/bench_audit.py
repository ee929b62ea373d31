"""How many wrong labels `likethat data audit` finds: CUB-200-2011 with some labels swapped, for each seed a run
of its own.

    python benchmarks/bench_audit.py CUB_200_2011 [--species 200] [--share 0.02] [--first 0.03] [--seeds 1,2]
        [-- OPTIONS OF likethat train, such as --preset quick --input-size 160]

Labels of training images are swapped, those that the run holds out for validation among them. The share of them that
is among the first of the audit's table has a goal. Exit code 1 where it is missed.
"""

import argparse
import csv
import random
import sys
import tempfile
from pathlib import Path

from likethat.bench.measure import Goal, verdict
from likethat.cli.parser import main as likethat
from likethat.data.cub import find_cub, read_table

FOUND = Goal(0.7, at_least=True)


def swap_labels(cub: Path, out: Path, species: int, share: float, seed: int) -> set[str]:
    """Make a copy of CUB's tables, with links to its images, in which some training images have another label; return
    their paths. Of the species, as many as asked for are taken, in equal steps."""
    draw = random.Random(seed)
    classes, label_of = read_table(cub / "classes.txt"), read_table(cub / "image_class_labels.txt")
    every = list(classes)
    kept = [every[number * len(every) // species] for number in range(species)]
    name_of = {key: name for key, name in read_table(cub / "images.txt").items() if label_of[key] in kept}
    is_training = read_table(cub / "train_test_split.txt")
    training = [key for key in name_of if is_training[key] == "1"]
    chosen = draw.sample(training, round(share * len(training)))
    for key in chosen:
        label_of[key] = draw.choice([label for label in kept if label != label_of[key]])
    out.mkdir(parents=True)
    tables = {
        "classes.txt": {label: classes[label] for label in kept},
        "images.txt": name_of,
        "image_class_labels.txt": {key: label_of[key] for key in name_of},
    }
    for name in ("train_test_split.txt", "bounding_boxes.txt"):
        tables[name] = {key: value for key, value in read_table(cub / name).items() if key in name_of}
    for name, rows in tables.items():
        (out / name).write_text("".join(f"{key} {value}\n" for key, value in rows.items()))
    (out / "images").symlink_to((cub / "images").resolve())
    return {f"images/{name_of[key]}" for key in chosen}


def share_found(table: Path, swapped: set[str], first: float) -> float:
    """Return the share of the swapped images that is among the first of an audit's table."""
    with table.open(newline="") as file:
        paths = [row["image"] for row in csv.DictReader(file)]
    return len(swapped & set(paths[: round(first * len(paths))])) / len(swapped)


def main() -> int:
    own = sys.argv[1:]
    own, options = (own[: own.index("--")], own[own.index("--") + 1 :]) if "--" in own else (own, [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cub", type=Path, nargs="?", help="CUB_200_2011; without it nothing is measured")
    parser.add_argument("--species", type=int, default=200)
    parser.add_argument("--share", type=float, default=0.02, help="of the training images that get another label")
    parser.add_argument("--first", type=float, default=0.03, help="of the table that is looked at")
    parser.add_argument("--seeds", default="1,2", help="of the swaps, one run each")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args(own)
    if args.cub is None:
        print("wrong labels: name CUB_200_2011 to measure how many are found")
        return 0
    cub, met = find_cub(args.cub), True
    if cub is None:
        parser.error(f"{args.cub} is not CUB_200_2011")
    for seed in args.seeds.split(","):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            swapped = swap_labels(cub, folder / "data", args.species, args.share, int(seed))
            run = str(folder / "run")
            done = likethat(["train", str(folder / "data"), "--out", run, "--device", args.device, *options])
            done = done or likethat(["data", "audit", run, "--device", args.device, "--out", str(folder / "audit")])
            if done:
                return done
            found = share_found(folder / "audit" / "audit.csv", swapped, args.first)
        met &= FOUND.met_by(found)
        shown = f"{found:.1%} of {len(swapped)} swapped labels among the first {args.first:.0%}"
        print(f"seed {seed}: {shown}  {FOUND.next_to(found)}")
    print(verdict(met))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
