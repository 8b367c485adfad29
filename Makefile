# The newest that runs and can make a virtual environment. Another one: make PYTHON=/path/to/python3.12
# Sought once, where it is needed.
PYTHON ?= $(eval PYTHON := $(shell for python in python3.13 python3.12 python3.11 python3; do \
	$$python -c '$(FITS)' 2>/dev/null && echo $$python && break; done))$(PYTHON)
FITS := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
TESTS := $(VENV)/tests
SETUP_LOG := $(VENV)/setup.log
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

.PHONY: demo demo-smollm2 test test-all canary nightly check check-tests check-types check-style check-imports bench chaos mutations test-gpu dvc-yaml prefect-yaml settings-page docs lock clean

demo: $(READY)  ## the quickstart: trains, aligns and compares a small model
	$(BIN)/posttrain run

demo-smollm2: $(TESTS)  ## a real model of 135M parameters, from a wheel on PyPI, learns to answer in one sentence
	$(BIN)/posttrain run pipeline=smollm2-one-sentence model=smollm2

test: $(TESTS)  ## what CI runs: every test that needs no GPU, but `slow` and `nightly`
	$(SUITE) --timeout 240 -m "not slow and not nightly"

test-all: $(TESTS)  ## `slow` too: before an issue is resolved
	$(SUITE) -m "not nightly"

canary: $(READY)  ## runs each method and kernel once; names what the installed versions change: after `make lock`
	$(BIN)/posttrain canary check

# The extras of pyproject.toml that the lock leaves out: optimizers and formats of quantized bases.
EXTRAS = $(shell $(BIN)/python -c 'import tomllib; found = tomllib.load(open("pyproject.toml", "rb")); \
	extras = found["project"]["optional-dependencies"]; print(*{*extras["optimizers"], *extras["torchao"], *extras["quanto"]})')

nightly: $(TESTS)  ## all tests with all extras installed, then the chaos
	$(BIN)/pip install --quiet --no-deps $(EXTRAS)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --overrides requirements.lock --editable '.[eval,wandb,trackio]'
	$(SUITE) --hypothesis-profile nightly
	$(BIN)/python -m tests.chaos --toy --kills $(KILLS) $(if $(SEED),--seed $(SEED))
	$(BIN)/python -m tests.chaos --kills $(KILLS) $(if $(SEED),--seed $(SEED)) $(CHAOS)

check: $(TESTS)  ## what to run before a commit: two of these at once, each prints its output when it ends
	@$(MAKE) --no-print-directory --jobs 2 --keep-going $(if $(filter output-sync,$(.FEATURES)),--output-sync=target) \
	  check-tests check-types check-style check-imports docs

check-tests:
	$(BIN)/pytest --numprocesses $(CHECK_WORKERS) --dist loadfile -m "not slow and not nightly" tests/unit

check-types:
	$(BIN)/mypy

check-style:
	$(BIN)/ruff check
	$(BIN)/ruff format --check

check-imports:
	$(BIN)/lint-imports --cache-dir $(VENV)/import-linter

bench: $(TESTS)  ## beside plain TRL scripts and LLaMA-Factory; 1 GB of rows into tokens; the record of 100,000 artifacts; DVC over 20 GB; a sweep of eight trials; what a checkpoint costs; packed rows beside rows one by one; GRPO beside plain TRL; what a wrong resume would show; what the server of steps costs
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
	$(BIN)/python bench/steps.py

chaos: $(TESTS)  ## kills runs at random moments: KILLS=20 SEED=7 CHAOS=--cluster, or CHAOS='--pipeline sft-grpo'
	$(BIN)/python -m tests.chaos --kills $(KILLS) $(if $(SEED),--seed $(SEED)) $(CHAOS)
	$(if $(CHAOS),,$(BIN)/python -m tests.chaos --each --kills 1 --steps 40 $(if $(SEED),--seed $(SEED)))

mutations: $(TESTS)  ## plants faults, one at a time: do tests of `make test` catch them? ARGS=--quick: the likely ones alone
	$(BIN)/python -m tests.mutations $(ARGS)

test-gpu: $(TESTS)
	$(BIN)/pytest -m gpu

dvc-yaml: $(READY)  ## dvc.yaml, rendered from the default pipeline
	$(BIN)/python -m flows.dvc_yaml

prefect-yaml: $(READY)  ## prefect.yaml, rendered from the pipelines
	$(BIN)/python -m flows.prefect.deployments

settings-page: $(READY)  ## the tables of docs/settings.md, methods.md, advice.md and diagnose.md, from the dataclasses and tables of the code
	$(BIN)/python -m flows.reports.pages

docs: $(TESTS)  ## the pages as a site, build/site/index.html; a link that leads nowhere ends it
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

lock: $(TESTS)  ## exact versions from pyproject.toml; install them, then `make canary`: docs/canary.md
	$(BIN)/uv pip compile --quiet pyproject.toml --extra dev --universal --fork-strategy fewest --python-version 3.11 --output-file requirements.lock

# A command of the set-up: its output goes to a log, whose end is shown if it fails.
logged = { $(1); } >>$(SETUP_LOG) 2>&1 || { tail -n 20 $(SETUP_LOG); echo "the set-up failed; all of its log: $(SETUP_LOG)"; exit 1; }

# pip installs torch, since it knows where this machine's builds of it are (pip.conf); uv installs the rest in a third of
# the time. Neither compiles: what is imported is compiled once, by the first process that imports it.
# The demo needs no tools of tests: the lock only says which versions are installed.
$(READY): requirements.lock pyproject.toml
	@test -x $(BIN)/python || $(or $(PYTHON),false) -c '$(FITS)' || { \
	  echo "posttrain needs Python 3.11, 3.12 or 3.13 with the module venv, and found $(or $(PYTHON),none):"; \
	  echo "install one (Debian, Ubuntu: apt-get install python3-venv), or name it: make PYTHON=/path/to/python3.12"; \
	  exit 1; }
	@echo "set-up 1/3: a virtual environment in $(VENV)"
	@mkdir -p $(VENV)
	@test -x $(BIN)/python || $(call logged,$(PYTHON) -m venv $(VENV))
	@echo "set-up 2/3: torch, for $$($(BIN)/python --version)"
	@$(call logged,$(BIN)/pip install --no-compile $$(sed -En 's/^((torch|uv)==[^ ]+).*/\1/p' requirements.lock))
	@echo "set-up 3/3: posttrain, and what it needs"
	@$(call logged,$(BIN)/uv pip install --python $(BIN)/python --constraint requirements.lock --editable . || \
	  { echo "uv failed; it reads no settings of pip: pip tries again"; \
	  $(BIN)/pip install --no-compile --constraint requirements.lock --editable .; })
	@touch $@

$(TESTS): $(READY)
	@echo "set-up of the tests: the other packages of requirements.lock"
	@$(call logged,$(BIN)/uv pip install --python $(BIN)/python --requirement requirements.lock || \
	  $(BIN)/pip install --requirement requirements.lock)
	@$(call logged,$(BIN)/pip install --no-deps --no-compile --upgrade --target $(VENV)/verl $(VERL))
	@echo "set-up of the tests: compiles what they import, which each worker would do at the same time"
	@$(BIN)/pytest --collect-only --quiet >/dev/null 2>&1 || true
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
