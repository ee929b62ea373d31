"""Small pieces of HTML with which classifiers, predictions and explanations show themselves in notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

MOST_CLASSES = 5  # whose probabilities are shown
# A notebook's own colours stay, light or dark: nothing is set but an accent.
BAR = '<div style="width: {width:.0f}px; height: 8px; border-radius: 4px; background: #0f766e"></div>'
BAR_WIDTH = 160  # pixels of a probability of 1


def shown(text: str) -> str:
    """Return a text as HTML; characters that are not valid Unicode become question marks."""
    return escape(text.encode("utf-8", "replace").decode())


def card(heading: str, *pieces: str) -> str:
    """Return HTML with a heading, which is text, and pieces below it, which are HTML."""
    return f"<div><strong>{shown(heading)}</strong>{''.join(pieces)}</div>"


def note(text: str) -> str:
    return f"<div>{shown(text)}</div>" if text else ""


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table of cells that are HTML."""
    lines = ("".join(f'<td style="text-align: left">{cell}</td>' for cell in row) for row in rows)
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def ranking(probabilities: Mapping[str, float]) -> str:
    """Return the likeliest classes with their probabilities as bars."""
    likeliest = sorted(probabilities.items(), key=lambda item: -item[1])[:MOST_CLASSES]
    return table([(shown(name), BAR.format(width=BAR_WIDTH * share), f"{share:.1%}") for name, share in likeliest])
