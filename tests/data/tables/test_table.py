"""Tables as people have them, and as they break them: every bad row is told with its number."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from likethat.cli.parser import main
from likethat.data.check import check_dataset
from likethat.data.dataset import DataSet, Sample, hold_out
from likethat.data.formats import open_dataset
from likethat.data.pictures import find_pictures
from likethat.errors import UserError


def draw(path: Path, seed: int, size: tuple[int, int] = (30, 20)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve pictures of 30 x 20 pixels, without a table."""
    for number in range(12):
        draw(tmp_path / f"images/{number}.png", number)
    return tmp_path


def rows_of(count: int = 12, **columns: list[object]) -> list[dict[str, object]]:
    whole = {"path": [f"images/{n}.png" for n in range(count)], "label": ["ab"[n % 2] for n in range(count)], **columns}
    return [dict(zip(whole, values, strict=True)) for values in zip(*whole.values(), strict=True)]


def write_table(path: Path, rows: list[dict[str, object]], separator: str = ",", encoding: str = "utf-8") -> Path:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), delimiter=separator)
    writer.writeheader()
    writer.writerows(rows)
    path.write_bytes(text.getvalue().encode(encoding))
    return path


def parts_of(dataset: DataSet) -> dict[str, list[str]]:
    return {part: [sample.path for sample in dataset.part(part)] for part in ("train", "val", "test")}


def test_every_column_is_read(folder: Path) -> None:
    draw(folder / "masks/1.png", 99)
    rows = rows_of(4, split=["train", "train", "valid", "TEST"], group=["p1", "p1", "", "p2"])
    rows[3]["label"] = "b"
    boxes = [("1", "2", "10.5", "9"), ("",) * 4, ("0", "0", "30", "20"), ("3", "4", "5", "6")]
    for row, box, mask, weight in zip(rows, boxes, ["", "masks/1.png", "", ""], ["", "2.5", "1", "0.5"], strict=True):
        row |= dict(zip(("x0", "y0", "x1", "y1"), box, strict=True)) | {"mask": mask, "weight": weight}
    dataset = open_dataset(write_table(folder / "t.csv", rows))
    assert (dataset.root, dataset.kind, dataset.classes) == (folder, "table", ("a", "b"))
    assert dataset.table == folder / "t.csv"
    assert dataset.train == (
        Sample("images/0.png", 0, (1, 2, 10.5, 9), "p1", None, 1.0, 2),
        Sample("images/1.png", 1, None, "p1", "masks/1.png", 2.5, 3),
    )
    assert dataset.val == (Sample("images/2.png", 0, (0, 0, 30, 20), None, None, 1.0, 4),)
    assert dataset.test == (Sample("images/3.png", 1, (3, 4, 5, 6), "p2", None, 0.5, 5),)
    assert dataset.held_out == ()
    assert check_dataset(dataset).errors == ()
    whole = open_dataset(folder / "t.csv", full_images=True)
    assert all(sample.box is None for sample in whole.all_samples())


def test_all_kinds_of_files_hold_the_same_table(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = rows_of(weight=[1, 2, 3] * 4)
    rows[3]["label"] = "b, or Käfer"
    expected = open_dataset(write_table(folder / "t.csv", rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "t.parquet")
    for other in (
        write_table(folder / "t.tsv", rows, "\t"),
        write_table(folder / "semicolon.csv", rows, ";"),
        write_table(folder / "bom.csv", rows, encoding="utf-8-sig"),
        write_table(folder / "spreadsheet.csv", rows, "\t", encoding="utf-16"),
        folder / "t.parquet",
    ):
        found = open_dataset(other)
        assert parts_of(found) == parts_of(expected), other
        assert found.classes == expected.classes == ("a", "b", "b, or Käfer")
    assert [sample.row for sample in open_dataset(folder / "t.parquet").all_samples() if "/0." in sample.path] == [1]


def test_without_split_parts_are_held_out_as_of_folders(folder: Path) -> None:
    dataset = open_dataset(write_table(folder / "t.csv", rows_of()), seed=3)
    samples = [Sample(f"images/{n}.png", n % 2) for n in range(12)]
    kept, test, val = hold_out(samples, "ab", [0.2, 0.1], seed=3)
    expected = {"train": kept, "val": val, "test": test}
    assert parts_of(dataset) == {part: [s.path for s in own] for part, own in expected.items()}
    assert dataset.held_out == ("test", "val")
    shuffled = write_table(folder / "u.csv", rows_of()[::-1])
    assert parts_of(open_dataset(shuffled, seed=3)) == parts_of(dataset), "the order of rows means nothing"


def test_columns_by_other_names(folder: Path) -> None:
    rows = [{"File": row["path"], "Diagnosis": row["label"], "label": "other"} for row in rows_of()]
    table = write_table(folder / "t.csv", rows)
    dataset = open_dataset(table, columns="path=file, label=Diagnosis")
    assert dataset.classes == ("a", "b")
    with pytest.raises(UserError, match="has no column 'diagnose', which --columns names; its columns are File"):
        open_dataset(table, columns="path=file,label=diagnose")
    with pytest.raises(UserError, match="not 'labels=Diagnosis'"):
        open_dataset(table, columns="labels=Diagnosis")
    # What a run has in its configuration fits tables with the usual names, too.
    usual = write_table(folder / "usual.csv", rows_of())
    assert open_dataset(usual, columns="path=file,label=Diagnosis", strict=False).classes == ("a", "b")


def test_pictures_may_lie_elsewhere(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    names = [{"path": f"{n}.png", "label": "ab"[n % 2]} for n in range(12)]
    (folder / "tables").mkdir()
    dataset = open_dataset(write_table(folder / "tables/t.csv", names), images="../images")
    assert dataset.root == folder / "images"
    assert check_dataset(dataset).errors == ()
    above = [{"path": f"../images/{n}.png", "label": "ab"[n % 2]} for n in range(12)]
    above[3]["path"] = str(folder / "images/3.png")
    above[4]["path"] = "..\\images\\4.png"
    dataset = open_dataset(write_table(folder / "tables/u.csv", above))
    assert dataset.root == folder
    assert sorted(s.path for s in dataset.all_samples()) == sorted(f"images/{n}.png" for n in range(12))
    assert all(not os.path.isabs(s.path) and ".." not in s.path for s in dataset.all_samples())
    with pytest.raises(UserError, match=r"row 2: there is no file .*tables/0.png, nor any .*--images FOLDER"):
        open_dataset(folder / "tables/t.csv")
    with pytest.raises(UserError, match=r"There is no folder .*nowhere, where --images says"):
        open_dataset(folder / "tables/t.csv", images="nowhere")


def test_pages_are_rows(tmp_path: Path) -> None:
    frames = [Image.fromarray(np.random.default_rng(n).integers(0, 256, (9, 9, 3), dtype=np.uint8)) for n in range(8)]
    frames[0].save(tmp_path / "stack.tif", save_all=True, append_images=frames[1:])
    rows = [{"path": "stack.tif", "label": "ab"[n % 2], "page": n + 1} for n in range(8)]
    dataset = open_dataset(write_table(tmp_path / "t.csv", rows))
    expected = {"stack.tif", *(f"stack.tif#page={n}" for n in range(2, 9))}
    assert {sample.path for sample in dataset.all_samples()} == expected
    report = check_dataset(dataset)
    assert report.problems == ()
    assert len(set(report.sha256.values())) == 8
    assert not [note for note in report.notes if "several pages" in note]
    alone = open_dataset(write_table(tmp_path / "u.csv", [{**rows[0], "page": ""}, *rows[1:2]] * 1))
    assert alone.train
    pictures, skipped = find_pictures([str(tmp_path / "t.csv")])
    assert (pictures[1], skipped) == (str(tmp_path / "stack.tif#page=2"), [])


def test_only_the_first_page_of_a_folders_files_is_used_and_it_is_told(folder: Path) -> None:
    frames = [Image.new("RGB", (9, 9), color) for color in ("red", "blue")]
    frames[0].save(folder / "images/12.tif", save_all=True, append_images=frames[1:])
    rows = [*rows_of(), {"path": "images/12.tif", "label": "a"}]
    (note,) = check_dataset(open_dataset(write_table(folder / "t.csv", rows))).notes
    assert note.startswith("1 files have several pages, of which the first is used, such as images/12.tif")


def changed(number: int, **values: object) -> list[dict[str, object]]:
    """Rows of which one is another."""
    rows = rows_of()
    rows = [{**row, **dict.fromkeys(values.keys() - row.keys(), "")} for row in rows]
    rows[number] |= values
    return rows


SPLIT = ["train"] * 8 + ["val"] * 2 + ["test"] * 2


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (changed(3, label=" "), "row 5: the label is empty"),
        (changed(3, label="a\x07b"), "row 5: the label is longer than 200 letters, or has some that cannot be shown"),
        (changed(4, path=""), "row 6: the path is empty"),
        (changed(4, path="images/1.png"), "row 6: images/1.png is the picture of row 3 too"),
        (changed(4, path="./images/../images/1.png"), "row 6: images/1.png is the picture of row 3 too"),
        (changed(4, path="x\0y"), "row 6: the path has a zero byte"),
        (changed(5, weight="heavy"), "row 7: weight is 'heavy', which is no number"),
        (changed(5, weight="0"), "row 7: the weight is 0; it must be above 0"),
        (changed(5, weight="nan"), "row 7: weight is 'nan'"),
        (changed(6, x0="1", y0="1", x1="5", y1=""), "row 8: y1 is '', which is no number"),
        (changed(6, x0="5", y0="1", x1="5", y1="9"), "row 8: the box 5,1,5,9 is none"),
        (changed(6, x0="-5", y0="1", x1="5", y1="9"), "row 8: the box -5,1,5,9 is none"),
        (changed(7, page="0"), "row 9: the page is '0'; pages are numbered from 1"),
        (
            [{**r, "split": s} for r, s in zip(changed(9, label="c"), SPLIT, strict=True)],
            "row 11: 'c' is a label of val",
        ),
        ([{**r, "split": "test"} for r in rows_of()], "has no row whose split is train"),
        ([{**r, "split": "later"} for r in rows_of()], r"row 2: the split is 'later'; write train.*and 9 more rows"),
        ([{**r, "label": "a"} for r in rows_of()], "has a single label, 'a'"),
        ([{"file": "a", "label": "b"}], "has no column 'path'; its columns are file, label. Say .*--columns path=file"),
        ([{**r, "x0": 1, "y0": 2} for r in rows_of()], "a box without x1, y1"),
        ([{**r, "LABEL": 1} for r in rows_of()], "has 2 columns called 'label'"),
    ],
)
def test_bad_tables_get_a_sentence_with_the_rows_number(
    folder: Path, rows: list[dict[str, object]], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    table = write_table(folder / "t.csv", rows)
    with pytest.raises(UserError, match=told):
        open_dataset(table)
    assert main(["train", str(table), "--out", str(folder / "run")]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert not (folder / "run").exists(), "nothing is half-written"


def test_bad_files_are_no_tables(folder: Path) -> None:
    table = folder / "t.csv"
    for content, told in (
        (b"", "is empty"),
        (b"path,label\n", "has no rows below its header"),
        (b"path,label\nimages/0.png,a\nimages/1.png,b,c\n", "row 3 has 3 values where the first row names 2 columns"),
        (b'path,label\nimages/0.png,"a\n', "row 2 cannot be read"),
        ("path,label\nimages/0.png,a\nimages/1.png,Käfer\n".encode("latin-1"), "row 3 is not UTF-8 text"),
        (b"path,label\n" + b"x" * 200_000 + b",a\n", "row 2 cannot be read"),
    ):
        table.write_bytes(content)
        with pytest.raises(UserError, match=told):
            open_dataset(table)
    (folder / "t.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(UserError, match="cannot be read as a Parquet file"):
        open_dataset(folder / "t.parquet")
    with pytest.raises(UserError, match=r"is a file: give the folder .*or a table that lists them \(.csv"):
        open_dataset(folder / "images/0.png")


def test_empty_lines_are_no_rows_but_count(folder: Path) -> None:
    table = write_table(folder / "t.csv", rows_of())
    lines = table.read_text().splitlines()
    table.write_text("\n".join([*lines[:3], "", *lines[3:], ",", ""]) + "\n")
    rows = {sample.path: sample.row for sample in open_dataset(table).all_samples()}
    assert (rows["images/1.png"], rows["images/2.png"], len(rows)) == (3, 5, 12)


def test_what_does_not_fit_its_picture_is_a_problem_with_its_row(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw(folder / "masks/small.png", 5, (10, 20))
    draw(folder / "masks/good.png", 6)
    os.mkfifo(folder / "images/pipe.png")
    keys = ("x0", "y0", "x1", "y1", "mask")
    rows = [{**row, **dict.fromkeys(keys, "")} for row in rows_of()]
    rows[2] |= dict(zip(keys, ("0", "0", "300", "20", ""), strict=True))
    rows[3]["mask"], rows[4]["mask"], rows[5]["mask"] = "masks/small.png", "masks/none.png", "masks/good.png"
    rows[6]["path"], rows[7]["path"] = "images/gone.png", "images/pipe.png"
    table = write_table(folder / "t.csv", rows)
    report = check_dataset(open_dataset(table))
    problems = {problem.path: (problem.kind, problem.text) for problem in report.errors}
    assert {path: kind for path, (kind, _) in problems.items()} == {
        "images/2.png": "box", "images/3.png": "mask", "images/4.png": "mask",
        "images/gone.png": "unreadable", "images/pipe.png": "unreadable",
    }  # fmt: skip
    text = {path: text for path, (_, text) in problems.items()}
    assert text["images/2.png"].startswith(
        "row 4: the box 0,0,300,20 reaches beyond the picture, which has 30x20 pixels"
    )
    assert text["images/3.png"].startswith("row 5: the mask masks/small.png has 10x20 pixels, and the picture 30x20")
    assert "row 6: the mask masks/none.png: cannot be opened (No such file" in text["images/4.png"]
    assert "row 8: cannot be opened (No such file" in text["images/gone.png"]
    assert "row 9: cannot be opened (it is a pipe" in text["images/pipe.png"]
    assert main(["data", "check", str(table)]) == 1
    assert "problem: images/2.png: row 4: the box" in capsys.readouterr().out
    good = report.without_bad()
    assert len(good.all_samples()) == 12 - len(problems)


def test_a_large_table_is_read_in_bulk(folder: Path) -> None:
    """Slow would be a row at a time; a hundred thousand rows take a second or two."""
    lines = [f"images/{n}.png,{'abcdefgh'[n // 5 % 8]},g{n // 5}\n" for n in range(100_000)]
    (folder / "t.csv").write_text("path,label,group\n" + "".join(lines))
    dataset = open_dataset(folder / "t.csv")
    counts = {part: len(dataset.part(part)) for part in ("train", "val", "test")}
    assert sum(counts.values()) == 100_000
    assert abs(counts["test"] - 20_000) <= 40
    assert abs(counts["val"] - 10_000) <= 40
    groups = {part: {sample.group for sample in dataset.part(part)} for part in counts}
    assert not groups["train"] & groups["val"] | groups["train"] & groups["test"] | groups["val"] & groups["test"]
