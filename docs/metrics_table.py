"""Prints the table of docs/metrics.md: python docs/metrics_table.py NAME=RUN... of runs that were measured with
`likethat evaluate RUN --interpretability`."""

from __future__ import annotations

import sys
from pathlib import Path

from likethat.metrics.figure import HIGHER, LOWER, Figure
from likethat.runs.atomic_files import read_json


def main(arguments: list[str]) -> None:
    columns = {}
    for argument in arguments:
        name, _, run = argument.rpartition("=")
        document = read_json(Path(run) / "interpretability.json")
        figures = {entry["name"]: Figure(**entry) for entry in document["figures"]}
        columns[name or run] = (document, figures)
    print(f"| | {' | '.join(columns)} |")
    print(f"|---|{'---|' * len(columns)}")
    accuracy = (f"{document['evaluation']['accuracy']:.1%}" for document, _ in columns.values())
    print(f"| test accuracy | {' | '.join(accuracy)} |")
    seconds = (f"{document['seconds']:.0f} s" for document, _ in columns.values())
    names = dict.fromkeys(name for _, figures in columns.values() for name in figures)
    group = ""
    for name in names:
        found = [figures.get(name) for _, figures in columns.values()]
        known = next(figure for figure in found if figure is not None)
        if known.group != group:
            group = known.group
            print(f"| *{group}* | {' | '.join('' for _ in found)} |")
        arrow = {HIGHER: " ↑", LOWER: " ↓"}.get(known.better, "")
        print(f"| {name}{arrow} | {' | '.join(_cell(figure) for figure in found)} |")
    print(f"| time to measure | {' | '.join(seconds)} |")


def _cell(figure: Figure | None) -> str:
    if figure is None or figure.value is None:
        return "–"
    value, interval = figure.shown()
    return f"{value} ({interval})" if interval else value


if __name__ == "__main__":
    main(sys.argv[1:])
