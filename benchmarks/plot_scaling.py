"""What prototypes cost as they, the classes or the images become many: ratios to the bare network, as one picture.

    python benchmarks/plot_scaling.py OUT.svg [--device auto] [--backbone resnet34] [--batch 4] [--most 20000]

Three fields: against prototypes (10 a class), against classes (2,000 prototypes among them), against images (200
prototypes). A ratio of 1 is the bare classifier's step, forward pass, or pass over the same images.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from likethat.bench.inference import inference_figures, pass_figures
from likethat.bench.setting import Setting
from likethat.bench.training import paper_figures
from likethat.report import charts
from likethat.report.charts import draw_text
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


def field(number: int, title: str, lines: Lines) -> list[str]:
    """Draw one field: a logarithmic axis of numbers, ratios upwards from 0."""
    left, floor = number * WIDTH + LEFT, HEIGHT - BOTTOM
    counts = sorted({count for line in lines.values() for count, _ in line})
    ticks = charts.round_ticks(0.0, max(1.2, *(ratio for line in lines.values() for _, ratio in line)))
    x = charts.Axis(counts[0], max(counts[-1], counts[0] + 1), left, (number + 1) * WIDTH - 14, logarithmic=True)
    y = charts.Axis(0.0, ticks[-1], floor, TOP)
    parts = [draw_text(left, TOP - 26, title, charts.INK, "start", is_bold=True)]
    parts += charts.draw_grid(x, y, ticks, [f"{tick:g}" for tick in ticks])
    parts.append(charts.draw_line((x.start, x.end), (y(1), y(1)), charts.SOFT))
    parts += [draw_text(x(count), floor + 16, f"{count:,}") for count in counts]
    for place, (name, line) in enumerate(lines.items()):
        points = [(x(count), y(ratio)) for count, ratio in line]
        parts.append(charts.draw_curve(points, COLOURS[name], 2))
        parts += [charts.draw_point(*point, COLOURS[name], 3) for point in points]
        parts.append(draw_text(left + 110 * place, TOP - 10, name, COLOURS[name], "start"))
    return parts


def draw(fields: dict[str, Lines]) -> str:
    parts = ['<rect width="100%" height="100%" fill="#fff"/>']
    for number, (title, lines) in enumerate(fields.items()):
        parts += field(number, title, lines)
    label = "Cost against numbers of prototypes, classes and images, next to the bare network"
    return charts.draw_svg(WIDTH * len(fields), HEIGHT, label, parts, font_size=11)


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
