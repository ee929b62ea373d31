"""The report of a run: the page a person sees after training. It needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from likethat.data.dataset import IMAGES_OF
from likethat.explaining.draw.page import write_page
from likethat.explaining.draw.pictures import Picture, Pictures
from likethat.explaining.explanation import Explanation
from likethat.metrics.figure import wilson_interval
from likethat.report.confusion import confusion_matrix, draw_matrix
from likethat.report.curves import epoch_charts
from likethat.report.measured import read_measured
from likethat.report.path import draw_path
from likethat.runs import layout
from likethat.runs.classifier import Classifier
from likethat.runs.judged import JudgedImage

MOST_WRONG = 50  # images that a report lists
MOST_INLINE = 60  # prototypes whose pictures a report holds itself; of more it names the files in the run folder


def write_report(
    run: Path,
    classifier: Classifier,
    explanations: Sequence[Explanation],
    judged: Sequence[JudgedImage] = (),
    part: str = "test",
) -> Path:
    """Write report.html into the run folder: how good the model is, how it got there, what it looks for. The images
    explained and judged are of `part`."""
    metrics = layout.read_metrics(run)
    last = {entry.get("stage"): entry for entry in metrics}
    by_class = {name: [p for p in classifier.prototypes if p.class_name == name] for name in classifier.classes}
    weight_KP = classifier.weight_KP
    record = layout.read_record(run)
    pruned = last.get("prune", {})
    folders = {run, *(run / folder for folder in record.member_folders())}
    inline = len(classifier.prototypes) <= MOST_INLINE
    confusions = layout.CONFUSIONS if (run / layout.CONFUSIONS).is_file() else None
    # Two stores: pictures of the examples are defined once in the page, those of the gallery load when scrolled to.
    gallery, pictures = Pictures(inline), Pictures(inline)
    return write_page(
        run / layout.REPORT,
        "report.html",
        ["likethat.report"],
        name=run.resolve().name,
        test=last.get("test"),
        interval=_interval(last["test"]) if "test" in last else None,
        members=last.get("combine", {}).get("members"),
        prune=pruned,
        path_picture=draw_path(pruned["path"], pruned["chosen"], pruned["budget"]) if "path" in pruned else None,
        edit=last.get("edit"),
        edits=layout.read_edits(run),
        cycles=_cycles(metrics),
        seconds=sum(entry.get("seconds", 0.0) for folder in folders for entry in layout.read_metrics(folder)),
        charts=epoch_charts(metrics),
        pieced=record.config.augment.cutmix > 0 and "joint" in last,
        classifier=classifier,
        nonzero=int((weight_KP != 0).sum()),
        negative=int((weight_KP < 0).sum()),
        connections=weight_KP.numel(),
        counts=record.data.counts,
        by_class=by_class,
        weights=weight_KP.cpu().tolist(),
        explanations=explanations,
        judged=judged,
        matrix_picture=draw_matrix(confusion_matrix(judged, classifier.classes), confusions),
        confusions=confusions,
        wrong={image.path: image for image in judged if image.is_wrong},
        most_wrong=MOST_WRONG,
        table=layout.IMAGES if (run / layout.IMAGES).is_file() else None,
        explained_images=IMAGES_OF[part],
        measurements=read_measured(run, classifier.prototypes),
        gallery=gallery,
        pictures=pictures,
        near_duplicates=_near_duplicates(run),
    )


def write_baseline_report(run: Path, backbone: str, classes: Sequence[str]) -> Path:
    """Write report.html of a baseline."""
    metrics = layout.read_metrics(run)
    test = metrics[-1]
    return write_page(
        run / layout.REPORT,
        "baseline.html",
        ["likethat.report"],
        name=run.resolve().name,
        test=test,
        interval=_interval(test),
        backbone=backbone,
        classes=classes,
        counts=layout.read_record(run).data.counts,
        charts=epoch_charts(metrics),
        cycles=(),
        near_duplicates=_near_duplicates(run),
    )


def _near_duplicates(run: Path) -> Picture | None:
    """Return the picture of pairs that look nearly alike, where training found some."""
    found = (run / layout.NEAR_DUPLICATES).is_file()
    return Pictures(inline=True).of_file(run, layout.NEAR_DUPLICATES) if found else None


def _cycles(metrics: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the validation accuracy before projection, after it and after the last layer, cycle by cycle."""
    cycles: dict[int, dict[str, Any]] = {}
    for entry in metrics:
        if entry.get("stage") in ("project", "last_layer"):
            cycles.setdefault(entry["cycle"], {})[entry["stage"]] = entry
    return [
        {
            "before": cycle.get("project", {}).get("before", {}).get("accuracy"),
            "projected": cycle.get("project", {}).get("after", {}).get("accuracy"),
            "last_layer": cycle.get("last_layer", {}).get("val", {}).get("accuracy"),
            "moved": cycle.get("project", {}).get("moved", {}).get("mean"),
        }
        for _, cycle in sorted(cycles.items())
    ]


def _interval(test: dict[str, Any]) -> tuple[float, float] | None:
    return wilson_interval(test["accuracy"], test["images"]) if test.get("images") else None
