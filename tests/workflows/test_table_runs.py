"""A run on a table, from training to the web page: its columns, its patients, its range of values, and no names."""

from __future__ import annotations

import csv
import json
import shutil
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from helpers.dicom import write_dicom
from helpers.runs import QUICK, TINY
from helpers.serving import serving
from PIL import Image

from likethat.cli.parser import main
from likethat.data.decode import to_input
from likethat.data.formats import open_by_config
from likethat.runs import layout
from likethat.runs.classifier import load

COLUMNS = ["--columns", "path=file,label=diagnosis,group=patient"]
LOW, HIGH = 200, 3000  # of scans whose scanner writes 12 bits into 16


def scan(seed: int, sick: bool) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values_HW = rng.normal(900, 80, (64, 64))
    y, x = rng.integers(8, 40, 2)
    values_HW[y : y + 16, x : x + 16] += 1500 if sick else 300
    return values_HW.clip(0, 4095).astype(np.uint16)


def write_studies(root: Path) -> Path:
    """Twelve patients with four scans each: as PNG, TIFF, a page of a TIFF, and DICOM."""
    (root / "scans").mkdir(parents=True)
    rows = []
    for patient in range(12):
        label, start = ("sick/acute", "well")[patient % 2], f"scans/{patient}"
        first, second, third, fourth = (scan(4 * patient + n, patient % 2 == 0) for n in range(4))
        Image.fromarray(first).save(root / f"{start}.png")
        Image.fromarray(second).save(root / f"{start}.tif", save_all=True, append_images=[Image.fromarray(third)])
        write_dicom(root / f"{start}.dcm", fourth)
        files = ((f"{start}.png", ""), (f"{start}.tif", 1), (f"{start}.tif", 2), (f"{start}.dcm", ""))
        rows += [(file, page, label, f"Secret Patient {patient}") for file, page in files]
    with (root / "studies.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("file", "page", "diagnosis", "patient"), *rows])
    return root / "studies.csv"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("studies")
    table = write_studies(folder / "data")
    values = ["--value-range", f"{LOW},{HIGH}"]
    assert main(["train", str(table), "--out", str(folder / "run"), *COLUMNS, *values, *QUICK]) == 0
    return folder


def told(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    assert main([str(word) for word in words]) == code
    return "".join(capsys.readouterr())


def test_the_split_is_by_patients_and_the_record_says_how_to_open_it_again(made: Path) -> None:
    record = layout.read_record(made / "run")
    assert record.data.table == str(made / "data/studies.csv")
    dataset = open_by_config(record.data.source, record.config)
    groups = [{sample.group for sample in dataset.part(part)} for part in ("train", "val", "test")]
    assert [len(own) for own in groups] == [8, 2, 2]
    assert len(set().union(*groups)) == 12
    assert record.data.counts == {"train": 32, "val": 8, "test": 8}


def test_pixels_are_read_from_the_stated_range_wherever_they_come_from(made: Path) -> None:
    classifier, data = load(made / "run", "cpu"), made / "data/scans"
    for name, seed in (("3.png", 12), ("3.tif", 13), ("3.tif#page=2", 14), ("3.dcm", 15)):
        share_HW = (scan(seed, False).astype(float) - LOW) / (HIGH - LOW)
        gray_HW = np.floor(np.clip(share_HW, 0, 1) * 255 + 0.5).astype(np.uint8)
        expected, _ = to_input(Image.fromarray(gray_HW).convert("RGB"), None, (64, 64))
        (pixels,) = classifier.prepare(data / name).pixels
        assert np.array_equal(pixels.permute(1, 2, 0).numpy(), expected), name


@pytest.mark.parametrize("where", ["here", "moved"])
def test_later_verbs_need_no_columns(
    made: Path, tmp_path: Path, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run, data = made / "run", []
    if where == "moved":
        shutil.copytree(made / "data", tmp_path / "elsewhere")
        data = ["--data", tmp_path / "elsewhere" / "studies.csv"]
    device = ["--device", "cpu"]
    assert told(capsys, "evaluate", run, *data, *device).startswith("8 test images")
    verified = told(capsys, "verify", run, *data, *device)
    assert "every prototype is the training patch it names" in verified
    assert "sources: proven" in verified
    assert "pictures: proven" in verified
    assert "calibration: proven" in verified
    told(capsys, "calibrate", run, *data, *device)
    told(capsys, "edit", run, *data, "--out", tmp_path / "edited", "--ban", 0, *device)
    told(capsys, "prune", run, *data, "--out", tmp_path / "pruned", "--keep-one", *device)
    told(capsys, "atlas", run, *data, "--out", tmp_path / "atlas", *device)
    assert "every prototype is" in told(capsys, "verify", tmp_path / "edited", *data, *device)


def test_a_table_of_other_pictures_may_have_the_usual_names(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["path,label"]
    for number in range(6):
        Image.fromarray(scan(100 + number, number % 2 == 0)).save(tmp_path / f"{number}.png")
        lines.append(f"{number}.png,{('sick/acute', 'well')[number % 2]}")
    (tmp_path / "other.csv").write_text("\n".join(lines))
    run, device = made / "run", ["--device", "cpu"]
    assert told(capsys, "evaluate", run, "--data", tmp_path / "other.csv", *device).startswith("6 images")
    answers = json.loads(told(capsys, "predict", run, tmp_path / "other.csv", *device, "--json"))
    assert [Path(image["path"]).name for image in answers["images"]] == [f"{number}.png" for number in range(6)]
    explained = json.loads(told(capsys, "explain", run, made / "data/studies.csv", *device, "--json"))
    assert len(explained["images"]) == 48
    lines[1] = lines[1].replace("sick/acute", "unknown")
    (tmp_path / "other.csv").write_text("\n".join(lines))
    assert "does not know: unknown" in told(capsys, "evaluate", run, "--data", tmp_path / "other.csv", *device, code=2)


def test_no_patient_is_named_anywhere(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made / "run"
    shown = told(capsys, "explain", run, made / "data/scans/3.dcm", "--out", tmp_path / "why", "--device", "cpu")
    shown += told(capsys, "data", "check", made / "data/studies.csv", *COLUMNS, "--json")
    shown += told(capsys, "info", run)
    assert "Secret" not in shown
    files = [file for folder in (run, tmp_path / "why") for file in folder.rglob("*") if file.is_file()]
    assert len(files) > 10
    assert not [file for file in files if b"Secret" in file.read_bytes()]


def test_uploads_are_read_as_files_are(made: Path) -> None:
    classifier = load(made / "run", "cpu")
    with serving(classifier) as client:
        for name in ("3.png", "3.tif", "3.dcm"):
            file = made / "data/scans" / name
            sent = client.post("/api/explain", files={"file": (name, BytesIO(file.read_bytes()))})
            assert sent.status_code == 200, sent.text
            (answer,) = sent.json()["images"]
            best = {entry["name"]: entry["probability"] for entry in answer["classes"]}
            assert best == pytest.approx(classifier.predict(file).probabilities, abs=1e-5)


def test_data_check_says_how_values_are_read(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notes = json.loads(told(capsys, "data", "check", made / "data/studies.csv", *COLUMNS, "--json"))["notes"]
    assert len(notes) == 2
    assert notes[0].startswith("36 pictures of 16-bit (values ")
    assert "are read from 0 (black) to 65535 (white); most of that is empty" in notes[0]
    assert notes[0].endswith("--value-range 0,4095")
    assert notes[1].startswith("12 pictures of DICOM (values ")
    stated = told(capsys, "data", "check", made / "data/studies.csv", *COLUMNS, "--value-range", "200,3000")
    assert "are read from 200 (black) to 3000 (white)" in stated
    assert "empty" not in stated


def test_near_duplicates_are_shown_in_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(20):
        part, label = ("train", "val", "test")[(number > 9) + (number > 14)], "ab"[number % 2]
        target = tmp_path / "data" / part / label / f"{number}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((scan(number, label == "a") // 16).astype(np.uint8)).save(target)
    image = Image.open(tmp_path / "data/train/a/0.png")
    image.save(tmp_path / "data/test/a/burst.jpg", quality=95)
    for verb in ("train", "baseline"):
        options = QUICK if verb == "train" else [*TINY, "--baseline-epochs", "1"]
        shown = told(capsys, verb, tmp_path / "data", "--out", tmp_path / verb, *options)
        assert "test/a/burst.jpg and train/a/0.png (train): accuracies on them do not hold" in " ".join(shown.split())
        report = (tmp_path / verb / layout.REPORT).read_text()
        assert "Near-duplicates between splits" in report
        manifest = json.loads((tmp_path / verb / layout.MANIFEST).read_text())
        assert layout.NEAR_DUPLICATES in manifest["files"]
