"""What memory training takes on a CPU: the preset `default` on 138 pictures of 224 x 224 in batches of 80, one epoch of
each stage, in a process of its own; and the same with BatchNorm that learns its statistics, as from 1,000 pictures on.

    python benchmarks/bench_training_memory.py [--input-size 224] [--batch-size 80]

Peaks are those of the whole run, from reading the pictures to the report, above what the process takes before any work:
Python with torch and everything else imported. Exit code 1 where the first is above its goal.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from likethat.bench.measure import Goal, verdict

GOAL = Goal(3.0, unit=" GB")
SPECIES, TRAIN, VAL, TEST = 6, 23, 3, 6
CASES = {
    "138 pictures, preset default": [],
    "the same, BatchNorm learns its statistics": ["--batch-norm-images", "1"],
}
IDLE = "import likethat.workflows.train, likethat.training.loop, likethat.report.measured"


def peak_of(command: list[str]) -> float:
    """Return the largest resident memory, in GB, of a process while it lives."""
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(said)
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input-size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=80)
    args = parser.parse_args()
    options = ["--device", "cpu", "--input-size", str(args.input_size), "--batch-size", str(args.batch_size)]
    options += "--baseline-epochs 1 --joint-epochs 1".split()
    idle = peak_of(["-c", IDLE])
    print(f"{'Python and all imports':44}{idle:8.2f} GB")
    peaks = []
    with tempfile.TemporaryDirectory() as folder:
        birds = Path(folder) / "birds"
        counts = f"species={SPECIES}, train={TRAIN}, val={VAL}, test={TEST}, size={args.input_size}, seed=0"
        made = "from pathlib import Path; from likethat.data.synthetic.field_guide import make_birds; "
        subprocess.run([sys.executable, "-c", f"{made}make_birds(Path({str(birds)!r}), {counts})"], check=True)
        for number, (case, more) in enumerate(CASES.items()):
            out = str(Path(folder) / f"run{number}")
            peaks.append(peak_of(["-m", "likethat", "train", str(birds), "--out", out, *options, *more]) - idle)
            goal = GOAL.next_to(peaks[0]) if number == 0 else ""
            print(f"{case:44}{peaks[-1]:8.2f} GB above  {goal}".rstrip(), flush=True)
    print(verdict(GOAL.met_by(peaks[0])))
    return 0 if GOAL.met_by(peaks[0]) else 1


if __name__ == "__main__":
    sys.exit(main())
