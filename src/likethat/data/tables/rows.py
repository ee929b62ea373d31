"""The columns of a table as texts, whatever the kind of its file."""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from likethat.data.files import open_file, read_file
from likethat.errors import UserError

SEPARATORS = {".csv": ",;\t", ".tsv": "\t", ".tab": "\t"}  # spreadsheets write what their country's habits ask for
PARQUET = (".parquet", ".pq")
ENDINGS = (*SEPARATORS, *PARQUET)
MOST_ROWS = 20_000_000

FindColumns = Callable[[Sequence[str]], Mapping[str, int]]  # from a header to the place of each column that is wanted


@dataclass(frozen=True)
class Table:
    """Columns of equal length, by what they mean, and the number that each row has in the file. As in a spreadsheet,
    the header is row 1; a Parquet file has none."""

    rows: Sequence[int]
    columns: dict[str, list[Any]]


def is_table(path: Path) -> bool:
    return path.suffix.lower() in ENDINGS and path.is_file()


def read_table(table: Path, find: FindColumns) -> Table:
    """Read the wanted columns of all rows that are not empty."""
    return _read_parquet(table, find) if table.suffix.lower() in PARQUET else _read_csv(table, find)


def _read_csv(table: Path, find: FindColumns) -> Table:
    text = _decode(table)
    separators = SEPARATORS[table.suffix.lower()]
    first_line = text[: text.find("\n") + 1] or text
    separator = max(separators, key=first_line.count)
    rows: list[list[str]] = []
    try:
        # Where it raises, what was read before is there.
        rows.extend(csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True))
    except csv.Error as error:
        raise UserError(f"{table}, row {len(rows) + 1} cannot be read ({error}); mend its quotes.") from error
    if not rows or not any(name.strip() for name in rows[0]):
        raise UserError(f"{table} is empty; its first row must name its columns, such as path and label.")
    header, places = rows[0], find(rows[0])
    numbers: Sequence[int] = range(2, len(rows) + 1)
    del rows[0]
    if any(len(row) != len(header) for row in rows):
        numbers = [number for number, row in enumerate(rows, start=2) if any(map(str.strip, row))]
        rows = [row for row in rows if any(map(str.strip, row))]
        for number, row in zip(numbers, rows, strict=True):
            if len(row) != len(header):
                raise UserError(
                    f"{table}, row {number} has {len(row)} values where the first row names {len(header)} columns; "
                    "mend it, with quotes around values that hold the separator."
                )
    return Table(numbers, {name: [row[place] for row in rows] for name, place in places.items()})


def _decode(table: Path) -> str:
    try:
        data = read_file(table)
    except OSError as error:
        raise UserError(f"{table} cannot be read ({error.strerror}).") from error
    encoding = "utf-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        row = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{table}, row {row} is not UTF-8 text; save the table as 'CSV UTF-8'.") from error


def _read_parquet(table: Path, find: FindColumns) -> Table:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(
            "Reading Parquet tables needs another package; `pip install 'likethat[parquet]'`, or save the table as CSV."
        ) from error
    try:
        with open_file(table) as file:  # a regular one
            content = pyarrow.parquet.ParquetFile(file)
            if content.metadata.num_rows > MOST_ROWS:
                raise UserError(f"{table} has more than {MOST_ROWS:,} rows; split it.")
            header = content.schema_arrow.names
            places = find(header)
            found = content.read(columns=[header[place] for place in places.values()])
            columns = {name: _texts(found[header[place]]) for name, place in places.items()}
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise UserError(f"{table} cannot be read as a Parquet file ({error}); write it again.") from error
    return Table(range(1, found.num_rows + 1), columns)


def _texts(column: Any) -> list[str]:
    return ["" if value is None else str(value) for value in column.to_pylist()]
