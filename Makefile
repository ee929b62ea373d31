# make demo: train on the embedded birds and show the report.   make test: lint and all tests.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint benchmarks clean

.venv/installed: pyproject.toml
	@echo "== setting up .venv (torch and friends: a few minutes the first time)"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,tensorboard]'
	@touch $@

demo: .venv/installed
	$(BIN)/likethat demo --out demo --overwrite

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest

benchmarks: .venv/installed
	for file in benchmarks/bench_*.py; do $(BIN)/python $$file || exit 1; done

clean:
	rm -rf .venv demo build
