"""README.md of a model that is given away: data, accuracy, prototypes, limits, and how it was selected."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from likethat import __version__
from likethat.runs import layout
from likethat.runs.atomic_files import write_text
from likethat.runs.layout import RunRecord
from likethat.runs.prototypes import read_prototypes

MOST_CLASSES = 20  # listed by name
MOST_WEAK = 5  # classes and confusions listed


def write_card(run: Path) -> None:
    """Write the model card from what the run folder tells; members of a combined run are described together."""
    record, metrics = layout.read_record(run), layout.read_metrics(run)
    steps = {line["stage"]: line for line in metrics}
    tests = [line for line in metrics if line["stage"] == "test"]
    sections = [
        _head(run, record, steps.get("test")),
        _introduction(run.name, record),
        _data(record),
        _accuracy(tests, (run / layout.CALIBRATION).is_file(), len(record.data.classes)),
        _prototypes(run, record),
        _selection(run, record, metrics),
        _limits(record, steps.get("test")),
    ]
    write_text(run / layout.CARD, "\n\n".join(sections) + "\n")


def _plain(text: str) -> str:
    """Return a name of a class or of data as text: neither HTML nor Markdown."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|#~])", r"\\\1", text)


def _backbones(run: Path, record: RunRecord) -> str:
    members = [layout.read_record(run / folder).config.model for folder in record.member_folders()]
    return " + ".join(model.backbone for model in members)


def _head(run: Path, record: RunRecord, test: dict[str, Any] | None) -> str:
    """Return the part that the hub reads. JSON is YAML, and safe whatever the names."""
    head: dict[str, Any] = {
        "library_name": "likethat",
        "pipeline_tag": "image-classification",
        "tags": ["likethat", "protopnet", "prototypes", "interpretability"],
    }
    if test:
        result = {
            "task": {"type": "image-classification"},
            "dataset": {"name": str(record.data.source), "type": record.data.kind, "split": "test"},
            "metrics": [{"type": "accuracy", "value": test["accuracy"]}],
        }
        head["model-index"] = [{"name": run.name, "results": [result]}]
    return "---\n" + "\n".join(f"{key}: {json.dumps(value)}" for key, value in head.items()) + "\n---"


def _introduction(name: str, record: RunRecord) -> str:
    return f"""# {_plain(name)}

An image classifier that explains itself: *this* part of a picture looks like *that* part of a training picture.
Each of its {len(record.data.classes)} classes gets points, similarity to real training patches times their
connections, and there is nothing else in the model.

```python
import likethat

model = likethat.Classifier.from_pretrained({json.dumps(name)})
print(model.predict("picture.jpg"))
likethat.explain(model, "picture.jpg").save("why.html")
```"""


def _data(record: RunRecord) -> str:
    data = record.data
    counts = ", ".join(f"{count} {part}" for part, count in data.counts.items())
    shown = ", ".join(_plain(name) for name in data.classes[:MOST_CLASSES])
    more = f" and {len(data.classes) - MOST_CLASSES} more" if len(data.classes) > MOST_CLASSES else ""
    skipped = f" {len(data.skipped)} unreadable or duplicate files were left out." if data.skipped else ""
    return f"""## Data

{_plain(str(data.source))} ({data.kind}): {counts} images.{skipped} Fingerprint of all files: `{data.fingerprint[:16]}`.

{len(data.classes)} classes: {shown}{more}."""


def _accuracy(tests: list[dict[str, Any]], calibrated: bool, classes: int) -> str:
    """Report every look at the test images: those before the last were at the models this one was made of."""
    if not tests:
        return "## Accuracy\n\nNot measured: there were no test images that are new to all members."
    test, looks = tests[-1], "Test images were looked at once, after every choice was made."
    if len(tests) > 1:
        looks = (
            f"Test images were looked at {len(tests)} times: whenever a model was finished that this one was made of, "
            "and at its own end."
        )
    top5 = f"| top-5 accuracy | {test['top5_accuracy']:.1%} |\n" if classes >= layout.TOP5_CLASSES else ""
    promise = "\n\nIts prediction sets are calibrated on the validation images." if calibrated else ""
    return f"""## Accuracy

| measured on {test["images"]} test images | |
|---|---|
| accuracy | {test["accuracy"]:.1%} |
{top5}| cross entropy | {test["cross_entropy"]:.3f} |

{looks}{promise}"""


def _prototypes(run: Path, record: RunRecord) -> str:
    counts = record.prototypes_of_class
    each = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    prototypes = read_prototypes(run)
    sources = len({prototype.sha256 for prototype in prototypes})
    named = sum(bool(prototype.name) for prototype in prototypes)
    names = f" A person has named {named} of them." if named else ""
    return f"""## Prototypes

{sum(counts)} prototypes, {each} of each class, are patches of {sources} training images.{names}
`{layout.PICTURES}/` holds small pictures of them and of the images they come from, which explanations show: whoever
publishes this folder publishes those. With the data at hand `likethat verify FOLDER --data DATA` proves that every
prototype is the patch it names."""


def _selection(run: Path, record: RunRecord, metrics: list[dict[str, Any]]) -> str:
    config = record.config
    weights = record.began_with or config.model.weights
    lines = [
        f"- Backbone {_backbones(run, record)}, pictures of {config.model.input_size[0]}x{config.model.input_size[1]}, "
        f"preset `{config.preset}`, seed {config.train.seed}, weights {_plain(weights)}."
    ]
    cycles = [line for line in metrics if line["stage"] == "last_layer"]
    if cycles:
        best = max(line["val"]["accuracy"] for line in cycles)
        lines.append(
            f"- Cycles of training, projection and last layer: {len(cycles)}. The model is that of the best "
            f"cycle by accuracy on the validation images, {best:.1%} (the last one of equals)."
        )
    for line in metrics:
        if line["stage"] in ("prune", "edit"):
            what = "Pruned" if line["stage"] == "prune" else "Corrected by hand"
            edits = ", ".join(f"{count} x {kind}" for kind, count in line.get("edits", {}).items())
            edits = f" ({edits})" if edits else ""
            change = f"{line['before']['accuracy']:.1%} before, {line['after']['accuracy']:.1%} after"
            lines.append(f"- {what}{edits}: accuracy on the validation images {change}.")
        if line["stage"] == "combine":
            lines.append(f"- Combined from {len(line['members'])} networks, whose logits are added.")
    return "## How it was selected\n\n" + "\n".join(lines) + f"\n\nMade with likethat {__version__}."


def _limits(record: RunRecord, test: dict[str, Any] | None) -> str:
    lines = [
        f"- It knows {len(record.data.classes)} classes, and has one of them as its best guess for any picture. "
        "Nothing was measured on other data than the above: other cameras, places and times can lower its accuracy.",
        "- A box shows where a picture resembles a prototype, by features that the network has learned. What people "
        "see in both need not be what the network compares; prototypes on backgrounds are possible.",
    ]
    few = min(record.data.counts.get("train", 0), record.data.counts.get("test", 0))
    if few < 100 * len(record.data.classes):
        lines.append("- Accuracy of single classes is measured on few images, and uncertain by as much.")
    for name, share in sorted((test or {}).get("by_class", {}).items(), key=lambda item: item[1])[:MOST_WEAK]:
        if share < 1:
            lines.append(f"- {_plain(name)}: {share:.1%} of its test images are recognised.")
    for true, guess, count in (test or {}).get("confusions", ())[:MOST_WEAK]:
        lines.append(f"- {_plain(true)} is taken for {_plain(guess)}: {count} of the test images.")
    return "## Limits\n\n" + "\n".join(lines)
