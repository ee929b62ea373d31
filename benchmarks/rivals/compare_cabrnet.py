"""The paper's training step and projection, ours and those of the `cabrnet` package, side by side on the CPU.

    python -m venv RIVAL && RIVAL/bin/pip install cabrnet
    python benchmarks/rivals/compare_cabrnet.py --python RIVAL/bin/python [--classes 20] [--images 64] [--rounds 5]

Both: ResNet-34 from random weights, the paper's add-on layers and costs, 10 prototypes a class, the same number of
threads, pictures in memory as they are (no augmentation), Adam. They take turns; the figures are medians. Exit code 1
where ours is slower.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from likethat.bench.measure import Goal, verdict
from likethat.bench.setting import Setting
from likethat.inference.passes import EVAL_BATCH
from likethat.training.losses import protopnet_costs
from likethat.training.plan import set_mode
from likethat.training.project import project
from likethat.training.state import RunState

BACKBONE = "resnet34"
CPU = torch.device("cpu")
GOAL = Goal(1.0)


def our_side(setting: Setting) -> dict[str, Callable[[], object]]:
    config, images = setting.config("paper", BACKBONE), setting.pictures(setting.images)
    model, _ = setting.networks(config)
    x_B3HW, label_B = images.batch(torch.arange(setting.batch))
    label_B1, share_B1 = label_B[:, None], torch.ones(setting.batch, 1)
    optimizer = RunState(model).optimizer_for("joint", config.train)

    def step() -> None:
        set_mode(model, "joint", setting.images, config.train)
        loss = protopnet_costs(model(x_B3HW), label_B1, share_B1, model.own_KP, config.train)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return {"step": step, "project": lambda: project(model, images, setting.names)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="interpreter of the environment that has cabrnet")
    parser.add_argument("--classes", type=int, default=20)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    setting = Setting(
        CPU, (BACKBONE,), input_size=224, classes=args.classes, per_class=10, batch=args.batch, forward_batch=0,
        images=args.images, scored=0, steps=1, rounds=args.rounds,
    )  # fmt: skip
    ours = our_side(setting)
    size = {
        "backbone": BACKBONE,
        "latent_width": setting.config("paper", BACKBONE).model.latent_width,
        "threads": torch.get_num_threads(),
        "pass_batch": EVAL_BATCH,
        **{name: getattr(setting, name) for name in ("input_size", "classes", "per_class", "batch", "images")},
    }
    command = [args.python, __file__.replace("compare_cabrnet", "cabrnet_side"), json.dumps(size)]
    met = True
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as rival:
        assert rival.stdin is not None
        assert rival.stdout is not None
        if rival.stdout.readline().strip() != "ready":
            sys.exit("cabrnet did not start; install it into the environment of --python")
        print(f"{BACKBONE} at 224, {setting.prototypes} prototypes, {size['threads']} threads; seconds")
        print(f"{'':38}{'likethat':>9}{'cabrnet':>9}{'ratio':>7}  goal")
        for name, what in (
            ("step", f"training step of {args.batch}"),
            ("project", f"projection, {args.images} images"),
        ):
            pairs = []
            for _ in range(args.rounds + 1):
                started = time.perf_counter()
                ours[name]()
                took = time.perf_counter() - started
                rival.stdin.write(f"{name}\n")
                rival.stdin.flush()
                pairs.append((took, float(rival.stdout.readline())))
            mine, theirs = (statistics.median(column) for column in zip(*pairs[1:], strict=True))
            ratio = statistics.median(one / two for one, two in pairs[1:])
            met &= GOAL.met_by(ratio)
            print(f"{what:38}{mine:9.3f}{theirs:9.3f}{ratio:7.2f}  {GOAL.next_to(ratio)}")
        rival.stdin.close()
    print(verdict(met))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
