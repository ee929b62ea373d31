"""What a run is, as data: all that `likethat info` tells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from likethat.runs import layout
from likethat.runs.calibration import read_calibration
from likethat.runs.classifier import read_prototypes


def describe_run(run: Path) -> dict[str, Any]:
    """Return everything `likethat info` tells, as data."""
    record = layout.read_record(run)
    metrics = layout.read_metrics(run)
    steps: dict[str, dict[str, Any]] = {entry["stage"]: entry for entry in metrics}
    members = [run / folder for folder in record.member_folders()]
    description: dict[str, Any] = {
        "run": str(run),
        "finished": layout.is_finished(run),
        "preset": record.config.preset,
        "backbone": " + ".join(layout.read_record(member).config.model.backbone for member in members),
        "began_with": record.began_with,
        "data": str(record.data.source),
        "kind": record.data.kind,
        "classes": list(record.data.classes),
        "images": record.data.counts,
        "prototypes": sum(record.prototypes_of_class),
        "seconds": sum(
            entry.get("seconds", 0.0) for folder in {run, *members} for entry in layout.read_metrics(folder)
        ),
    }
    # Of several cycles the last one with the best validation accuracy is the model.
    for entry in metrics:
        if entry["stage"] == "last_layer" and entry["val"]["accuracy"] >= steps["last_layer"]["val"]["accuracy"]:
            steps["last_layer"] = entry
            projected = [e for e in metrics if e["stage"] == "project" and e["cycle"] == entry["cycle"]]
            steps |= {"project": projected[0]} if projected else {}
    if "project" in steps:
        description["validation"] = {
            "before_projection": steps["project"]["before"]["accuracy"],
            "after_projection": steps["project"]["after"]["accuracy"],
        }
    if "last_layer" in steps:
        description.setdefault("validation", {})["after_last_layer"] = steps["last_layer"]["val"]["accuracy"]
        description |= _connections(steps["last_layer"])
    shaped = {"prune": "pruning", "edit": "editing"}  # in whatever order it was done
    for entry in (entry for entry in metrics if entry["stage"] in shaped):
        for when in ("before", "after"):
            name = f"{when}_{shaped[entry['stage']]}"
            description.setdefault("validation", {})[name] = entry[when]["accuracy"]
        description |= _connections(entry)
    if "edit" in steps:
        description["edited_from"] = steps["edit"]["from"]
    if "test" in steps:
        description["test"] = {key: steps["test"][key] for key in ("images", "accuracy", "top5_accuracy")}
    if calibration := read_calibration(run):
        description["calibrated_on"] = len(calibration.likeness)
    if "test_projection" in steps and not {"prune", "edit"} & steps.keys():
        projection = steps["test_projection"]
        description["test_projection"] = {when: projection[when]["accuracy"] for when in ("before", "after")}
    if record.kind == layout.BASELINE:
        del description["prototypes"]
        description["as_long"] = record.as_long
    elif description["finished"]:
        description["source_images"] = len({prototype.sha256 for prototype in read_prototypes(run)})
    return description


def _connections(entry: dict[str, Any]) -> dict[str, int]:
    """Return what a line of metrics.jsonl says about connections to other classes, if it does."""
    return {"connections_to_other_classes": entry["nonzero_negative"]} if "nonzero_negative" in entry else {}
