# make demo: train on the embedded birds and show the report.   make test: lint and all tests.   make docs: the pages, as a site.
PYTHON ?= python3
BIN := .venv/bin

# Bytecode is kept, and nowhere but in .venv: pip compiles nothing, and to load torch and timm from source takes 10 s of a core
# instead of 4, in every process. Some images of Python say that none is written.
export PYTHONPYCACHEPREFIX := $(CURDIR)/.venv/bytecode
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test pytest test-gpu browser lint docs benchmarks clean

.venv/installed: pyproject.toml
	@echo "== setting up .venv (torch and friends: a few minutes the first time)"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e '.[dev,tensorboard]'
	$(BIN)/python -c 'import likethat.workflows.train'  # compiles what all processes load, before several of them would
	@touch $@

demo: .venv/installed
	$(BIN)/likethat demo --out demo --overwrite

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The tests of the pages look at them in Chromium, and are skipped, with a word, where there is none.
browser:
	@if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "== installing Chromium, in which the tests look at the pages"; \
		{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
			chromium chromium-driver >/dev/null; } || echo "== not installed; the tests of the pages are skipped"; \
	else echo "== no chromium and chromedriver here, so the tests of the pages are skipped; install both to run them"; fi

# Three processes for two cores, each with one thread: a third of their time they wait for commands that they have started.
WORKERS = $(shell $(PYTHON) -c "import os; print(min(4, 3 * os.cpu_count() // 2))")
pytest: .venv/installed browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Linters beside them: mypy alone would take minutes of one core where it has never run.
test: .venv/installed
	$(MAKE) --jobs 2 lint pytest

# On a machine with a GPU, with what is installed there: nothing is set up.
test-gpu:
	PYTHONPATH=src $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m pytest -m gpu -rs tests/gpu

docs: .venv/installed
	$(BIN)/mkdocs build --strict --quiet
	@echo "Open $(CURDIR)/site/index.html in a browser."

benchmarks: .venv/installed
	$(BIN)/likethat bench
	for file in benchmarks/bench_*.py; do $(BIN)/python $$file || exit 1; done

clean:
	rm -rf .venv demo site build
