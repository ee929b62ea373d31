"""Short answers for the terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from likethat import run_dir
from likethat.classifier import Classifier, read_prototypes
from likethat.errors import UserError
from likethat.explaining.verify import Verification
from likethat.metrics.accuracy import Evaluation

SHOWN = 10  # rows of a long list


def _console() -> Console:
    return Console(highlight=False)


def _table(title: str, rows: list[tuple[str, str]]) -> None:
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    _console().print(table)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in (run / run_dir.METRICS).read_text().splitlines()]
    except FileNotFoundError as error:
        raise UserError(f"{run} has no {run_dir.METRICS}; it holds no trained model yet.") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{run / run_dir.METRICS} is damaged ({error}); restore it from a copy.") from error


def describe_run(run: Path) -> dict[str, Any]:
    """Everything `likethat info` tells, as data."""
    record = run_dir.read_record(run)
    metrics = read_metrics(run)
    finished = (run / run_dir.REPORT).is_file()
    steps: dict[str, dict[str, Any]] = {entry["stage"]: entry for entry in metrics}
    description: dict[str, Any] = {
        "run": str(run),
        "finished": finished,
        "preset": record.config.preset,
        "backbone": record.config.model.backbone,
        "data": record.data.root,
        "kind": record.data.kind,
        "classes": list(record.data.classes),
        "images": record.data.counts,
        "prototypes": sum(record.prototypes_of_class),
        "seconds": sum(entry.get("seconds", 0.0) for entry in metrics),
    }
    if "project" in steps:
        description["validation"] = {
            "before_projection": steps["project"]["before"]["accuracy"],
            "after_projection": steps["project"]["after"]["accuracy"],
        }
    if "last_layer" in steps:
        description["validation"]["after_last_layer"] = steps["last_layer"]["val"]["accuracy"]
        description["connections_to_other_classes"] = steps["last_layer"]["nonzero_negative"]
    if "test" in steps:
        description["test"] = {key: steps["test"][key] for key in ("images", "accuracy", "top5_accuracy")}
    if finished:
        description["source_images"] = len({prototype.sha256 for prototype in read_prototypes(run)})
    return description


def print_description(description: dict[str, Any]) -> None:
    images = ", ".join(f"{count} {part}" for part, count in description["images"].items())
    rows = [
        ("model", f"{description['backbone']}, preset {description['preset']}"),
        ("data", f"{description['data']} ({description['kind']})"),
        ("classes", f"{len(description['classes'])}"),
        ("images", images),
        ("prototypes", f"{description['prototypes']} from {description.get('source_images', 'no')} training images"),
        ("training", f"{description['seconds']:.0f} s"),
    ]
    for name, value in description.get("validation", {}).items():
        rows.append((f"validation {name.replace('_', ' ')}", f"{value:.1%}"))
    if "connections_to_other_classes" in description:
        rows.append(("connections to other classes", f"{description['connections_to_other_classes']}"))
    if "test" in description:
        test = description["test"]
        rows.append(("test accuracy", f"{test['accuracy']:.1%} of {test['images']} images"))
    if not description["finished"]:
        rows.append(("state", "unfinished; resume it with `likethat train ... --resume`"))
    _table(f"Run {description['run']}", rows)


def print_summary(classifier: Classifier) -> None:
    print_description(describe_run(classifier.path))
    print(f"Report: {(classifier.path / run_dir.REPORT).resolve()}")


def print_evaluation(evaluation: Evaluation) -> None:
    rows = [
        ("accuracy", f"{evaluation.accuracy:.2%}"),
        ("top-5 accuracy", f"{evaluation.top5_accuracy:.2%}"),
        ("cross entropy", f"{evaluation.cross_entropy:.4f}"),
    ]
    worst = sorted(evaluation.by_class.items(), key=lambda item: item[1])[:3]
    rows += [(f"class {name}", f"{value:.1%}") for name, value in worst if value < 1]
    rows += [(f"{true} taken for {guess}", f"{count} times") for true, guess, count in evaluation.confusions[:3]]
    _table(f"{evaluation.images} images ({evaluation.part})", rows)


def print_verification(verification: Verification) -> None:
    for failure in verification.failures[:SHOWN]:
        print(f"prototype {failure.prototype} ({failure.path}): {failure.reason}")
    if len(verification.failures) > SHOWN:
        print(f"... and {len(verification.failures) - SHOWN} more")
    verdict = "every prototype is the training patch it names"
    if not verification.passed:
        verdict = f"{len({failure.prototype for failure in verification.failures})} prototypes are NOT proven"
    print(
        f"{verification.prototypes} prototypes from {verification.images} images, "
        f"largest absolute error {verification.max_error:.1e}: {verdict}"
    )


def print_predictions(predictions: list[dict[str, Any]]) -> None:
    for prediction in predictions:
        print(f"{prediction['path']}: {prediction['class_name']} ({prediction['probability']:.1%})")
