"""How a run ends: calibration, test accuracy, images.csv, metrics.jsonl, report and manifest, however it was made."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from likethat.data.dataset import DataSet, Sample
from likethat.explaining.explanation import Explanation, explain_batch
from likethat.metrics.accuracy import Evaluation, evaluate_logits
from likethat.report.html import write_report
from likethat.runs import layout
from likethat.runs.calibration import fit_calibration, write_calibration
from likethat.runs.classifier import Classifier, load
from likethat.runs.judged import JudgedImage, judge, write_judged
from likethat.runs.looks import count_looks
from likethat.runs.manifest import write_manifest
from likethat.training.state import write_metrics
from likethat.workflows.confusions import write_confusion_page

EXPLAINED = 4  # images in the report
SHEETS = 24  # on the page behind its confusion matrix


def conclude(
    run: Path,
    metrics: list[dict[str, Any]],
    dataset: DataSet,
    logits_NK: Tensor,
    val_NK: Tensor | None,
    looks: int | None = None,
    classifier: Classifier | None = None,
) -> Evaluation:
    """Write calibration, test accuracy, images.csv, metrics.jsonl, report and manifest of a run that has its model.

    `logits_NK` are those of the test images, `val_NK` those of the validation images, if there are any that no network
    of the run was trained on. `looks` says how often test images have been judged before, if `metrics` do not say all.
    `classifier` is the run's, where it is in memory; it is given its calibration.
    """
    calibration = None
    if val_NK is not None and len(val_NK):
        calibration = fit_calibration(val_NK, torch.tensor([sample.label for sample in dataset.val]))
        write_calibration(run, calibration)
    label_N = torch.tensor([sample.label for sample in dataset.test], device=logits_NK.device)
    evaluation = evaluate_logits(logits_NK, label_N, dataset.classes, "test")
    looks = 1 + (count_looks(metrics) if looks is None else looks)
    write_metrics(run, [*metrics, {"stage": "test", "looks": looks, **evaluation.to_dict()}])
    if classifier is None:
        classifier = load(run, str(logits_NK.device))
    else:
        classifier.calibration = calibration
    judged = report_images(run, classifier, dataset.root, dataset.test, logits_NK, evaluation)
    others = judge("val", dataset.val, dataset.classes, val_NK), judge("train", dataset.train, dataset.classes, None)
    write_judged(run / layout.IMAGES, chain(judged, *others))
    write_manifest(run)
    return evaluation


def report_images(
    run: Path,
    classifier: Classifier,
    root: Path,
    samples: Sequence[Sample],
    logits_NK: Tensor,
    evaluation: Evaluation,
    part: str = "test",
) -> list[JudgedImage]:
    """Write the report of a run, and the page behind its confusion matrix, about the images of a part; return what they
    are taken for."""
    judged = judge(part, samples, classifier.classes, logits_NK)
    page = run / layout.CONFUSIONS
    write_confusion_page(page, classifier, root, samples, evaluation, judged, most=SHEETS, report=layout.REPORT)
    write_report(run, classifier, explain_some(classifier, root, samples, logits_NK), judged, part)
    return judged


def explain_some(classifier: Classifier, root: Path, samples: Sequence[Sample], logits_NK: Tensor) -> list[Explanation]:
    """Explain a few images spread over the classes, and one that the model got wrong where there is one."""
    labels = torch.tensor([sample.label for sample in samples])
    wrong = (logits_NK.argmax(1).cpu() != labels).nonzero()[:, 0].tolist()[:1]
    spread = torch.linspace(0, len(labels) - 1, EXPLAINED - len(wrong)).long().tolist()
    chosen = [samples[number] for number in dict.fromkeys(spread + wrong)]
    prepared = [classifier.prepare(root / sample.path, sample.box) for sample in chosen]
    return explain_batch(classifier, prepared, paths=[sample.path for sample in chosen])
