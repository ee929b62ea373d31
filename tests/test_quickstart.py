"""The quickstart notebook, run from top to bottom as a newcomer runs it."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[1] / "examples" / "quickstart.ipynb"


def test_it_is_kept_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.id for cell in code if cell.outputs or cell.execution_count] == []


def test_it_runs_and_shows_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # everything comes with the installation
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}

    def result(cell: str) -> dict[str, str]:
        return next(output["data"] for output in outputs[cell] if output["output_type"] == "execute_result")

    assert "image/png" in result("look")
    assert "<likethat.Classifier tf_efficientnet_lite0: 3 classes, 9 prototypes>" in result("train")["text/plain"]
    correct, pictures = map(int, re.findall(r"\d+", result("accuracy")["text/plain"]))
    assert pictures == 18
    assert correct > 9, "far more than by chance, a third"
    assert "looks like that" in result("explain")["text/html"], "an explanation shows itself"
    assert "every prototype is the training patch it names" in str(outputs["verify"])
    for file in ("why.html", "run/report.html", "run/model.safetensors"):
        assert (tmp_path / file).is_file()
