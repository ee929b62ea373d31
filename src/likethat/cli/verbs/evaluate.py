"""`likethat evaluate`, `verify`, `predict`, `calibrate` and `info`: what a finished run can be asked."""

from __future__ import annotations

import argparse
from typing import Any

from likethat.cli.arguments import CHECK_FAILED, DONE, add_level, add_verb, answer, display_of, tell_skipped
from likethat.errors import UserError


def evaluate(args: argparse.Namespace) -> int:
    """Accuracy of a run on its test images, or on other data; on request, how good its explanations are."""
    if args.interpretability:
        return _interpretability(args)
    if args.ood:
        raise UserError("Other pictures are a matter of --interpretability; add that, or leave out --ood.")
    from likethat.cli.tables import print_evaluation
    from likethat.runs.data import evaluate_run, load_run

    evaluation = evaluate_run(load_run(args.run, args.device), args.data, display_of(args))
    answer(args, evaluation.to_dict(), lambda: print_evaluation(evaluation))
    return DONE


def _interpretability(args: argparse.Namespace) -> int:
    from likethat.cli.tables import print_evaluation, print_figures
    from likethat.runs.classifier import Classifier
    from likethat.runs.data import load_run
    from likethat.workflows.interpretability import evaluate_interpretability

    classifier = load_run(args.run, args.device)
    if not isinstance(classifier, Classifier):
        raise UserError(f"{args.run} is a plain classifier and has no explanations; leave out --interpretability.")
    result = evaluate_interpretability(classifier, args.data, display_of(args), args.ood)

    def show() -> None:
        print_evaluation(result.evaluation)
        print_figures(result.figures)

    answer(args, result.to_dict(), show)
    return DONE


def verify(args: argparse.Namespace) -> int:
    """Prove that every prototype is the latent patch of the training image it names."""
    from likethat.cli.tables import print_verification
    from likethat.runs.classifier import load
    from likethat.runs.data import verify_run

    verification = verify_run(load(args.run, args.device), args.data, display_of(args))
    answer(args, verification.to_dict(), lambda: print_verification(verification))
    return DONE if verification.passed else CHECK_FAILED


def predict(args: argparse.Namespace) -> int:
    """The class of each picture, with its probability."""
    from likethat.cli.tables import print_predictions
    from likethat.explaining.files import Skipped, predict_files
    from likethat.runs.classifier import load

    answered = list(predict_files(load(args.run, args.device), args.images, args.level))
    skipped = [found for found in answered if isinstance(found, Skipped)]
    predictions = [
        (path, found) for path, found in zip(args.images, answered, strict=True) if not isinstance(found, Skipped)
    ]
    tell_skipped(skipped)
    if not predictions:
        raise UserError("Nothing was predicted, since no picture was found; name pictures.")
    images = [{"path": path, **prediction.to_dict()} for path, prediction in predictions]
    document = {"images": images, "skipped": [vars(entry) for entry in skipped]}
    answer(args, document, lambda: print_predictions(predictions))
    return DONE


def calibrate(args: argparse.Namespace) -> int:
    """Measure, on validation images or on new ones (--data), what a run may promise about a picture."""
    from likethat.cli.tables import print_calibration
    from likethat.runs.classifier import load
    from likethat.runs.data import calibrate_run

    calibration = calibrate_run(load(args.run, args.device), args.data, display_of(args))
    answer(args, calibration.to_dict(), lambda: print_calibration(calibration))
    return DONE


def info(args: argparse.Namespace) -> int:
    """What a run is: data, model, accuracy, prototypes."""
    from likethat.cli.tables import describe_run, print_description

    description = describe_run(args.run)
    answer(args, description, lambda: print_description(description))
    return DONE


def add_verbs(verbs: Any) -> None:
    verb = add_verb(verbs, "evaluate", evaluate, run=True, data=True, json=True)
    verb.add_argument("--interpretability", action="store_true", help="measure the explanations too (docs/metrics.md)")
    verb.add_argument("--ood", metavar="FOLDER", help="with it: pictures of other things, to be told from the known")
    add_verb(verbs, "verify", verify, run=True, data=True, json=True)
    verb = add_verb(verbs, "predict", predict, run=True, json=True)
    verb.add_argument("images", nargs="+", metavar="IMAGE")
    add_level(verb)
    add_verb(verbs, "calibrate", calibrate, run=True, data=True, json=True)
    add_verb(verbs, "info", info, run=True, json=True, device=False)
