"""What holds for all tests: seeds, the examples that are tried, and an environment without a user's settings."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

SERVING = ("fastapi", "uvicorn", "python_multipart", "httpx", "schemathesis")
MISSING = [name for name in SERVING if find_spec(name) is None]
collect_ignore_glob = ["serve/*"] if MISSING else []

if find_spec("hypothesis") is not None:  # the tests on a GPU run where it may be missing
    from hypothesis import HealthCheck, settings

    # Properties are tried on the same examples every time, however slow the machine: a failure is never by chance.
    # `pytest --hypothesis-profile default` looks for new ones.
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=slow)
    settings.load_profile("steady")

# What a person's shell may say must not reach the commands: how wide and colourful to print, or who serves to whom.
for name in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "LIKETHAT_TOKEN"):
    os.environ.pop(name, None)
for name in ("NO_PROXY", "no_proxy"):  # servers of tests are on this machine
    os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1", "localhost"]))

# Files that take a quarter of a minute of a core or more, the longest first. Few processes share the files: were such a
# one the last, the others would wait for it.
LONGEST = """test_distributed test_resume test_train test_reproduce test_quickstart test_export test_compile
    test_attribution test_interpretability test_audit test_bench test_pressure test_windowed_run test_calibration
    test_wheel test_edit""".split()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONGEST)))


def pytest_report_header() -> str | None:
    return f"tests of the served page are left out: {', '.join(MISSING)} not installed" if MISSING else None


@pytest.fixture(scope="session", autouse=True)
def _made_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One folder for all workers, each of which has its own temporary folder in one that is this session's."""
    from helpers import runs

    own = tmp_path_factory.getbasetemp()
    runs.made_once_in = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "made-once"
    runs.made_once_in.mkdir(exist_ok=True)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
