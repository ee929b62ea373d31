"""What `likethat evaluate --confusions` does: the confusion matrix as a page, with sheets of pictures in its cells."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from likethat.data.dataset import IMAGES_OF
from likethat.explaining.draw.render import shrink
from likethat.explaining.explanation import Explanation, Options, explain_batch
from likethat.explaining.files import KEPT_SIDE
from likethat.metrics.accuracy import Evaluation
from likethat.progress import Display
from likethat.report.confusion import confusion_matrix, to_explain, write_confusions
from likethat.runs.classifier import Classifier
from likethat.runs.data import open_test_data
from likethat.runs.judged import JudgedImage


def write_confusion_page(
    path: Path,
    classifier: Classifier,
    data: str | None,
    evaluation: Evaluation,
    judged: Sequence[JudgedImage],
    display: Display,
) -> None:
    """Write the page about images that were judged, some of them with what speaks for the class they were taken for and
    against their own."""
    dataset, part = open_test_data(classifier, data)
    box_of = {sample.path: sample.box for sample in dataset.test}
    matrix, explanations = confusion_matrix(judged, classifier.classes), dict[str, Explanation]()
    chosen = to_explain(matrix)
    with display.task("scoring sheets") as advance:
        for image in chosen:
            options = Options(top_classes=1, against=image.class_name) if image.is_wrong else Options(top_classes=2)
            prepared = classifier.prepare(dataset.root / image.path, box_of[image.path])
            (explanation,) = explain_batch(classifier, [prepared], options, paths=[image.path])
            explanations[image.path] = explanation.with_picture(shrink(explanation.picture, KEPT_SIDE))
            advance(len(explanations), len(chosen))
    title = f"Confusions of {classifier.path.resolve().name}: {evaluation.images} {IMAGES_OF.get(part, 'images')}"
    write_confusions(path, title, matrix, explanations, evaluation=evaluation)
