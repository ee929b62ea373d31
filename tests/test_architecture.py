"""Imports go one way and in no circle; files and folders stay small; --help needs no torch; tests lie as modules do."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import likethat
from likethat.cli.parser import VERBS

ROOT = Path(likethat.__file__).parent
TESTS = Path(__file__).parent

# From the ground up: a module imports from its own package or from those before it, never from those after it.
PACKAGES = [
    *("errors", "windows", "config", "distributed", "runtime", "progress"),
    *("data", "models", "runs", "inference", "training", "explaining", "metrics", "report", "workflows"),
    *("estimator", "serve", "bench", "cli", "__main__"),
]
MOST_LINES, MOST_MODULES, MOST_IN_ROOT = 320, 20, 10
PUBLIC = "likethat.__version__"  # what modules may take from the package itself
LISTS = ("metrics",)  # folders of like things, one file each, may be longer
NO_PACKAGES = {Path(), Path("gpu")}  # folders of tests: on all of it, and on what a GPU computes


def name_of(file: Path) -> str:
    return ".".join(["likethat", *file.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")


def imports_of(file: Path, modules: set[str]) -> set[str]:
    """Return the modules that a file imports anywhere: at its head, in functions, for type checkers only."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in modules or inner == PUBLIC else str(node.module))
    # `likethat` itself stands above all others: it has the version, and imports the public names on first use.
    assert "likethat" not in found, f"{file} imports a public name; import it from where it is defined"
    return {name for name in found if name.startswith("likethat.") and name != PUBLIC}


def is_widened_where_it_lies(call: ast.Call) -> bool:
    """Whether a call makes double precision on a device that is not known: `x.double()`, `x.to(torch.float64)`,
    `torch.zeros(3, dtype=torch.double, device=device)`."""
    names = {ast.unparse(argument) for argument in call.args}
    made = {key.arg: ast.unparse(key.value) for key in call.keywords}
    wide = bool({"torch.double", "torch.float64"} & (names | set(made.values())))
    if isinstance(call.func, ast.Attribute) and call.func.attr in ("double", "to", "type", "new_zeros", "new_tensor"):
        return (wide or call.func.attr == "double") and not ast.unparse(call.func.value).endswith(".cpu()")
    return wide and made.get("device", "'cpu'") != "'cpu'"


@pytest.mark.parametrize(
    ("call", "widened"),
    [
        ("x.double()", True),
        ("x.cpu().double()", False),
        ("x.to(torch.float64)", True),
        ("x.to(device, dtype=torch.double)", True),
        ("x.cpu().to(torch.double)", False),
        ("torch.zeros(3, dtype=torch.double)", False),
        ("torch.zeros(3, dtype=torch.double, device=x.device)", True),
        ("torch.zeros(3, device=x.device)", False),
    ],
)
def test_what_asks_a_device_for_double_precision_is_seen(call: str, *, widened: bool) -> None:
    expression = ast.parse(call, mode="eval").body
    assert isinstance(expression, ast.Call)
    assert is_widened_where_it_lies(expression) == widened


def test_double_precision_is_never_asked_of_a_device_that_may_be_mps_and_has_none() -> None:
    """Where tensors lie on the device of the run, `wide` or `.cpu()` comes first."""
    files = (file for package in ("inference", "models", "training", "runs") for file in (ROOT / package).rglob("*.py"))
    found = [
        f"{file}:{node.lineno}"
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and is_widened_where_it_lies(node)
    ]
    assert not found, "call `runtime.wide`, which goes to the CPU where the device has no float64"


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """Return the imports of every module but `likethat` itself, which names the public functions."""
    files = {name_of(file): file for file in ROOT.rglob("*.py")}
    found = {name: imports_of(file, set(files)) for name, file in files.items() if name != "likethat"}
    found["likethat.cli.parser"] |= {f"likethat.cli.verbs.{verb}" for verb in VERBS}  # which it imports by name
    assert sum(map(len, found.values())) > 500, "the walk found too few imports to mean anything"
    unknown = {name for imported in found.values() for name in imported} - files.keys()
    assert not unknown, "imported, but not there"
    return found


def package_of(module: str) -> int:
    package = module.split(".")[1]
    assert package in PACKAGES, f"{package} has no place in the order of packages"
    return PACKAGES.index(package)


def test_imports_go_one_way(graph: dict[str, set[str]]) -> None:
    for module, imported in graph.items():
        for name in imported:
            assert package_of(name) <= package_of(module), f"{module} imports {name}, which is above it"


def test_imports_go_in_no_circle(graph: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"imports go in a circle: {' <- '.join(error.args[1])}")


def test_files_fit_in_a_head() -> None:
    files = [file for kind in ("py", "js", "css", "html") for file in ROOT.rglob(f"*.{kind}")]
    lines = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in files}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


def test_folders_can_be_overlooked() -> None:
    folders = {file.parent for file in ROOT.rglob("*.py")}
    modules = {folder: len([file for file in folder.glob("*.py") if file.name != "__init__.py"]) for folder in folders}
    long = {folder for folder, count in modules.items() if count > MOST_MODULES}
    assert {folder.name for folder in long} <= set(LISTS)
    assert len(list(ROOT.glob("*.py"))) <= MOST_IN_ROOT


def test_every_package_has_its_tests() -> None:
    packages = {folder.name for folder in ROOT.iterdir() if (folder / "__init__.py").is_file()}
    tested = {file.parent.relative_to(TESTS) for file in TESTS.rglob("test_*.py")} - NO_PACKAGES
    assert {folder.parts[0] for folder in tested} == packages
    assert [folder for folder in tested if not (ROOT / folder / "__init__.py").is_file()] == []
    names = [file.name for file in TESTS.rglob("test_*.py")]
    assert len(names) == len(set(names)), "pytest tells test files by their names alone"


def test_help_answers_before_torch_is_imported() -> None:
    code = "import sys; from likethat.cli.parser import build_parser; build_parser(); print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"
