# The newest that runs and can make a virtual environment. Another one: make PYTHON=/path/to/python3.12
PYTHON ?= $(shell for python in python3.13 python3.12 python3.11 python3; do \
	$$python -c '$(FITS)' 2>/dev/null && echo $$python && break; done)
FITS := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
# Its configuration alone, without what it needs: a test composes what `export verl` writes with it.
VERL := verl==0.9.1
# One more than CPUs, since tests of runs wait for processes; four at most, since each takes about 2 GB.
TEST_WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$(( n < 3 ? n + 1 : 4 )))
# Unit tests wait for no process, and each worker imports what they need.
CHECK_WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$(( n < 4 ? n : 4 )))
PYTEST = $(BIN)/pytest --numprocesses $(TEST_WORKERS) --dist loadfile
# In the order of the folders: the long files of tests/integration begin, and the short ones of tests/unit fill the end.
SUITE = $(PYTEST) --no-loadscope-reorder
# uv compiles nothing. Where this is set, as in many containers, each process would compile whatever it imports.
unexport PYTHONDONTWRITEBYTECODE

KILLS ?= 20

.PHONY: demo demo-smollm2 test test-all nightly check check-tests check-types check-style check-imports bench chaos mutations test-gpu dvc-yaml prefect-yaml settings-page lock clean

demo: $(READY)  ## the quickstart: trains, aligns and compares a small model
	$(BIN)/posttrain run

demo-smollm2: $(READY)  ## a real model of 135M parameters, from a wheel on PyPI, learns to answer in one sentence
	$(BIN)/posttrain run pipeline=smollm2-one-sentence model=smollm2

test: $(READY)  ## what CI runs: every test that needs no GPU, but `slow` and `nightly`
	$(SUITE) -m "not slow and not nightly"

test-all: $(READY)  ## `slow` too: before an issue is resolved
	$(SUITE) -m "not nightly"

# The extras of pyproject.toml that the lock leaves out: optimizers and formats of quantized bases.
EXTRAS = $(shell $(BIN)/python -c 'import tomllib; found = tomllib.load(open("pyproject.toml", "rb")); \
	extras = found["project"]["optional-dependencies"]; print(*{*extras["optimizers"], *extras["torchao"], *extras["quanto"]})')

nightly: $(READY)  ## all tests with all extras installed, then the chaos
	$(BIN)/pip install --quiet --no-deps $(EXTRAS)
	$(SUITE) --hypothesis-profile nightly
	$(BIN)/python -m tests.chaos --toy --kills $(KILLS) $(if $(SEED),--seed $(SEED))
	$(BIN)/python -m tests.chaos --kills $(KILLS) $(if $(SEED),--seed $(SEED)) $(CHAOS)

check: $(READY)  ## what to run before a commit: two of these at once, each prints its output when it ends
	@$(MAKE) --no-print-directory --jobs 2 --keep-going $(if $(filter output-sync,$(.FEATURES)),--output-sync=target) \
	  check-tests check-types check-style check-imports

check-tests:
	$(BIN)/pytest --numprocesses $(CHECK_WORKERS) --dist loadfile -m "not slow and not nightly" tests/unit

check-types:
	$(BIN)/mypy

check-style:
	$(BIN)/ruff check
	$(BIN)/ruff format --check

check-imports:
	$(BIN)/lint-imports --cache-dir $(VENV)/import-linter

bench: $(READY)  ## beside plain TRL scripts and LLaMA-Factory; 1 GB of rows into tokens; the record of 100,000 artifacts; DVC over 20 GB; a sweep of eight trials; what a checkpoint costs; packed rows beside rows one by one; GRPO beside plain TRL; what a wrong resume would show
	$(BIN)/python bench/run.py
	$(BIN)/python bench/peers.py $(if $(PEER_DATA),--data $(PEER_DATA)) $(if $(LLAMAFACTORY),--llamafactory $(LLAMAFACTORY))
	$(BIN)/python bench/data.py
	$(BIN)/python bench/record.py
	$(BIN)/python bench/dvc_status.py
	$(BIN)/python bench/sweep.py
	$(BIN)/python bench/checkpoints.py
	$(BIN)/python bench/packing.py
	$(BIN)/python bench/grpo.py
	$(BIN)/python bench/resume_differences.py

chaos: $(READY)  ## kills runs at random moments: KILLS=20 SEED=7 CHAOS=--cluster, or CHAOS='--pipeline sft-grpo'
	$(BIN)/python -m tests.chaos --kills $(KILLS) $(if $(SEED),--seed $(SEED)) $(CHAOS)
	$(if $(CHAOS),,$(BIN)/python -m tests.chaos --each --kills 1 --steps 40 $(if $(SEED),--seed $(SEED)))

mutations: $(READY)  ## plants faults, one at a time: do tests of `make test` catch them? ARGS=--quick: the likely ones alone
	$(BIN)/python -m tests.mutations $(ARGS)

test-gpu: $(READY)
	$(BIN)/pytest -m gpu

dvc-yaml: $(READY)  ## dvc.yaml, rendered from the default pipeline
	$(BIN)/python -m flows.dvc_yaml

prefect-yaml: $(READY)  ## prefect.yaml, rendered from the pipelines
	$(BIN)/python -m flows.prefect.deployments

settings-page: $(READY)  ## the tables of docs/settings.md, methods.md, advice.md and diagnose.md, from the dataclasses and tables of the code
	$(BIN)/python -m flows.reports.pages

lock: $(READY)  ## exact versions from pyproject.toml
	$(BIN)/uv pip compile --quiet pyproject.toml --extra dev --universal --fork-strategy fewest --python-version 3.11 --output-file requirements.lock

# pip installs torch, since it knows where this machine's builds of it are (pip.conf); uv installs the rest in a third of
# the time, without compiling it: what is imported is compiled once, by the first process that imports it.
$(READY): requirements.lock pyproject.toml
	@test -x $(BIN)/python || $(or $(PYTHON),false) -c '$(FITS)' || { \
	  echo "posttrain needs Python 3.11, 3.12 or 3.13 with the module venv, and found $(or $(PYTHON),none):"; \
	  echo "install one (Debian, Ubuntu: apt-get install python3-venv), or name it: make PYTHON=/path/to/python3.12"; \
	  exit 1; }
	@echo "set-up 1/4: a virtual environment in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "set-up 2/4: torch, for $$($(BIN)/python --version)"
	@$(BIN)/pip install $$(sed -En 's/^((torch|uv)==[^ ]+).*/\1/p' requirements.lock)
	@echo "set-up 3/4: the other packages of requirements.lock"
	@$(BIN)/uv pip install --python $(BIN)/python --requirement requirements.lock || { \
	  echo "uv failed; it does not read pip's settings, so pip tries again"; \
	  $(BIN)/pip install --requirement requirements.lock; }
	@$(BIN)/pip install --quiet --no-deps --no-compile --upgrade --target $(VENV)/verl $(VERL)
	@echo "set-up 4/4: posttrain itself"
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --editable . || \
	  $(BIN)/pip install --quiet --no-deps --editable .
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
