"""What `likethat predict --out` costs next to the bare network: many small pictures, read by the same decoder.

    python benchmarks/bench_predict.py [--pictures 100000] [--side 64] [--input-size 224] [--device auto] [--rounds 3]

Throughput is a share of that of the backbone with a linear layer on its mean feature, which writes nothing. Memory is
what the process grows by at the full number, as a share of what it grows by at a tenth of it; processes that read have
one picture each. Exit code 1 where a share misses its goal. Each round takes all pictures twice, after a tenth of them
to warm up.
"""

import argparse
import statistics
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from likethat.bench.measure import Goal, timed, verdict, with_peak
from likethat.cli.parser import main as likethat
from likethat.data.loaders import to_unit
from likethat.data.synthetic.field_guide import make_birds
from likethat.progress import Display
from likethat.runs.classifier import Classifier, load
from likethat.runtime import send, usable_processors
from likethat.workflows.predict.reading import NamedPicture, read_batches
from likethat.workflows.predict.run import BATCH, predict_to_file

THROUGHPUT = Goal(0.9, at_least=True)
MEMORY = Goal(1.5)
IN_A_FOLDER = 1000


def make_pictures(folder: Path, count: int, side: int) -> None:
    """Write pictures of noise that grows from a few pixels, so that their files are of a usual size."""
    with ProcessPoolExecutor(usable_processors()) as pool:
        list(pool.map(partial(make_some, folder, count, side), range(-(-count // IN_A_FOLDER))))


def make_some(folder: Path, count: int, side: int, thousand: int) -> None:
    """Write the pictures of one folder."""
    noise, place = np.random.default_rng(thousand), folder / f"{thousand:04}"
    place.mkdir(parents=True)
    for number in range(IN_A_FOLDER * thousand, min(count, IN_A_FOLDER * (thousand + 1))):
        small = Image.fromarray(noise.integers(0, 256, (8, 8, 3), np.uint8))
        small.resize((side, side), Image.Resampling.BICUBIC).save(place / f"{number:07}.jpg")


@torch.no_grad()
def bare(classifier: Classifier, folder: Path, head: torch.nn.Linear) -> int:
    """Classify all pictures by the network without prototypes; return how many of the first class there are. Nothing
    waits for the device before the end."""
    pictures = [NamedPicture(str(path)) for path in sorted(folder.rglob("*.jpg"))]
    (network,), first = classifier.networks, torch.zeros((), dtype=torch.long, device=classifier.device)
    for batch in read_batches(classifier, pictures, range(-(-len(pictures) // BATCH)), BATCH):
        pixel_BHW3 = torch.from_numpy(batch.pixels[0])
        x_B3HW = to_unit(send(pixel_BHW3, classifier.device).permute(0, 3, 1, 2))
        first += (head(network.backbone(x_B3HW).mean((2, 3))).argmax(1) == 0).sum()
    return int(first)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=100_000)
    parser.add_argument("--side", type=int, default=64, help="pixels of a picture's side (default: 64)")
    parser.add_argument("--input-size", type=int, default=224, help="pixels that the network sees (default: 224)")
    parser.add_argument("--backbone", default="tf_efficientnet_lite0")
    parser.add_argument("--weights", default="pretrained")
    parser.add_argument("--species", type=int, default=20, help="classes of the run (default: 20)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_pictures(folder / "many", args.pictures, args.side)  # by processes, so before a device is used
        make_pictures(folder / "few", max(1, args.pictures // 10), args.side)
        make_birds(folder / "birds", species=args.species, train=6, val=3, test=3, size=args.side)
        options = f"--preset quick --backbone {args.backbone} --weights {args.weights} --input-size {args.input_size}"
        options += f" --device {args.device}"
        likethat(["train", str(folder / "birds"), "--out", str(folder / "run"), *options.split()])
        classifier = load(folder / "run", args.device)
        head = torch.nn.Linear(classifier.networks[0].backbone.channels, args.species).to(classifier.device)

        def predict(pictures: str) -> None:
            predict_to_file(
                folder / "run",
                [str(folder / pictures)],
                folder / "answers.csv",
                device=args.device,
                overwrite=True,
                display=Display(quiet=True),
            )

        def timed_with_peak(pictures: str) -> tuple[int | None, float]:
            grown, (seconds, _) = with_peak(
                lambda: timed(lambda: predict(pictures), classifier.device), torch.device("cpu")
            )
            return grown, seconds

        bare(classifier, folder / "few", head)
        predict("few")  # once, so that what is made at the first use counts for neither
        few, _ = timed_with_peak("few")
        rounds = []
        for _ in range(args.rounds):
            many, ours = timed_with_peak("many")
            rounds.append((ours, timed(lambda: bare(classifier, folder / "many", head), classifier.device)[0]))
        size = (folder / "answers.csv").stat().st_size
    share = statistics.median(theirs / mine for mine, theirs in rounds)
    speeds = [args.pictures / statistics.median(seconds) for seconds in zip(*rounds, strict=True)]
    print(f"{args.pictures:,} pictures of {args.side}x{args.side}, {args.backbone} at {args.input_size}")
    print(f"pictures a second: {speeds[0]:,.0f} with answers, {speeds[1]:,.0f} by the bare network")
    print(f"throughput, share of the bare network's: {share:.2f}  {THROUGHPUT.next_to(share)}")
    met = THROUGHPUT.met_by(share)
    print(f"answers.csv: {size / 1e6:.1f} MB")
    if few and many:
        share = many / few
        print(f"memory: {few / 1e6:.0f} MB at a tenth, {many / 1e6:.0f} MB: {share:.2f}  {MEMORY.next_to(share)}")
        met &= MEMORY.met_by(share)
    print(verdict(met))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
