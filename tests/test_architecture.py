"""Imports go one way; --help needs no torch; no module grows beyond a head."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import likethat

ROOT = Path(likethat.__file__).parent

# From the ground up: a module imports from its own layer or from those before it, never from those after it.
LAYERS = [
    {"errors", "values", "config", "distributed", "runtime", "progress", "made", ""},
    {"data"},
    {"models", "checkpoint"},
    {"run_dir"},
    {"calibration"},
    {"training"},
    {"classifier", "plain", "hub", "model_card"},
    {"explaining"},
    {"metrics"},
    {"report"},
    {"tensorboard", "run_data", "pipeline", "summary", "demo", "interpretability_run"}
    | {"shape", "prune_run", "combine_run", "baseline_run", "edit_run", "edit_model", "edit_history", "export_run"}
    | {"estimator"},
    {"serve"},
    {"reproduction", "bench"},
    {"verbs"},
    {"cli"},
    {"__main__"},
]


def layer_of(module: str) -> int:
    first = module.removeprefix("likethat").lstrip(".").split(".")[0]
    return next(number for number, layer in enumerate(LAYERS) if first in layer)


def test_imports_go_one_way() -> None:
    seen = set()
    for file in ROOT.rglob("*.py"):
        relative = file.relative_to(ROOT).with_suffix("")
        module = ".".join(["likethat", *relative.parts]).removesuffix(".__init__")
        if module == "likethat":
            continue  # the public names, imported on first use
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom) and node.module == "likethat":
                names = [f"likethat.{alias.name}" for alias in node.names if alias.name != "__version__"]
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                if name and name.startswith("likethat"):
                    seen.add((module, name))
                    assert layer_of(name) <= layer_of(module), f"{module} imports {name}, which is above it"
    assert len(seen) > 30, "the walk found too few imports to mean anything"


def test_files_fit_in_a_head() -> None:
    long = {str(file): lines for file in ROOT.rglob("*.py") if (lines := len(file.read_text().splitlines())) > 320}
    assert not long


def test_help_answers_before_torch_is_imported() -> None:
    code = "import sys; from likethat.cli.parser import build_parser; build_parser(); print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"
