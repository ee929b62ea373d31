"""The layout of a run folder, and the sentences for folders that are not one."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_type_hints

from torch import nn

from likethat import __version__
from likethat.config.presets import from_dict
from likethat.config.settings import SECTIONS, Config
from likethat.data.files import parse_json, read_file
from likethat.data.folder_kinds import CHECKPOINTS, CONFIG, LOCK, PIXEL_FILE, is_begun, is_run
from likethat.errors import UserError
from likethat.runs.atomic_files import check_no_history, load_tensors, read_json, tensor_shape, unreadable, write_json
from likethat.runs.schema import damaged, parse

FORMAT = 1
PROTOPNET, COMBINED, BASELINE = "protopnet", "combined", "baseline"  # kinds of runs

MODEL = "model.safetensors"
PROTOTYPES = "prototypes.json"
PICTURES = "prototypes"
METRICS = "metrics.jsonl"
RENAMED_STAGES = {"classifier": "baseline"}  # by the names that they have in metrics.jsonl of older runs
EDITS = "edits.jsonl"  # who corrected what, when and why, in a run that was edited
REPORT = "report.html"
CARD = "README.md"  # of a model that is given away, in place of the report
# What `evaluate --interpretability` measured, by the part of the data that it was measured on.
INTERPRETABILITY = {"test": "interpretability.json", "val": "interpretability-val.json"}
CONFUSIONS = "confusions.html"  # the images that the report is about by what they are taken for, with sheets
IMAGES = "images.csv"  # every image: its part and class and, if it was held out, what the model takes it for
NEAR_DUPLICATES = "near-duplicates.jpg"  # pictures of one part that look nearly like those of another
CALIBRATION = "calibration.json"  # how validation images did, for promises about new ones
ATTRIBUTED = "attribution.safetensors"  # where prototypes lie in their own pictures, by other methods than the paper's
PATH = "path.svg"  # accuracy against sparsity, in a run pruned to a budget
MEMBERS = "members"
MANIFEST = "manifest.json"  # digests of all these files, written last
TOP5_CLASSES = 10  # at least, for a top-5 accuracy to say something: five are then at most half
STATE = f"{CHECKPOINTS}/state.safetensors"
PIXELS = f"{CHECKPOINTS}/{PIXEL_FILE}"
SCORES = f"{CHECKPOINTS}/scores.f16"


@dataclass(frozen=True)
class DataRecord:
    """Which images a run was trained on."""

    root: str
    kind: str
    classes: tuple[str, ...]
    counts: dict[str, int]
    skipped: tuple[str, ...]  # bad files left out on request
    fingerprint: str  # of every file's path and content
    table: str | None = None  # file that lists the images

    @property
    def source(self) -> Path:
        """Return what is opened as the data set: the table, or else the folder."""
        return Path(self.table or self.root)


@dataclass(frozen=True)
class RunRecord:
    """What config.json says. Of a combined run, `config` and `data` are those of its first member."""

    config: Config
    data: DataRecord
    prototypes_of_class: tuple[int, ...]
    kind: str = PROTOPNET
    members: int = 0  # networks of a combined run, each a run folder of its own under members/
    automatic: tuple[str, ...] = ()  # options that were left to the run and have the values it chose
    began_with: str = ""  # weights: timm's name of them, or a file's name and digest; empty where nobody knows
    as_long: bool = False  # of a baseline: trained in all stages of its preset, as long as a ProtoPNet

    def write(self, run: Path) -> None:
        head: dict[str, Any] = {"format": FORMAT, "likethat": __version__, "kind": self.kind}
        if self.kind == COMBINED:
            head["members"] = self.members
        if self.automatic:
            head["automatic"] = list(self.automatic)
        if self.began_with:
            head["began_with"] = self.began_with
        if self.as_long:
            head["as_long"] = True
        document = {**head, "prototypes_of_class": self.prototypes_of_class, "data": asdict(self.data)}
        write_json(run / CONFIG, {**document, "config": self.config.to_dict()})

    def member_folders(self) -> list[str]:
        """Return the folder of each network relative to the run's."""
        return [f"{MEMBERS}/{number}" for number in range(self.members)] if self.kind == COMBINED else ["."]


# What config.json must have besides its format; the order is that of RunRecord.
RECORD = {**get_type_hints(RunRecord), "config": dict[str, Any]}
WITHOUT = {"members": 0, "automatic": [], "began_with": "", "as_long": False}  # where it does not say
MOST_PROTOTYPES, MOST_MEMBERS = 10_000_000, 1_000

# What lines of metrics.jsonl must have that others rely on, by their stage.
ACCURACY = {"accuracy": float}
BOTH = {"before": ACCURACY, "after": ACCURACY}
STAGES: dict[str, dict[str, Any]] = {
    "project": {"cycle": int, **BOTH},
    "last_layer": {"cycle": int, "val": ACCURACY},
    "prune": BOTH,
    "edit": {"from": str, **BOTH},
    "test_projection": BOTH,
    "test": {"images": int, "accuracy": float, "top5_accuracy": float},
    "combine": {"members": tuple[dict[str, Any], ...]},
}
# Of any line.
OPTIONAL = {
    "seconds": float,
    "nonzero_negative": int,
    "withdrawn": tuple[str, ...],
    "new_patches": tuple[dict[str, Any], ...],
}
# And those of edits.jsonl.
EDIT: dict[str, Any] = dict.fromkeys(("kind", "who", "when", "why", "run"), str) | {
    "prototypes": tuple[int, ...],
    "patches": tuple[dict[str, Any], ...],
    "name": str | None,
    "new_patch": dict[str, Any] | None,
    **BOTH,
}


def read_config(run: Path) -> dict[str, Any]:
    """Read config.json of a run folder of any kind, if this version can read it."""
    if not run.is_dir():
        raise UserError(f"There is no run folder {run}; `likethat train DATA --out {run}` makes one.")
    if not (run / CONFIG).is_file():
        raise UserError(f"{run} is not a run folder: it has no {CONFIG}. Name a folder that `likethat train` made.")
    document = read_json(run / CONFIG)
    if not isinstance(document, dict) or not isinstance(document.get("format"), int):
        raise UserError(f"{run / CONFIG} is damaged: it does not say its format; restore it or train again.")
    if document["format"] > FORMAT:
        raise UserError(
            f"{run} was made by a newer likethat ({document.get('likethat')}); update with `pip install -U likethat`."
        )
    return document


def read_record(run: Path) -> RunRecord:
    document = read_config(run)
    try:
        found = parse(RECORD, {**WITHOUT, **document})
        config = from_dict(parse({"preset": str, **dict.fromkeys(SECTIONS, dict[str, Any])}, found["config"], "config"))
        record = RunRecord(config, *(found[name] for name in RECORD if name != "config"))
        _check_record(record)
    except (ValueError, UserError) as error:
        raise damaged(run / CONFIG, error) from error
    return record


def _check_record(record: RunRecord) -> None:
    classes, counts = record.data.classes, record.prototypes_of_class
    if record.kind not in (PROTOPNET, COMBINED, BASELINE):
        raise ValueError(f"kind is '{record.kind[:50]}', which nobody knows")
    if not classes or len(set(classes)) < len(classes):
        raise ValueError("its classes are none, or some twice")
    if record.kind != BASELINE and len(counts) != len(classes):
        raise ValueError(f"prototypes_of_class has {len(counts)} entries for {len(classes)} classes")
    if any(count < 0 for count in counts) or sum(counts) > MOST_PROTOTYPES:
        raise ValueError("prototypes_of_class has counts that cannot be")
    if not 0 <= record.members <= MOST_MEMBERS or (record.kind == COMBINED and not record.members):
        raise ValueError(f"it says that the run has {record.members} members")


def load_weights(run: Path, model: nn.Module, verb: str) -> None:
    """Fill `model` with the tensors of a run that `verb` has finished."""
    _check_finished(run, verb)
    tensors, _ = load_tensors(run / MODEL)
    for name, values in tensors.items():
        if not bool(values.isfinite().all()):
            raise damaged(run / MODEL, f"{name} has values that are not finite numbers")
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise does_not_fit(run) from error


def check_prototype_shape(run: Path, count: int) -> tuple[int, ...]:
    """Return width and window of a network's prototypes, if there are `count` in its file."""
    _check_finished(run, "train")
    shape = tensor_shape(run / MODEL, "prototype_layer.prototype_PDhw")
    if len(shape) != 4 or shape[0] != count:
        raise does_not_fit(run)
    return shape[1:]


def does_not_fit(run: Path) -> UserError:
    return UserError(f"{run / MODEL} does not fit {run / CONFIG}; restore both from one run.")


def _check_finished(run: Path, verb: str) -> None:
    if not (run / MODEL).is_file():
        raise UserError(f"{run} holds an unfinished run; finish it with `likethat {verb} ... --out {run} --resume`.")


def check_out(out: Path, *, overwrite: bool, resume: bool) -> None:
    """Refuse a folder that holds something, unless it is a run and --overwrite was asked for; change nothing."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; choose another --out.")
    if not out.is_dir() or not any(out.iterdir()) or is_begun(out):
        return
    if not is_run(out):
        raise UserError(f"{out} is not empty and not a run folder; choose another --out.")
    if not overwrite and not resume:
        raise UserError(
            f"{out} is not empty; pass --resume to go on with it, --overwrite to replace it, or another --out."
        )
    if not resume:
        check_no_history(out)


def is_finished(run: Path) -> bool:
    """Return whether the run is complete: its manifest is written last, then the state goes; older runs have none."""
    has_model = (run / REPORT).is_file() or (run / MODEL).is_file() or (run / MEMBERS).is_dir()
    return has_model and ((run / MANIFEST).is_file() or not (run / STATE).is_file())


def drop_checkpoints(run: Path) -> None:
    """Remove state and cached pixels, which are larger than the model and of no use to a finished run."""
    with contextlib.suppress(OSError):  # a link to another disk stays, and so does what is not a file
        for file in (run / CHECKPOINTS).glob("*"):
            file.unlink()
        (run / CHECKPOINTS).rmdir()


def clear_out(out: Path) -> None:
    """Empty a run folder that is overwritten, but for the pixels that were read for the new run."""
    for path in out.iterdir() if out.is_dir() else ():
        if path.name == LOCK or (path.name == CHECKPOINTS and path.is_dir()):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()  # of a link, never what it points to
    (out / STATE).unlink(missing_ok=True)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl, stages by their names of today; none before the first stage has ended."""
    lines = _read_lines(run / METRICS, lambda line: {"stage": str, **STAGES.get(str(line.get("stage")), {})})
    return [
        line | {"stage": RENAMED_STAGES[line["stage"]]} if line["stage"] in RENAMED_STAGES else line for line in lines
    ]


def read_edits(run: Path) -> list[dict[str, Any]]:
    """Read the lines of edits.jsonl, oldest first; none where nobody has edited the run."""
    return _read_lines(run / EDITS, lambda _: EDIT)


def _read_lines(path: Path, kind_of: Callable[[dict[str, Any]], dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines of a file of JSON documents, each with the fields that `kind_of` says it must have."""
    try:
        lines = [parse_json(line) for line in read_file(path).splitlines() if line.strip()]
        for number, line in enumerate(lines, start=1):
            fields = parse(dict[str, Any], line, f"line {number}")
            optional = {name: kind for name, kind in OPTIONAL.items() if name in fields}
            parse({**kind_of(fields), **optional}, fields, f"line {number}")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        raise damaged(path, error) from error
    return lines
