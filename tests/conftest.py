"""Marks tests by folder, and gives each test its own directory and environment, with nothing of the user's."""

import atexit
import gc
import hashlib
import importlib.metadata
import itertools
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import settings

gc.disable()  # during imports: it takes a quarter of their time
HERE = Path(__file__).parent
# Temporary directory of this process and of those that tests start. It also holds the machine's slots: a test that
# hangs must not block other test runs. The name is short, because paths of sockets are limited.
OWN = Path(tempfile.mkdtemp(prefix="pt-"))
# The user's variables that the product or its libraries read.
USERS = (
    "AWS_", "DVC_", "GIT_", "HF_", "HUGGINGFACE_", "HYDRA_", "MLFLOW_", "POSTTRAIN_", "PREFECT_", "RAY_",
    "TRANSFORMERS_", "WANDB_", "XDG_",
)  # fmt: skip
for name in [name for name in os.environ if name.startswith(USERS)]:
    del os.environ[name]
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # tmp_path stays in the usual place
os.environ.update(TMPDIR=str(OWN), HOME=str(OWN / "home"), PREFECT_HOME=str(OWN / "home/.prefect"))
os.environ["PYTHONPATH"] = str(HERE.parent)  # processes that tests start in their own directories
(OWN / "home").mkdir()
# Processes of tests must not inherit what nohup and a shell's `&` ignore.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
# Must precede the import of torch: tests share the machine, and spinning threads would stall each other.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
tempfile.tempdir = None  # read TMPDIR again
atexit.register(shutil.rmtree, OWN, ignore_errors=True)
# No deadline, because other work may slow the machine; fixed examples, so that commits are comparable.
settings.register_profile("posttrain", deadline=None, derandomize=True, max_examples=25)
settings.register_profile("nightly", deadline=None, max_examples=300)
settings.load_profile("posttrain")
# Tests of `make test` that may take more than so many seconds on a quiet machine; the end of a run names others.
LONG_SECONDS = 8.0
LONG = (
    "test_resuming_the_flow_run_approves_and_the_next_run_does_not_ask_again",
    "test_a_run_that_is_asked_to_end_saves_once_and_ends_with_130",
    "test_a_run_that_is_killed_leaves_nothing_and_goes_on_from_its_checkpoint",
    "test_the_first_stage_whose_model_is_worse_is_named_and_nothing_is_trained",
    "test_a_server_that_goes_away_costs_one_line_and_learns_the_end_from_the_next_command",
    "test_two_runs_at_once_train_a_shared_stage_once",
    "test_a_promotion_that_a_kill_prevented_is_made_by_the_next_run",
    "test_a_run_is_seen_followed_and_cancelled_from_outside",
    "test_repro_runs_what_changed_and_run_then_has_nothing_to_do",
    "test_a_refused_gate_ends_the_run_with_3_fresh_or_reused",
)
_numbers = itertools.count()
_WEEK_SECONDS = 7 * 86_400
_unused: list[Path] = []  # places that a test left empty: most do, and thousands of directories take long to remove


@pytest.fixture(scope="session", autouse=True)
def _empty_directory() -> Iterator[None]:
    """Working directory of shared fixtures; the checkout may contain the store of a demo."""
    (OWN / "shared").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(OWN / "shared")
        yield


@pytest.fixture(scope="session", autouse=True)
def _kept_compositions(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hydra composes in 0.2 s: what it makes of shipped groups is kept for later runs, by all that it is made from."""
    compose = sys.modules.get("flows.declare.config")
    if compose is None or not hasattr(pytestconfig, "cache"):
        yield
        return
    folder = pytestconfig.cache.mkdir("compositions")
    for path in folder.iterdir():
        if time.time() - path.stat().st_mtime > _WEEK_SECONDS:
            path.unlink(missing_ok=True)
    own = str(tmp_path_factory.getbasetemp())
    composer, code = compose._composer, (Path(compose.__file__).read_bytes(), importlib.metadata.version("hydra-core"))

    @cache
    def kept(overrides, config_dir, files):
        if config_dir not in (None, HERE / "conf") or own in str(overrides):
            return composer(overrides, config_dir, files)
        file = folder / hashlib.sha256(repr((overrides, files, code)).encode()).hexdigest()
        if not file.exists():
            draft = file.with_suffix(f".{os.getpid()}")
            draft.write_bytes(pickle.dumps(composer(overrides, config_dir, files)))
            draft.replace(file)
        return pickle.loads(file.read_bytes())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compose, "_composer", kept)
        yield


@pytest.fixture(autouse=True)
def _own_place(_empty_directory: None) -> Iterator[None]:
    """An empty working directory and a home for each test."""
    folder = _unused.pop() if _unused else OWN / f"test-{next(_numbers)}"
    for place in (folder / "home", folder / "work"):
        if not place.exists():
            place.mkdir(parents=True)
    with mock.patch.dict(os.environ), pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder / "home"))
        patch.setenv("PREFECT_HOME", str(folder / "home/.prefect"))
        patch.chdir(folder / "work")
        yield
    if any(folder.glob("*/*")):
        shutil.rmtree(folder, ignore_errors=True)
    else:
        _unused.append(folder)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(HERE).parts[0]
        if folder in ("integration", "gpu"):
            item.add_marker(folder)
        if item.get_closest_marker("gpu") and not Path("/dev/nvidiactl").exists():
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))


def pytest_collection_finish() -> None:
    gc.freeze()  # no later collection looks at what was imported
    # accelerate asks for one after each training, which takes as long as a tiny model's training.
    gc.collect = lambda generation=2: 0  # type: ignore[assignment]
    importlib.metadata.metadata = cache(importlib.metadata.metadata)  # accelerate parses them 18 times in each training
    gc.set_threshold(100_000)  # what tests import later would be looked at again and again
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Names tests of `make test` that take too long; fixtures that a worker makes once do not count."""
    if "not slow" not in config.getoption("markexpr"):
        return
    calls = [each for each in terminalreporter.getreports("passed") if each.when == "call"]
    for report in calls:
        name = report.nodeid.rpartition("::")[2].partition("[")[0]
        if report.duration > LONG_SECONDS and name not in LONG:
            terminalreporter.write_line(
                f"{report.nodeid} took {report.duration:.1f} s: above {LONG_SECONDS:g} s, mark it slow"
            )


def pytest_unconfigure() -> None:
    gc.unfreeze()  # so that the interpreter ends without complaints of extensions about what is left
