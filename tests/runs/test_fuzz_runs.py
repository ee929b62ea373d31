"""Run folders damaged in every way that comes to mind: an answer or one sentence, no traceback and no hang."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.explain_run import make_run
from hypothesis import event, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from likethat.errors import UserError
from likethat.explaining.explanation import explain
from likethat.progress import Display
from likethat.runs.calibration import fit_calibration, write_calibration
from likethat.runs.classifier import load
from likethat.runs.describe import describe_run
from likethat.runs.manifest import write_manifest
from likethat.workflows.edit.history import read_history
from likethat.workflows.verify import verify_folder

BOTH = {"before": {"accuracy": 0.5}, "after": {"accuracy": 0.6}}
METRICS = [
    {"stage": "project", "cycle": 0, **BOTH},
    {"stage": "last_layer", "cycle": 0, "val": {"accuracy": 0.6}, "nonzero_negative": 3, "seconds": 1.5},
    {"stage": "edit", "from": "run", "nonzero_negative": 2, **BOTH},
    {"stage": "test", "images": 9, "accuracy": 0.5, "top5_accuracy": 1.0, "cross_entropy": 0.4},
]
EDIT = {"kind": "ban", "prototypes": [1], "patches": [{}], "name": None, "new_patch": None, **BOTH}
EDITS = [{**EDIT, "who": "Ada", "when": "now", "why": "", "run": "run"}]
DOCUMENTS = ("config.json", "prototypes.json", "calibration.json", "manifest.json", "metrics.jsonl", "edits.jsonl")
HOSTILE: list[Any] = [
    None, True, False, 0, -1, 1, 99, 10**9, 2**64, 10**400, 1e30, 1e308, float("nan"), float("inf"), -0.5, "", "x",
    "\0", "../../etc/passwd", "/etc/passwd", "a\0b", "\ud800", [], {}, [[]], [None] * 3, {"": 0}, "9" * 5000,
]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    run = make_run(folder).path
    write_calibration(run, fit_calibration(torch.randn(20, 3), torch.arange(20) % 3))
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in METRICS))
    (run / "edits.jsonl").write_text("".join(json.dumps(line) + "\n" for line in EDITS))
    write_manifest(run)
    assert use(run) == "answered"
    return run


def use(run: Path) -> str:
    """All that reads a run folder. Answers are JSON, which has no NaN."""
    try:
        picture = next((run.parent / "data").rglob("*.png"))
        classifier = load(run, "cpu")
        json.dumps(classifier.predict(picture).to_dict(), allow_nan=False)
        explanation = explain(classifier, picture)
        json.dumps(explanation.to_dict(), allow_nan=False)
        explanation.figure()
        json.dumps(describe_run(run), allow_nan=False)
        str(read_history(run))
        json.dumps(verify_folder(run, None, "cpu", Display(quiet=True)).to_dict(), allow_nan=False)
    except UserError as error:
        told = str(error)
    else:
        return "answered"
    assert "\n" not in told
    assert len(told) < 2000
    return "refused"


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to everything in a document."""
    yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield from places(inner, (*path, key))


def changed(document: Any, path: tuple[Any, ...], how: str, value: Any) -> Any:
    if not path:
        return value
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    if how == "remove":
        del inner[path[-1]]
    elif how == "repeat" and isinstance(inner, list):
        inner.append(inner[path[-1]])
    elif how == "add" and isinstance(inner, dict):
        inner["unheard of"] = value
    else:
        inner[path[-1]] = value
    return document


def damage_document(run: Path, draw: st.DataObject) -> None:
    file = run / draw.draw(st.sampled_from(DOCUMENTS))
    lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
    number = draw.draw(st.integers(0, len(lines) - 1))
    document = json.loads(lines[number])
    path = draw.draw(st.sampled_from(list(places(document))))
    how = draw.draw(st.sampled_from(["set", "set", "set", "remove", "repeat", "add"]))
    event(how)
    lines[number] = json.dumps(changed(document, path, how, draw.draw(st.sampled_from(HOSTILE))))
    file.write_text("\n".join(lines))


def damage_bytes(run: Path, draw: st.DataObject) -> None:
    file = run / draw.draw(st.sampled_from([*DOCUMENTS, "model.safetensors", "prototypes/0000.jpg"]))
    data = file.read_bytes()
    match draw.draw(st.sampled_from(["cut", "flip", "deep", "digits", "empty", "binary"])):
        case "cut":
            data = data[: draw.draw(st.integers(0, min(len(data), 5000)))]
        case "flip":
            at = draw.draw(st.integers(0, min(len(data) - 1, 5000)))
            data = data[:at] + bytes([draw.draw(st.integers(0, 255))]) + data[at + 1 :]
        case "deep":
            data = b"[" * 100_000
        case "digits":
            data = b'{"format": ' + b"9" * 5000 + b"}"
        case "empty":
            data = b""
        case "binary":
            data = draw.draw(st.binary(max_size=200))
    file.write_bytes(data)


def damage_file(run: Path, draw: st.DataObject) -> None:
    file = run / draw.draw(st.sampled_from([*DOCUMENTS, "model.safetensors", "prototypes/0001.jpg", "prototypes"]))
    shutil.rmtree(file) if file.is_dir() else file.unlink()
    match draw.draw(st.sampled_from(["gone", "folder", "loop", "pipe", "device"])):
        case "folder":
            file.mkdir()
        case "loop":
            file.symlink_to(file.name)
        case "pipe":
            os.mkfifo(file)
        case "device":
            file.symlink_to("/dev/zero")


def damage_tensors(run: Path, draw: st.DataObject) -> None:
    tensors = load_file(run / "model.safetensors")
    name = draw.draw(st.sampled_from(sorted(tensors)))
    values = tensors[name]
    how = draw.draw(st.sampled_from(["nan", "inf", "huge", "gone", "shape", "kind", "more", "zero"]))
    event(how)
    if how == "gone":
        del tensors[name]
    elif how == "more":
        tensors["unheard of"] = values.clone()
    else:
        tensors[name] = {
            "nan": lambda: torch.full_like(values.float(), float("nan")),
            "inf": lambda: torch.full_like(values.float(), float("inf")),
            "huge": lambda: torch.full_like(values.float(), 3e38),
            "shape": lambda: values.flatten(),
            "kind": lambda: values.to(torch.int32),
            "zero": lambda: torch.zeros_like(values),
        }[how]()
    save_file({key: value.contiguous() for key, value in tensors.items()}, run / "model.safetensors")


DAMAGES = {"document": damage_document, "bytes": damage_bytes, "file": damage_file, "tensors": damage_tensors}


@pytest.mark.timeout(600)
@settings(max_examples=80, deadline=None)
@given(st.data())
def test_damaged_runs_are_answered_or_refused_in_a_sentence(whole: Path, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        shutil.copytree(whole, run)
        (Path(folder) / "data").symlink_to(whole.parent / "data")
        kind = data.draw(st.sampled_from(sorted(DAMAGES)))
        DAMAGES[kind](run, data)
        event(f"{kind}: {use(run)}")


# The damage that was met in the wild, one by one: file, place, value.
KNOWN: list[tuple[str, tuple[Any, ...], Any]] = [
    ("config.json", ("prototypes_of_class",), [10**9, 2, 2]),
    ("config.json", ("prototypes_of_class",), "many"),
    ("config.json", ("prototypes_of_class", 0), -1),
    ("config.json", ("data",), None),
    ("config.json", ("data", "classes"), []),
    ("config.json", ("data", "classes"), ["finch", "finch", "wren"]),
    ("config.json", ("data", "skipped"), 7),
    ("config.json", ("config",), []),
    ("config.json", ("config", "model"), "resnet"),
    ("config.json", ("config", "model", "input_size"), [1e30, 96]),
    ("config.json", ("config", "model", "input_size"), [10**6, 10**6]),
    ("config.json", ("config", "model", "latent_width"), 10**9),
    ("config.json", ("config", "model", "latent_width"), float("inf")),
    ("config.json", ("config", "model", "prototype_shape"), [10**9, 1]),
    ("config.json", ("config", "preset"), []),
    ("config.json", ("kind",), {}),
    ("config.json", ("format",), "one"),
    ("prototypes.json", ("prototypes",), {}),
    ("prototypes.json", ("prototypes", 1), None),
    ("prototypes.json", ("prototypes", 1, "row"), 99),
    ("prototypes.json", ("prototypes", 1, "row"), 1e30),
    ("prototypes.json", ("prototypes", 1, "column"), -1),
    ("prototypes.json", ("prototypes", 1, "row"), "0"),
    ("prototypes.json", ("prototypes", 1, "box"), [float("nan")] * 4),
    ("prototypes.json", ("prototypes", 1, "box"), [1, 2, 3]),
    ("prototypes.json", ("prototypes", 1, "cell"), None),
    ("prototypes.json", ("prototypes", 1, "path"), "a\0b.png"),
    ("prototypes.json", ("prototypes", 1, "crop"), "../../secret.jpg"),
    ("prototypes.json", ("prototypes", 1, "source"), ""),
    ("prototypes.json", ("prototypes", 1, "sha256"), "none"),
    ("prototypes.json", ("prototypes", 1, "member"), 3),
    ("prototypes.json", ("prototypes", 1, "unheard of"), 3),
    ("calibration.json", ("likeness",), [1]),
    ("calibration.json", ("likeness", 0), 1e400),
    ("calibration.json", ("nonconformity", 0), "0.5"),
]


@pytest.mark.parametrize(("name", "path", "value"), KNOWN)
def test_known_damage_is_refused_at_load(
    whole: Path, tmp_path: Path, name: str, path: tuple[Any, ...], value: Any
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    document = changed(json.loads((run / name).read_text()), path, "set", value)
    (run / name).write_text(json.dumps(document))
    with pytest.raises(UserError, match=r"damaged|does not fit|outside its folder") as refused:
        load(run, "cpu")
    assert str(run) in str(refused.value)
    assert len(str(refused.value)) < 400
