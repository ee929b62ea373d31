"""The wheel, installed into an environment that knows nothing of the source tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from helpers.runs import DEFAULT, make_tiny_birds

ROOT = Path(__file__).parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build it from a copy of the sources, so that nothing that was built before gets into it."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    offline = ("--no-deps", "--no-index", "--no-build-isolation", "--quiet")
    subprocess.run([*PIP, "wheel", str(source), *offline, "--wheel-dir", str(folder)], check=True)
    (built,) = folder.glob("likethat-*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an environment with this wheel alone, which borrows its dependencies from the one that runs the tests.

    A path in a .pth file is searched, but the .pth files within it are not read: an editable installation stays unseen.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    subprocess.run([*PIP, "--python", str(python), "install", "--no-deps", "--no-index", "-q", str(wheel)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return folder


def test_every_file_of_the_package_is_in_it(wheel: Path) -> None:
    names = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=False)
    if names.returncode:
        pytest.skip("the sources are not in a git repository")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    tracked = {name.removeprefix("src/") for name in names.stdout.splitlines() if (ROOT / name).is_file()}
    assert packed == tracked


def test_it_works_on_its_own(environment: Path, tmp_path: Path) -> None:
    shell = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def say(command: str, *arguments: object) -> str:
        done = subprocess.run(
            [environment / "bin" / command, *map(str, arguments)],
            cwd=tmp_path,
            env={**shell, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert Path(say("python", "-c", "import likethat; print(likethat.__file__)")).is_relative_to(environment)
    assert "usage: likethat" in say("likethat", "--help")
    birds = make_tiny_birds(tmp_path / "birds")
    say("likethat", "train", birds, "--out", "run", *DEFAULT)
    assert "<svg" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    picture = next((birds / "test").rglob("*.jpg"))
    say("likethat", "explain", "run", picture, "--out", "why", "--device", "cpu")
    assert "<style>" in next((tmp_path / "why").glob("*.html")).read_text(encoding="utf-8")
