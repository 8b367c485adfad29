PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
# One per CPU, four at most: more only slow each other down, and each takes about 2 GB.
TEST_WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$(( n < 4 ? n : 4 )))
PYTEST = $(BIN)/pytest --numprocesses $(TEST_WORKERS) --dist loadfile

KILLS ?= 20

.PHONY: demo test test-all nightly check bench chaos test-gpu dvc-yaml prefect-yaml lock clean

demo: $(READY)  ## the quickstart: trains, aligns and compares a small model
	$(BIN)/posttrain run

test: $(READY)  ## what CI runs: every test that needs no GPU, but `slow` and `nightly`
	$(PYTEST) -m "not slow and not nightly"

test-all: $(READY)  ## `slow` too: before an issue is resolved
	$(PYTEST) -m "not nightly"

nightly: $(READY)  ## all tests, then the chaos
	$(PYTEST)
	$(BIN)/python -m tests.chaos --toy --kills $(KILLS) $(if $(SEED),--seed $(SEED))
	$(BIN)/python -m tests.chaos --kills $(KILLS) $(if $(SEED),--seed $(SEED)) $(CHAOS)

check: $(READY)  ## what to run before a commit
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --cache-dir $(VENV)/import-linter
	$(BIN)/pytest tests/unit

bench: $(READY)  ## beside plain TRL scripts; 1 GB of rows into tokens; the record of 100,000 artifacts; DVC over 20 GB; a sweep of eight trials; what a checkpoint costs; what a wrong resume would show
	$(BIN)/python bench/run.py
	$(BIN)/python bench/data.py
	$(BIN)/python bench/record.py
	$(BIN)/python bench/dvc_status.py
	$(BIN)/python bench/sweep.py
	$(BIN)/python bench/checkpoints.py
	$(BIN)/python bench/resume_differences.py

chaos: $(READY)  ## kills runs at random moments: KILLS=20 SEED=7 CHAOS=--cluster
	$(BIN)/python -m tests.chaos --kills $(KILLS) $(if $(SEED),--seed $(SEED)) $(CHAOS)

test-gpu: $(READY)
	$(BIN)/pytest -m gpu

dvc-yaml: $(READY)  ## dvc.yaml, rendered from the default pipeline
	$(BIN)/python -m flows.dvc_yaml

prefect-yaml: $(READY)  ## prefect.yaml, rendered from the pipelines
	$(BIN)/python -m flows.deploy.prefect_yaml

lock: $(READY)  ## exact versions from pyproject.toml
	$(BIN)/uv pip compile --quiet pyproject.toml --extra dev --python-version 3.11 --output-file requirements.lock

$(READY): requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info[:2] == (3, 11) else "posttrain needs Python 3.11; make PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --requirement requirements.lock
	$(BIN)/pip install --quiet --no-deps --editable .
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
