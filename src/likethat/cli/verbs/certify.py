"""`likethat certify`: what the last projection can, and cannot, have changed."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from likethat.cli.arguments import CHECK_FAILED, DONE, OTHER_DATA, add_verb, answer, display_of
from likethat.errors import UserError

if TYPE_CHECKING:
    from likethat.explaining.certificate import Certificate, ClassVerdict, ImageCertificate


def certify(args: argparse.Namespace) -> int:
    """Prove for each test image that the last projection did not change its prediction."""
    from likethat.explaining.certificate import certify
    from likethat.runs.classifier import load
    from likethat.runs.data import open_test_data

    classifier = load(args.run, args.device)
    dataset, part = open_test_data(classifier, args.data)
    if not dataset.test:
        raise UserError(f"{dataset.root} has no test images; name data that has some with --data DATA.")
    with display_of(args).task("certifying") as advance:
        certificate = certify(classifier, dataset.root, dataset.test, advance)
    document = {"part": part, **document_of(certificate, classifier.classes)}
    answer(args, document, lambda: _print(document))
    return CHECK_FAILED if certificate.refuted else DONE


def document_of(certificate: Certificate, classes: tuple[str, ...]) -> dict[str, Any]:
    """Return the document that --json prints. Shares are of all images."""
    images = certificate.images
    theorems = [image.theorem for image in images if image.theorem]
    return {
        "images": len(images),
        "theorem": {
            "applies": not certificate.reason,
            "reason": certificate.reason or None,
            "covered": None if certificate.reason else _share([theorem.covered for theorem in theorems]),
            "certified": None if certificate.reason else _share([theorem.certified for theorem in theorems]),
            "delta": _summary([theorem.delta for theorem in theorems if theorem.covered and theorem.delta is not None]),
        },
        "bound": {
            "certified": _share([image.run.certified for image in images]),
            "certified_a4": _share([image.a4.certified for image in images]),
        },
        "changed": _share([image.run.before != image.run.after for image in images]),
        "changed_a4": _share([image.a4.before != image.a4.after for image in images]),
        "refuted": [image.path for image in certificate.refuted],
        "per_image": [_image(image, classes) for image in images],
    }


def _share(holds: list[bool]) -> float:
    return sum(holds) / len(holds)


def _summary(values: list[float]) -> dict[str, float] | None:
    from statistics import median

    return {"min": min(values), "median": median(values), "max": max(values)} if values else None


def _image(image: ImageCertificate, classes: tuple[str, ...]) -> dict[str, Any]:
    theorem = image.theorem
    return {
        "path": image.path,
        "class": classes[image.label],
        "theorem": {**vars(theorem), "covered": theorem.covered, "certified": theorem.certified} if theorem else None,
        "run": _verdict(image.run, classes),
        "a4": _verdict(image.a4, classes),
    }


def _verdict(verdict: ClassVerdict, classes: tuple[str, ...]) -> dict[str, Any]:
    names = {"before": classes[verdict.before], "after": classes[verdict.after]}
    return {**names, "bound": verdict.bound, "certified": verdict.certified}


def _print(document: dict[str, Any]) -> None:
    from likethat.cli.tables import print_table

    theorem, bound, rows = document["theorem"], document["bound"], []
    if theorem["applies"]:
        rows.append(("covered by theorem 2.1", f"{theorem['covered']:.1%}"))
        rows.append(("certified by theorem 2.1", f"{theorem['certified']:.1%}"))
    if theorem["delta"]:
        delta = theorem["delta"]
        rows.append(("delta where covered", f"{delta['min']:.3f} to {delta['max']:.3f}, median {delta['median']:.3f}"))
    rows += [
        ("certified by the bound, (A4) weights", f"{bound['certified_a4']:.1%}"),
        ("predictions changed, (A4) weights", f"{document['changed_a4']:.1%}"),
        ("certified by the bound, the run's last layer", f"{bound['certified']:.1%}"),
        ("predictions changed, the run's last layer", f"{document['changed']:.1%}"),
    ]
    print_table(f"The last projection, on {document['images']} images ({document['part']})", rows)
    if not theorem["applies"]:
        print(f"Theorem 2.1 does not apply: {theorem['reason']}.")
    for path in document["refuted"]:
        print(f"{path}: certified, and yet its prediction CHANGED")
    if not any((theorem["certified"], *bound.values())):
        print("No prediction is certified: the prototypes moved too far, or the leads were too small, for a proof.")
    elif not document["refuted"]:
        print("None of the certified predictions changed.")


def add(verbs: Any) -> None:
    add_verb(verbs, "certify", certify, run=True, data=OTHER_DATA, json=True)
