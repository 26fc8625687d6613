# Needs only Python (3.11 or newer) and make. `make setup` builds .venv; everything else runs inside it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One BLAS thread: the kernels are compared and tested one thread at a time, and runs repeat to the byte.
include deploy/worker.env
export

.PHONY: setup demo screenshot test lint types check benchmarks paper clean

setup: $(VENV)/.installed

# What runs; `make demo` does without the tools of developers.
$(VENV)/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "toffee_dist needs Python 3.11 or newer; try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.installed: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: $(VENV)/.ready
	$(BIN)/python jobs/demo.py

# The picture of the README; needs Chromium and its driver.
screenshot: setup
	$(BIN)/python -m tests.browser docs/report.png

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

check: lint types

test: check
	$(BIN)/python -m pytest

# The paper's Table 2 on ../shared/data, side by side with the paper's numbers.
paper: setup
	$(BIN)/python benchmarks/evaluate.py

benchmarks: setup
	$(BIN)/python benchmarks/solver.py
	$(BIN)/python benchmarks/quality.py
	$(BIN)/python benchmarks/rhythm.py
	$(BIN)/python benchmarks/ingest.py
	$(BIN)/python benchmarks/defaults.py
	$(BIN)/python benchmarks/scaling.py
	$(BIN)/python benchmarks/scaling.py --large
	$(BIN)/python benchmarks/rescal.py
	$(BIN)/python benchmarks/evaluate.py --best --cache --rescal
	$(BIN)/python benchmarks/future.py

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
