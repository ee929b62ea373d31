"""The confusion matrix as a page, with sheets of pictures in its cells: a run's own, and `likethat evaluate
--confusions`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from likethat.data.dataset import IMAGES_OF, Sample
from likethat.explaining.draw.render import shrink
from likethat.explaining.explanation import Explanation, Options, explain_batch
from likethat.explaining.files import KEPT_SIDE
from likethat.metrics.accuracy import Evaluation
from likethat.progress import Display
from likethat.report.confusion import confusion_matrix, to_explain, write_confusions
from likethat.runs.classifier import BATCH, Classifier
from likethat.runs.judged import JudgedImage


def write_confusion_page(
    path: Path,
    classifier: Classifier,
    root: Path,
    samples: Sequence[Sample],
    evaluation: Evaluation,
    judged: Sequence[JudgedImage],
    *,
    most: int,
    display: Display | None = None,
    report: str | None = None,
) -> None:
    """Write the page about images that were judged, at most so many of them with what speaks for the class they were
    taken for and against their own. `report` is a page beside it that it belongs to."""
    box_of = {sample.path: sample.box for sample in samples}
    matrix, explanations = confusion_matrix(judged, classifier.classes), dict[str, Explanation]()
    chosen = to_explain(matrix, most)
    with (display or Display(quiet=True)).task("scoring sheets") as advance:
        for first in range(0, len(chosen), BATCH):
            together = chosen[first : first + BATCH]
            batch = [classifier.prepare(root / image.path, box_of[image.path]) for image in together]
            outputs = classifier.outputs(batch)
            for number, (image, prepared) in enumerate(zip(together, batch, strict=True)):
                options = Options(top_classes=1, against=image.class_name) if image.is_wrong else Options(top_classes=2)
                own = [output.one(number) for output in outputs]
                (explanation,) = explain_batch(classifier, [prepared], options, paths=[image.path], outputs=own)
                explanations[image.path] = explanation.with_picture(shrink(explanation.picture, KEPT_SIDE))
                advance(len(explanations), len(chosen))
    images = IMAGES_OF.get(judged[0].part, "images") if judged else "images"
    title = f"Confusions of {classifier.path.resolve().name}: {evaluation.images} {images}"
    write_confusions(path, title, matrix, explanations, evaluation=evaluation, report=report)
