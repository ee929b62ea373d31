"""The figures of a study's runs, their mean and standard deviation over seeds, and the table as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from likethat.data.dataset import IMAGES_OF
from likethat.runs import layout
from likethat.runs.atomic_files import read_json
from likethat.runs.describe import describe_run
from likethat.runs.layout import is_finished
from likethat.workflows.reproduce.plan import AS_LONG, BASELINE, COMBINED, PRUNED, Study, is_baseline
from likethat.workflows.reproduce.schedule import Times

MISSING = "-"
AS_LONG_EXPLAINED = (
    "A baseline as long as a preset has the stages, views, targets and epochs of its ProtoPNet: compare with it first. "
)
# Columns of the second table: heading, figure.
STAGES = (
    ("test: before projection", "test_before_projection"),
    ("after it", "test_after_projection"),
    ("after last layer", "test"),
    ("pruned", "test_pruned"),
    ("validation: before projection", "validation_before_projection"),
    ("after it", "validation_after_projection"),
    ("after last layer", "validation_after_last_layer"),
)
SIZES = (
    ("prototypes", "prototypes"),
    ("after pruning", "prototypes_pruned"),
    ("connections to other classes", "connections"),
    ("after pruning", "connections_pruned"),
    ("of possible ones", "connections_possible"),
    ("seconds", "seconds"),
)
# Rows of the table of explanations, as `evaluate --interpretability` calls them.
NEEDED = "prototypes for nine tenths of the points"
COUNTS = (NEEDED, "lines for nine tenths of the points")
EXPLANATIONS = (
    "consistency",
    "stability",
    "purity",
    "part coverage",
    "pointing game",
    "activation change under attack (PAC)",
    "similarity lost to a small attack",
    "similarity kept in another picture",
    "gradient energy inside the box",
    "deletion, below random boxes by",
    "insertion, above random boxes by",
    "prediction survives on the boxes alone",
    "prediction survives without the boxes",
    "overlap of evidence boxes (distinctness)",
    "picture covered by evidence boxes",
    *COUNTS,
)


@dataclass(frozen=True)
class StudyRow:
    """One model of the table: its figures by name, each by seed. `backbone` may be the combined ones."""

    full: bool
    backbone: str
    kind: str  # a baseline or a preset
    figures: Mapping[str, Mapping[int, float]]

    def statistics(self, figure: str) -> dict[str, Any] | None:
        """Return mean and sample standard deviation over the seeds that are there; no deviation of a single one."""
        by_seed = self.figures.get(figure)
        if not by_seed:
            return None
        values = list(by_seed.values())
        deviation = statistics.stdev(values) if len(values) > 1 else None
        by_name = {str(seed): value for seed, value in by_seed.items()}
        return {"mean": statistics.fmean(values), "sd": deviation, "by_seed": by_name}


def gather(study: Study, times: Times) -> list[StudyRow]:
    """Return a row for every model, with what its finished runs say."""
    rows = []
    for full in study.views:
        members = [(backbone, kind) for backbone in study.backbones for kind in study.kinds]
        if len(study.backbones) > 1:
            members += [(COMBINED, preset) for preset in study.presets]
        for backbone, kind in members:
            figures: dict[str, dict[int, float]] = {}
            for seed in study.seeds:
                name = study.folder(full, seed, backbone, kind)
                for figure, value in figures_of(study, name, times).items():
                    figures.setdefault(figure, {})[seed] = value
            rows.append(StudyRow(full, backbone, kind, figures))
    return rows


def figures_of(study: Study, name: str, times: Times) -> dict[str, float]:
    """Return the figures of a run and its pruned copy; none while the run is not finished."""
    out = study.out
    if not is_finished(out / name):
        return {}
    told = describe_run(out / name)
    figures = {"test": told["test"]["accuracy"]}
    if name in times.runs:
        figures["seconds"] = times.runs[name]
    if layout.read_record(out / name).kind == layout.BASELINE:
        figures["validation"] = layout.read_metrics(out / name)[-2]["val"]["accuracy"]
        return figures
    figures["prototypes"] = told["prototypes"]
    for when, value in told.get("test_projection", {}).items():
        figures[f"test_{when}_projection"] = value
    for when, value in told.get("validation", {}).items():
        figures[f"validation_{when}"] = value
    if "connections_to_other_classes" in told:
        figures["connections"] = told["connections_to_other_classes"]
        figures["connections_possible"] = told["prototypes"] * (len(told["classes"]) - 1)
    if is_finished(out / f"{name}{PRUNED}"):
        pruned = describe_run(out / f"{name}{PRUNED}")
        figures |= {"test_pruned": pruned["test"]["accuracy"], "prototypes_pruned": pruned["prototypes"]}
        figures["connections_pruned"] = pruned["connections_to_other_classes"]
    return figures | _explanations_of(study, name)


def _explanations_of(study: Study, name: str) -> dict[str, float]:
    """Return what was measured of a run's explanations; a figure that the data does not give is left out."""
    measured = study.out / name / layout.INTERPRETABILITY.get(study.interpretability, "")
    if not measured.is_file():
        return {}
    value_of = {figure["name"]: figure["value"] for figure in read_json(measured)["figures"]}
    return {figure: value_of[figure] for figure in EXPLANATIONS if value_of.get(figure) is not None}


def to_document(study: Study, rows: Sequence[StudyRow], failures: Mapping[str, str], times: Times) -> dict[str, Any]:
    """Return the table as data."""
    return {
        "data": str(Path(study.data).resolve()),
        "seeds": list(study.seeds),
        "backbones": dict(zip(study.backbones, study.weights or [None] * len(study.backbones), strict=True)),
        "presets": list(study.presets),
        "options": dict(study.options),
        "complete": is_complete(study, rows),
        "rows": [
            {
                "images": "cropped" if study.has_boxes and not row.full else "full",
                "backbone": row.backbone,
                "model": row.kind,
                **{figure: row.statistics(figure) for figure in row.figures},
            }
            for row in rows
        ],
        "failures": dict(failures),
        "seconds": {"study": times.study, **times.runs},
    }


def is_complete(study: Study, rows: Sequence[StudyRow]) -> bool:
    own = ("test", "test_pruned", NEEDED) if study.interpretability else ("test", "test_pruned")
    return all(
        len(row.figures.get(figure, {})) == len(study.seeds)
        for row in rows
        for figure in (own if _is_protopnet(row) else ("test",))
    )


def _is_protopnet(row: StudyRow) -> bool:
    """Return whether the row is of single ProtoPNets."""
    return not is_baseline(row.kind) and row.backbone != COMBINED


def to_markdown(study: Study, rows: Sequence[StudyRow], failures: Mapping[str, str], times: Times) -> str:
    """Return tables for each kind of pictures: accuracies side by side, how good explanations are where that was
    measured, then what happened on the way to them."""
    seeds = ", ".join(map(str, study.seeds))
    complete = is_complete(study, rows)
    spread = f"mean ± sample standard deviation over seeds {seeds}" if len(study.seeds) > 1 else f"seed {seeds}"
    parts = [
        f"# Baselines and ProtoPNets on {Path(study.data).resolve().name}\n",
        f"Top-1 accuracy in %, {spread}. Everything was chosen on validation images; test images were "
        "looked at once all choices were made. "
        "Seconds are those of the run alone: a preset that begins with a baseline takes the finished one. "
        f"{AS_LONG_EXPLAINED * study.as_long}"
        f"Wall time of the study{'' if complete else ' so far'}: {clock_time(times.study)}.\n",
    ]
    if not complete:
        parts.append("**Not complete yet**: (n) after a figure is the number of seeds in it.\n")
    for full in study.views:
        if len(study.views) > 1:
            parts.append(f"## {'Full' if full else 'Cropped'} images\n")
        here = [row for row in rows if row.full == full]
        parts.append(_accuracies(study, here))
        if study.interpretability:
            parts.append(_explanations(study, here))
        parts += [_stages(study, here, STAGES), _stages(study, here, SIZES)]
    if failures:
        parts.append(
            "Runs that failed:\n\n" + "\n".join(f"- `{name}`: {text}" for name, text in failures.items()) + "\n"
        )
    return "\n".join(parts)


def _accuracies(study: Study, rows: Sequence[StudyRow]) -> str:
    """Return a table as in the paper: a column for each backbone, test accuracy of the finished model."""
    columns = list(dict.fromkeys(row.backbone for row in rows))
    by_place = {(row.backbone, row.kind): row for row in rows}
    lines = [("test accuracy", *columns)]
    for kind in study.kinds:
        models = [by_place.get((column, kind)) for column in columns]
        lines.append((title_of(kind), *(cell(row, "test", study) if row else "" for row in models)))
    return _markdown(lines)


def _explanations(study: Study, rows: Sequence[StudyRow]) -> str:
    """Return a table with a column for each ProtoPNet, without the figures that the data does not give."""
    shown = [row for row in rows if _is_protopnet(row)]
    images = IMAGES_OF[study.interpretability]
    lines = [(f"explanations, {images}", *(f"{row.backbone}, {title_of(row.kind)}" for row in shown))]
    for figure in EXPLANATIONS:
        if any(figure in row.figures for row in shown):
            lines.append((figure, *(cell(row, figure, study) for row in shown)))
    return _markdown(lines)


def _stages(study: Study, rows: Sequence[StudyRow], columns: Sequence[tuple[str, str]]) -> str:
    shown = [row for row in rows if columns is SIZES or _is_protopnet(row)]
    lines = [("", *(heading for heading, _ in columns))]
    for row in shown:
        title = f"{row.backbone}, {title_of(row.kind)}"
        lines.append((title, *(cell(row, figure, study) for _, figure in columns)))
    return _markdown(lines)


def title_of(kind: str) -> str:
    """Return the name of a kind of model for people."""
    if kind.startswith(AS_LONG):
        return f"baseline, as long as {kind.removeprefix(AS_LONG)}"
    return BASELINE if kind == BASELINE else f"ProtoPNet, {kind}"


def cell(row: StudyRow, figure: str, study: Study) -> str:
    summary = row.statistics(figure)
    if summary is None:
        return MISSING
    mean, deviation, percent = summary["mean"], summary["sd"], _is_share(figure)
    if not percent and not deviation and mean.is_integer():  # a count that is the same with every seed
        text = f"{mean:.0f}"
    else:
        shown = [mean] if deviation is None else [mean, deviation]
        text = " ± ".join(f"{100 * value if percent else value:.1f}" for value in shown)
    seen = len(summary["by_seed"])
    return text if seen == len(study.seeds) else f"{text} ({seen})"


def _is_share(figure: str) -> bool:
    return figure.startswith(("test", "validation")) or (figure in EXPLANATIONS and figure not in COUNTS)


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    ruled = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in ruled) + "\n"


def clock_time(seconds: float) -> str:
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {left} s"
