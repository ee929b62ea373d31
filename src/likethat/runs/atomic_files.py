"""Files that are whole or not there: atomic writes, and tensors with their JSON in one safetensors file."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from likethat.data.files import parse_json, read_file
from likethat.errors import UserError
from likethat.runs.lock import check_free

HALF_FILE = re.compile(r"\..+\.[a-z0-9_]{8}")  # names that `atomic_path` writes under


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Provide a temporary name beside `path` that takes its place when the block succeeds."""
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        temporary = Path(name)
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        raise UserError(
            f"{path} could not be written ({error.strerror or error}); make room or choose another --out. "
            "What was saved before is unharmed."
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def remove_half_files(folder: Path) -> None:
    """Remove what a killed process left of the files that it was writing there; nobody else may write there now."""
    for file in folder.glob(".*.????????"):
        if HALF_FILE.fullmatch(file.name):
            file.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_folder(out: Path, is_earlier: Callable[[Path], bool], *, overwrite: bool) -> Iterator[Path]:
    """Provide a folder to fill that takes the place of `out` when the block succeeds, and is gone when it does not.

    A folder that is not empty is replaced on request only, and only if `is_earlier` says that it is an earlier one of
    the same kind, and not something of the user's.
    """
    check_replaceable(out, is_earlier, overwrite=overwrite)
    try:
        # Parents are made at the end: until then they would be empty folders, classes if they lie among images.
        there = next(parent for parent in out.absolute().parents if os.path.lexists(parent))
        with tempfile.TemporaryDirectory(dir=there, prefix=f".{out.name}.") as temporary:
            # The folder has its final name from the start, so that what is written in it may mention it.
            new, old = Path(temporary) / out.resolve().name, Path(temporary) / ".replaced"
            new.mkdir()
            yield new
            out.parent.mkdir(parents=True, exist_ok=True)
            check_replaceable(out, is_earlier, overwrite=overwrite)  # another process may have been faster
            if out.exists():
                out.rename(old)
            new.rename(out)
    except OSError as error:
        shown = error.strerror or error
        raise UserError(f"{out} could not be written ({shown}); make room or choose another --out.") from error


def check_replaceable(out: Path, is_earlier: Callable[[Path], bool], *, overwrite: bool) -> None:
    """Refuse what `whole_folder` refuses, before long work begins."""
    check_free(out)
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; choose another --out.")
    if out.is_dir() and any(out.iterdir()):
        if not is_earlier(out):
            raise UserError(
                f"{out} is not empty and was not made by this command, so it is not replaced; choose another --out."
            )
        if not overwrite:
            raise UserError(f"{out} is there already; pass --overwrite to replace it, or another --out.")
        check_no_history(out)


def check_no_history(out: Path) -> None:
    """Refuse to replace a folder under version control, such as the clone of a repository of the hub."""
    if (out / ".git").exists():
        raise UserError(f"{out} is a git repository, whose history would be lost; choose another --out.")


def write_text(path: Path, text: str) -> None:
    with atomic_path(path) as temporary:
        # File names that are not valid Unicode have no bytes in a text; they are shown with question marks.
        temporary.write_text(text, encoding="utf-8", errors="replace")


def write_json(path: Path, document: Any) -> None:
    write_text(path, json.dumps(document, indent=1) + "\n")


@contextlib.contextmanager
def _problems_told(path: Path) -> Iterator[None]:
    """Say in a sentence what is wrong with a file that the block reads."""
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing, so {path.parent} is not a complete run folder.") from error
    except OSError as error:
        raise unreadable(path, error) from error
    except (SafetensorError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}); restore it from a copy or train again.") from error


def read_json(path: Path) -> Any:
    with _problems_told(path):
        return parse_json(read_file(path))


def unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path} cannot be read ({error.strerror or error}); restore it from a copy or train again.")


def save_tensors(path: Path, tensors: Mapping[str, Tensor], document: Any = None) -> None:
    """Save tensors and, in the file's metadata, a JSON document that belongs to them."""
    write_tensors(path, copy_tensors(tensors), document)


def copy_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors into the CPU's memory, as files have them: each in memory of its own, where two names may share one
    here."""
    return {
        name: value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, value in tensors.items()
    }


def write_tensors(path: Path, copies: dict[str, Tensor], document: Any) -> None:
    """Write copies of tensors and a JSON document into one file."""
    with atomic_path(path) as temporary:
        try:
            save_file(copies, temporary, metadata={"document": json.dumps(document)})
        except SafetensorError as error:  # the library wraps a full disk in an error of its own
            raise OSError(str(error)) from error


def load_tensors(path: Path) -> tuple[dict[str, Tensor], Any]:
    with _problems_told(path), safe_open(path, framework="pt") as file:
        document = parse_json((file.metadata() or {}).get("document", "null").encode())
        return {name: file.get_tensor(name) for name in file.keys()}, document  # noqa: SIM118


def tensor_shape(path: Path, name: str) -> tuple[int, ...]:
    """Return the shape of one tensor of a file without reading the others; none of a tensor that is not there."""
    with _problems_told(path), safe_open(path, framework="pt") as file:
        return tuple(file.get_slice(name).get_shape()) if name in file.keys() else ()  # noqa: SIM118


def with_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}/{name}": value for name, value in tensors.items()}


def strip_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    start = f"{prefix}/"
    return {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimiser's state, flat: 'parameter number/quantity'."""
    state = optimizer.state_dict()["state"]
    return {
        f"{number}/{quantity}": torch.as_tensor(value)
        for number, quantities in state.items()
        for quantity, value in quantities.items()
        if value is not None
    }


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Fill a fresh optimiser with a state as `optimizer_tensors` gave it."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        number, quantity = name.split("/")
        state.setdefault(int(number), {})[quantity] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    for parameter, quantities in optimizer.state.items():
        for quantity, value in quantities.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim:
                # Files keep no memory layout, and fused Adam wants the parameter's.
                quantities[quantity] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def copy_state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
