"""Explained pictures as one page that needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from likethat import __version__
from likethat.explaining.attribution import TITLES
from likethat.explaining.boxes import SEEN_ALONE
from likethat.explaining.draw.pictures import MOST_ROWS, Pictures
from likethat.explaining.scoring import ScoredPicture
from likethat.runs.atomic_files import atomic_path
from likethat.runs.looks import nth_time


@cache
def _environment(packages: tuple[str, ...]) -> Environment:
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package) for package in packages]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["signed"] = lambda value, form=".2f": format(value, form).replace("-", "−")
    environment.filters["percent"] = lambda value: f"{100 * value:.1f} %"
    environment.globals.update(most_rows=MOST_ROWS, attributions=TITLES, seen_alone=SEEN_ALONE, version=__version__)
    environment.globals["nth_time"] = nth_time
    return environment


def write_page(path: Path, template: str, packages: Sequence[str] = (), **context: Any) -> Path:
    """Fill a template of one of these packages, or of this one, which has the pieces that all pages share."""
    html = render_page(template, packages, **context)
    with atomic_path(path) as temporary:
        temporary.write_bytes(html)
    return path


def render_page(template: str, packages: Sequence[str] = (), **context: Any) -> bytes:
    html = _environment((*packages, "likethat.explaining.draw")).get_template(template).render(**context)
    # File names that are not valid Unicode have no bytes in a page; they are shown with question marks.
    return html.encode("utf-8", "replace")


def write_explanations(out: Path, explanations: Sequence[ScoredPicture], colours: str = "ember") -> Path:
    """Write one page with every explained picture, all inside the one file."""
    return write_page(out, "explanations.html", explanations=explanations, pictures=Pictures(True, colours))


def render_explanation(explanation: ScoredPicture) -> bytes:
    """Render the page of one explained picture."""
    return render_page("explanations.html", explanations=[explanation], pictures=Pictures(True))
