"""The figures as a table for the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from likethat.bench.measure import verdict
from likethat.bench.run import BenchResult

WIDTH = 120  # where nothing says how wide lines may be


def print_bench(result: BenchResult) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    console.print("; ".join(f"{name.replace('_', ' ')} {value}" for name, value in result.machine().items()))
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for name in ("ours", "other", "ratio", "goal"):
        table.add_column(name, justify="right")
    case = ""
    for figure in result.figures:
        if figure.case != case:
            case = figure.case
            table.add_row(case, style="bold")
        text = f"  {figure.what}" + (f" / {figure.against}" if figure.against else "")
        ours, other = (
            "" if value is None else f"{short(value)} {figure.unit}" for value in (figure.ours, figure.other)
        )
        ratio = "" if figure.other is None else short(figure.value)
        goal = "" if figure.goal is None else figure.goal.next_to(figure.value)
        table.add_row(text, ours, other, ratio, goal, style=None if figure.met else "red")
    console.print(table)
    console.print(verdict(result.met))


def short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
