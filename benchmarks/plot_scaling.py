"""What prototypes cost as they, the classes or the images become many: ratios to the bare network, as one picture.

    python benchmarks/plot_scaling.py OUT.svg [--device auto] [--backbone resnet34] [--batch 4] [--most 20000]

Three fields: against prototypes (10 a class), against classes (2,000 prototypes among them), against images (200
prototypes). A ratio of 1 is the bare classifier's step, forward pass, or pass over the same images.
"""

import argparse
import math
from dataclasses import replace
from pathlib import Path

from likethat.bench.inference import inference_figures
from likethat.bench.passes import pass_figures
from likethat.bench.setting import Setting
from likethat.bench.training import paper_figures
from likethat.report.curves import nice_ticks
from likethat.runs.atomic_files import write_text
from likethat.runtime import exact_arithmetic, resolve_device

PROTOTYPES, CLASSES, IMAGES = (200, 600, 2000, 6000, 20_000), (10, 50, 200, 1000, 2000), (64, 128, 256, 512)
COLOURS = {"training step": "#1b6ca8", "inference": "#c0561f", "projection": "#2e7d4f", "nearest patches": "#7b4fa3"}
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 300, 240, 40, 44, 44

Lines = dict[str, list[tuple[int, float]]]  # name -> (number, ratio)


def cost_of_network(setting: Setting, backbone: str) -> dict[str, float]:
    step = paper_figures(backbone, setting, print)[0]
    forward = inference_figures(backbone, setting)[0]
    return {"training step": step.ours / (step.other or 1), "inference": forward.ours / (forward.other or 1)}


def cost_of_passes(setting: Setting, backbone: str) -> dict[str, float]:
    projection, nearest = pass_figures(backbone, setting)[0][:2]
    return {"projection": projection.value, "nearest patches": nearest.value}


def field(number: int, title: str, lines: Lines) -> str:
    """One field: a logarithmic axis of numbers, ratios upwards from 0."""
    left = number * WIDTH
    right, bottom = left + WIDTH - 14, HEIGHT - BOTTOM
    counts = sorted({count for line in lines.values() for count, _ in line})
    top = max(1.2, *(ratio for line in lines.values() for _, ratio in line))
    ticks = nice_ticks(0.0, top)

    def x(count: float) -> float:
        share = math.log(count / counts[0]) / (math.log(counts[-1] / counts[0]) or 1)
        return round(left + LEFT + share * (right - left - LEFT), 1)

    def y(ratio: float) -> float:
        return round(bottom - ratio / ticks[-1] * (bottom - TOP), 1)

    parts = [f'<text x="{left + LEFT}" y="{TOP - 26}" class="t">{title}</text>']
    for tick in ticks:
        parts.append(f'<path d="M{left + LEFT} {y(tick)}H{right}" class="{"one" if tick == 1 else "grid"}"/>')
        parts.append(f'<text x="{left + LEFT - 5}" y="{y(tick) + 4}" text-anchor="end">{tick:g}</text>')
    parts += [f'<text x="{x(count)}" y="{bottom + 16}" text-anchor="middle">{count:,}</text>' for count in counts]
    for place, (name, line) in enumerate(lines.items()):
        points = " ".join(f"{x(count)},{y(ratio)}" for count, ratio in line)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="2"/>')
        parts += [f'<circle cx="{x(count)}" cy="{y(ratio)}" r="3" fill="{COLOURS[name]}"/>' for count, ratio in line]
        parts.append(f'<text x="{left + LEFT + 110 * place}" y="{TOP - 10}" style="fill:{COLOURS[name]}">{name}</text>')
    return "".join(parts)


def draw(fields: dict[str, Lines]) -> str:
    style = "text{font:11px sans-serif;fill:#444}.t{font-weight:bold}.grid{stroke:#ddd}.one{stroke:#888}"
    drawn = "".join(field(number, title, lines) for number, (title, lines) in enumerate(fields.items()))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH * len(fields)} {HEIGHT}" role="img" '
        f'aria-label="Cost against numbers of prototypes, classes and images, next to the bare network">'
        f'<style>{style}</style><rect width="100%" height="100%" fill="#fff"/>{drawn}</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--backbone", default="resnet34")
    parser.add_argument("--input-size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--most", type=int, default=20_000, help="leave out larger numbers than this")
    args = parser.parse_args()
    exact_arithmetic()
    base = Setting(
        resolve_device(args.device), (args.backbone,), input_size=args.input_size, classes=20, per_class=10,
        batch=args.batch, forward_batch=args.batch, images=0, scored=0, steps=1, rounds=3,
    )  # fmt: skip
    fields: dict[str, Lines] = {
        "prototypes": {"training step": [], "inference": []},
        "classes": {"training step": [], "inference": []},
        "images": {"projection": [], "nearest patches": []},
    }
    cases = [("prototypes", count, replace(base, classes=count // 10)) for count in PROTOTYPES]
    cases += [("classes", count, replace(base, classes=count, per_class=2000 // count)) for count in CLASSES]
    cases += [("images", count, replace(base, images=count)) for count in IMAGES]
    for name, count, setting in cases:
        if count > args.most:
            continue
        costs = (cost_of_passes if name == "images" else cost_of_network)(setting, args.backbone)
        print(f"{count:>7,} {name:11}" + ", ".join(f"{what} {ratio:.2f}" for what, ratio in costs.items()), flush=True)
        for what, ratio in costs.items():
            fields[name][what].append((count, ratio))
    write_text(args.out, draw(fields))


if __name__ == "__main__":
    main()
