"""`likethat evaluate`: accuracy and, on request, how good the explanations are."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from likethat.cli.arguments import DONE, OTHER_DATA, add_verb, answer, display_of
from likethat.distributed import is_main_process
from likethat.errors import UserError

SHEETS = 60  # on the page of --confusions, at most


def evaluate(args: argparse.Namespace) -> int:
    """Measure the accuracy of a run on its test images or on other data and, on request, its explanations."""
    if args.interpretability:
        if args.csv or args.confusions:
            raise UserError("--csv and --confusions tell what images are taken for; leave out --interpretability.")
        return _interpretability(args)
    if args.part != "test":
        raise UserError("--part is a matter of --interpretability; add that, or leave out --part.")
    if args.ood:
        raise UserError("Other pictures are a matter of --interpretability; add that, or leave out --ood.")
    from likethat.cli.tables import print_evaluation
    from likethat.runs.classifier import Classifier
    from likethat.runs.data import load_run, open_test_data
    from likethat.runs.judged import write_judged
    from likethat.workflows.confusions import write_confusion_page
    from likethat.workflows.evaluate import evaluate_run

    model = load_run(args.run, args.device)
    if args.confusions and not isinstance(model, Classifier):
        raise UserError(f"{args.run} is a baseline and has no sheets to show; leave out --confusions.")
    evaluation, judged = evaluate_run(model, args.data, display_of(args))
    if args.csv and is_main_process():
        write_judged(args.csv, judged)
    if args.confusions and is_main_process() and isinstance(model, Classifier):
        dataset, _ = open_test_data(model, args.data)
        where = args.confusions, model, dataset.root, dataset.test
        write_confusion_page(*where, evaluation, judged, most=SHEETS, display=display_of(args))
    answer(args, evaluation.to_dict(), lambda: print_evaluation(evaluation))
    return DONE


def _interpretability(args: argparse.Namespace) -> int:
    from likethat.cli.tables import print_evaluation, print_figures
    from likethat.runs.classifier import Classifier
    from likethat.runs.data import load_run
    from likethat.workflows.interpretability import evaluate_interpretability

    classifier = load_run(args.run, args.device)
    if not isinstance(classifier, Classifier):
        raise UserError(f"{args.run} is a baseline and has no explanations; leave out --interpretability.")
    result = evaluate_interpretability(classifier, args.data, display_of(args), args.ood, args.part)

    def show() -> None:
        print_evaluation(result.evaluation)
        print_figures(result.figures)

    answer(args, result.to_dict(), show)
    return DONE


def add(verbs: Any) -> None:
    verb = add_verb(verbs, "evaluate", evaluate, run=True, data=OTHER_DATA, json=True, together=True)
    verb.add_argument(
        "--csv", type=Path, metavar="FILE", help="write a table of what each image is and what the model takes it for"
    )
    verb.add_argument(
        "--confusions",
        type=Path,
        metavar="FILE",
        help="draw the confusion matrix as an HTML page: a click on a cell shows its pictures with their sheets",
    )
    verb.add_argument("--interpretability", action="store_true", help="measure the explanations too (docs/metrics.md)")
    verb.add_argument(
        "--part",
        choices=("val", "test"),
        default="test",
        help="of --interpretability: test images, or the validation images that the run held out (default: test)",
    )
    text = "of --interpretability: pictures of other things, which the model should tell from those it knows"
    verb.add_argument("--ood", metavar="FOLDER", help=text)
