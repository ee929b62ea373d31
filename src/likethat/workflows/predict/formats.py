"""The files that answers are written to: CSV, JSON lines or Parquet."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from likethat.errors import UserError

Row = dict[str, Any]  # one picture's answer, see `answers.py`

REASONS = 3  # told of each prediction
BETWEEN = "|"  # classes of a prediction set, in a table
FIELDS = ("path", "class", "probability", "prediction_set", "level", "abstains", "error")
OF_A_REASON = ("prototype", "name", "class", "points", "similarity", "source", "box")
COLUMNS = (*FIELDS, *(f"reason_{n}_{name}" for n in range(1, REASONS + 1) for name in OF_A_REASON))
ROW_GROUP = 100  # batches in a piece of a Parquet file


@dataclass(frozen=True)
class AnswerFormat:
    """How the answers of a batch become bytes, and how the bytes of all batches, in order, become a file."""

    encode: Callable[[Sequence[Row]], bytes]
    write: Callable[[Path, Iterable[bytes]], None]


def format_of(out: Path) -> AnswerFormat:
    """Return the format that the ending of the file asks for."""
    found = FORMATS.get(out.suffix.lower())
    if found is None:
        raise UserError(f"Answers are written as .csv, .jsonl or .parquet; {out} ends with none of them.")
    if out.suffix.lower() == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise UserError("Parquet files need pyarrow; `pip install 'likethat[parquet]'`, or write .csv or .jsonl.")
    return found


def encode_csv(rows: Sequence[Row]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(_cells(row) for row in rows)
    return _bytes(text.getvalue())


def _cells(row: Row) -> list[Any]:
    """Return a row of a table: lists become texts, a yes or no says so, and what there is none of is empty."""
    chosen, abstains = row["prediction_set"], row["abstains"]
    cells = [
        row["path"],
        row["class"],
        row["probability"],
        None if chosen is None else BETWEEN.join(chosen),
        row["level"],
        None if abstains is None else "yes" if abstains else "no",
        row["error"],
    ]
    for reason in row["reasons"]:
        cells += [*(reason[name] for name in OF_A_REASON[:-1]), " ".join(map(str, reason["box"]))]
    return cells + [None] * (len(COLUMNS) - len(cells))


def encode_json(rows: Sequence[Row]) -> bytes:
    return _bytes("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _bytes(text: str) -> bytes:
    # File names that are not valid Unicode have no bytes in a text; they are shown with question marks.
    return text.encode("utf-8", "replace")


def write_csv(path: Path, batches: Iterable[bytes]) -> None:
    _write_lines(path, [_bytes(",".join(COLUMNS) + "\n")], batches)


def write_json(path: Path, batches: Iterable[bytes]) -> None:
    _write_lines(path, [], batches)


def _write_lines(path: Path, head: Iterable[bytes], batches: Iterable[bytes]) -> None:
    with path.open("wb") as file:
        file.writelines(head)
        file.writelines(batches)


def write_parquet(path: Path, batches: Iterable[bytes]) -> None:
    """Write lists and reasons as columns of their own kind, some batches at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = {"prototype": pa.int64(), "points": pa.float64(), "similarity": pa.float64(), "box": pa.list_(pa.float64())}
    reason = pa.struct([(name, kinds.get(name, pa.string())) for name in OF_A_REASON])
    kinds = {
        "probability": pa.float64(),
        "prediction_set": pa.list_(pa.string()),
        "level": pa.float64(),
        "abstains": pa.bool_(),
        "reasons": pa.list_(reason),
    }
    schema = pa.schema([(name, kinds.get(name, pa.string())) for name in (*FIELDS, "reasons")])
    with pq.ParquetWriter(path, schema) as file:
        rows: list[Row] = []
        for number, answers in enumerate(batches, start=1):
            rows += map(json.loads, answers.splitlines())
            if number % ROW_GROUP == 0:
                file.write_table(pa.Table.from_pylist(rows, schema))
                rows = []
        if rows:
            file.write_table(pa.Table.from_pylist(rows, schema))


FORMATS = {
    ".csv": AnswerFormat(encode_csv, write_csv),
    ".jsonl": AnswerFormat(encode_json, write_json),
    ".parquet": AnswerFormat(encode_json, write_parquet),
}
