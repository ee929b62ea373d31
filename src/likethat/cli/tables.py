"""Short answers for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from likethat.data.dataset import IMAGES_OF
from likethat.explaining.verify import NOT_PROVEN, Verification
from likethat.metrics.accuracy import Evaluation
from likethat.metrics.figure import HIGHER, LOWER, MetricFigure
from likethat.metrics.unbalanced import BalancedFigures
from likethat.runs import layout
from likethat.runs.baseline import LoadedBaseline
from likethat.runs.calibration import Calibration, conformal_threshold
from likethat.runs.classifier import Classifier, Prediction
from likethat.runs.describe import describe_run
from likethat.runs.looks import nth_time
from likethat.workflows.edit.history import Edit

SHOWN = 10  # rows of a long list


def print_table(title: str, rows: list[tuple[str, str]]) -> None:
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))  # names of classes and prototypes are no markup
    Console(highlight=False).print(table)


def print_description(description: dict[str, Any]) -> None:
    images = ", ".join(f"{count} {part}" for part, count in description["images"].items())
    is_baseline = "prototypes" not in description
    as_long = ", trained as long as a ProtoPNet" if description.get("as_long") else ""
    rows = [
        ("model", f"{'baseline ' * is_baseline}{description['backbone']}, preset {description['preset']}{as_long}"),
        ("data", f"{description['data']} ({description['kind']})"),
        ("classes", f"{len(description['classes'])}"),
        ("images", images),
    ]
    if description["began_with"]:
        rows.append(("began with", description["began_with"]))
    if not is_baseline:
        sources = description.get("source_images", "no")
        rows.append(("prototypes", f"{description['prototypes']} from {sources} training images"))
    rows.append(("training", f"{description['seconds']:.0f} s"))
    if "edited_from" in description:
        rows.append(("edited from", description["edited_from"]))
    for name, value in description.get("validation", {}).items():
        rows.append((f"validation {name.replace('_', ' ')}", f"{value:.1%}"))
    if "connections_to_other_classes" in description:
        rows.append(("connections to other classes", f"{description['connections_to_other_classes']}"))
    if "test" in description:
        test = description["test"]
        rows.append(("test accuracy", f"{test['accuracy']:.1%} of {test['images']} images"))
    if "calibrated_on" in description:
        rows.append(("calibrated on", f"{description['calibrated_on']} images"))
    for when, value in description.get("test_projection", {}).items():
        rows.append((f"test {when} projection", f"{value:.1%}"))
    if not description["finished"]:
        command = "baseline" if is_baseline else "train"
        rows.append(("state", f"unfinished; resume it with `likethat {command} ... --resume`"))
    print_table(f"Run {description['run']}", rows)


def print_summary(classifier: Classifier | LoadedBaseline) -> None:
    print_description(describe_run(classifier.path))
    print(f"Report: {(classifier.path / layout.REPORT).resolve()}")


def print_evaluation(evaluation: Evaluation) -> None:
    """Print each figure and what it says."""
    right = round(evaluation.accuracy * evaluation.images)
    rows = [("accuracy", f"{evaluation.accuracy:.2%}: {right} of {evaluation.images} are right")]
    if evaluation.classes >= layout.TOP5_CLASSES:
        rows.append(("top-5 accuracy", f"{evaluation.top5_accuracy:.2%} have the true class among the likeliest five"))
    said = f"lower is better; the true class gets {math.exp(-evaluation.cross_entropy):.1%} in the geometric mean"
    rows.append(("cross entropy", f"{evaluation.cross_entropy:.4f}: {said}"))
    if evaluation.balanced:
        rows += _balanced(evaluation.balanced)
    worst = sorted(evaluation.by_class.items(), key=lambda item: item[1])[:3]
    rows += [(f"class {name}", f"{value:.1%} are right") for name, value in worst if value < 1]
    rows += [
        (f"{true} taken for {guess}", "once" if count == 1 else f"{count} times")
        for true, guess, count in evaluation.confusions[:3]
    ]
    print_table(f"{evaluation.images} {IMAGES_OF.get(evaluation.part, 'images (all)')}", rows)


def _balanced(figures: BalancedFigures) -> list[tuple[str, str]]:
    """Return the rows of figures that count every class alike, with their intervals."""
    rows = [("balanced accuracy", f"{figures.balanced_accuracy}"), ("macro F1", f"{figures.macro_f1}")]
    if (one := figures.positive) is not None:
        told = (("sensitivity", one.sensitivity), ("specificity", one.specificity), ("AUROC", one.auroc))
        rows += [(f"{name} for {one.name}", str(value)) for name, value in (*told, ("AUPRC", one.auprc)) if value]
    elif figures.macro_auroc is not None and figures.macro_auprc is not None:
        both = f"{figures.macro_auroc:.1%}, {figures.macro_auprc:.1%} on average over the classes"
        rows.append(("AUROC, AUPRC", both))
    return rows


def print_figures(figures: Sequence[MetricFigure]) -> None:
    """Print a table for each group of figures: value, interval, what is better, and what it was measured on."""
    for group in dict.fromkeys(figure.group for figure in figures):
        table = Table(title=group, title_justify="left")
        for heading in ("", "value", "95 % interval", "better"):
            table.add_column(heading, justify="right" if heading in ("value", "95 % interval") else "left")
        table.add_column("measured on", style="dim", overflow="fold")
        for figure in figures:
            if figure.group == group:
                better = {HIGHER: "↑", LOWER: "↓"}.get(figure.better, "")
                table.add_row(figure.name, *figure.shown(), better, figure.note)
        Console(highlight=False).print(table)


def print_verification(verification: Verification) -> None:
    for failure in verification.failures[:SHOWN]:
        print(f"prototype {failure.prototype} ({failure.path}): {failure.reason}")
    if len(verification.failures) > SHOWN:
        print(f"... and {len(verification.failures) - SHOWN} more")
    for finding in verification.findings:
        print(f"{finding.what}: {'NOT proven' if finding.result == NOT_PROVEN else finding.result}: {finding.why}")
    verdict = "every prototype is the training patch it names"
    if verification.failures:
        verdict = f"{len({failure.prototype for failure in verification.failures})} prototypes are NOT proven"
    elif not verification.passed:
        verdict = "their patches are proven, the run is NOT" if verification.prototypes else "nothing is proven"
    print(
        f"{verification.prototypes} prototypes from {verification.images} images, "
        f"largest absolute error {verification.max_error:.1e}: {verdict}"
    )


def print_predictions(predictions: Sequence[tuple[str, Prediction]]) -> None:
    for path, prediction in predictions:
        print(f"{path}: {prediction.class_name} ({prediction.probability:.1%})")
        if prediction.verdict:
            print(f"  {prediction.verdict.sentence()}")


def print_calibration(calibration: Calibration) -> None:
    rows = []
    for level in (0.8, 0.9, 0.95, 0.99):
        threshold = conformal_threshold(calibration.nonconformity, level)
        least = f"classes with a probability of {1 - threshold:.1%} or more"
        rows.append((f"prediction set at {level:.0%}", "too few images" if threshold == math.inf else least))
    print_table(f"Calibrated on {len(calibration.nonconformity)} images", rows)


def print_pruning(pruned: dict[str, Any], out: Path) -> None:
    removed = {name: count for name, count in pruned["removed"].items() if count}
    rows = [(f"removed from {name}", f"{count}") for name, count in removed.items()]
    rows += [
        ("prototypes", f"{pruned['prototypes']} left, {sum(removed.values())} removed"),
        ("connections", f"{pruned['connections']} are not zero"),
        ("validation accuracy", f"{pruned['before']['accuracy']:.1%} before, {pruned['after']['accuracy']:.1%} after"),
        _judged(pruned["test"]),
    ]
    print_table(f"Run {out}", rows)
    print(f"Report: {(out / layout.REPORT).resolve()}")


def print_edits(edits: list[Edit], saved: dict[str, Any], out: Path) -> None:
    rows = [(str(edit), _change(edit.before, edit.after)) for edit in edits]
    rows += [
        ("all edits", _change(saved["before"], saved["after"])),
        ("prototypes", f"{saved['prototypes']}, {saved['connections']} connections are not zero"),
        _judged(saved["test"]),
    ]
    print_table(f"Run {out}", rows)
    print(f"Report: {(out / layout.REPORT).resolve()}")


def _judged(test: dict[str, Any]) -> tuple[str, str]:
    """Return the row about test images, which says how often they were looked at."""
    return "test accuracy", f"{test['accuracy']:.1%} of {test['images']} images, judged {nth_time(test['looks'])}"


def _change(before: dict[str, float], after: dict[str, float]) -> str:
    return f"validation accuracy {before['accuracy']:.1%} before, {after['accuracy']:.1%} after"


def print_candidates(candidates: list[dict[str, Any]]) -> None:
    """Print candidates, beginning with those that set their class apart best."""
    for candidate in candidates:
        print(
            f"{candidate['candidate']}: {candidate['path']}, row {candidate['row']}, column {candidate['column']}; "
            f"similarity {candidate['own']:.2f} to its class, {candidate['other']:.2f} to {candidate['other_class']}, "
            f"{candidate['similarity']:.2f} to the prototype"
        )
    if not candidates:
        print("The class has no other patch.")


def print_combination(combined: dict[str, Any], out: Path) -> None:
    rows = []
    for member in combined["members"]:
        alone = f"test accuracy {member['accuracy']:.1%}, " if "accuracy" in member else ""
        rows.append((member["run"], f"{alone}{member['prototypes']} prototypes, {member['backbone']}"))
    if "test" in combined:
        rows.append(("together", f"test accuracy {combined['test']['accuracy']:.1%}"))
    print_table(f"Run {out}", rows)
    print(f"Report: {(out / layout.REPORT).resolve()}")
