"""Calls the command as a user does, in its own folder and environment.

A call runs ``main`` in the test's process, which has imported everything, and whose warm fork server starts the stages.
Tests of signals, kills or several commands at once start a process.
"""

import contextlib
import json
import logging
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from unittest import mock

import psutil

from flows.prefect.server import CLIENT_SETTINGS, read_settings_again
from flows.progress.run_record import RUN_VARIABLE
from lineage.code import source_file
from tasks.method import Training

REPOSITORY = Path(__file__).parent.parent
CONF = REPOSITORY / "tests" / "conf"
RUN_STAGES = ("run", "stage", "rehearse", "certify", "tune", "blame")
TAKE_OVERRIDES = ("plan", "run", "rehearse", "certify", "tune")  # commands that take the overrides of a pipeline
LOGGERS = ("lineage", "tasks", "flows", "dvc", "dvc_data", "dvc_objects")
PATIENCE = float(os.environ.get("TEST_PATIENCE", "1"))  # raise it on a busy machine
TOY = ("pipeline=toy", "model=none", "sources.rows.path=rows.txt")


class Command:
    """Calls ``posttrain`` in one folder, always with the same leading overrides.

    Args:
        tracked: whether MLflow and DVC record; most tests need neither.
    """

    def __init__(
        self, folder: Path, *overrides: str, environment: dict[str, str] | None = None, tracked: bool = False
    ) -> None:
        self.folder = folder
        self._overrides = overrides if tracked else ("tracking=none", *overrides)
        self.environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **(environment or {})}

    def cli_args(self, verb: str, arguments: Sequence[str] = ()) -> list[str]:
        """The leading arguments of a command, without those restated; none for commands that take no overrides."""
        configured = {word.partition("=")[0] for word in arguments}
        leading = [word for word in self._overrides if word.partition("=")[0] not in configured]
        return ["--config-dir", str(CONF), *leading] if verb in TAKE_OVERRIDES else []

    def start(self, verb: str, *arguments: str, stderr: Path | None = None) -> subprocess.Popen[str]:
        """Starts a process; stderr can go to a file, to be read while the command runs."""
        with stderr.open("w") if stderr else contextlib.nullcontext(subprocess.PIPE) as errors:
            return subprocess.Popen(
                [sys.executable, "-m", "flows", verb, *self.cli_args(verb, arguments), *arguments],
                cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=errors, text=True,
            )  # fmt: skip

    def __call__(self, verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return call([verb, *self.cli_args(verb, arguments), *arguments], self.folder, self.environment)

    def process(self, verb: str, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """A call in its own process, for tests of how a process starts or exits."""
        process = self.start(verb, *arguments)
        out, err = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def run(self, *arguments: str) -> dict[str, dict]:
        """Runs to success and returns the stages of ``run --json`` by name."""
        result = self("run", "--json", *arguments)
        assert result.returncode == 0, result.stderr
        return {row["stage"]: row for row in json.loads(result.stdout)["stages"]}

    def states(self, *arguments: str) -> dict[str, str]:
        result = self("plan", "--json", *arguments)
        assert result.returncode == 0, result.stderr
        return {row["stage"]: row["state"] for row in json.loads(result.stdout)["stages"]}


def call(arguments: list[str], folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs ``posttrain`` in this process, as if it were a fresh one in that folder and environment."""
    from flows.__main__ import main

    if arguments[0] in RUN_STAGES:
        warm_up()
    return call_main(main, arguments, folder, environment)


def warm_up() -> None:
    """Starts the fork server of this worker with what every method imports, also where the first run is of toys."""
    from flows.stages.launch import StageProcesses, modules_of

    StageProcesses().warm_up(modules_of([Training]))


def wait_until_warm() -> None:
    """Waits for that fork server, in a fixture: its imports are no test's own."""
    warm_up()
    first = multiprocessing.get_context("forkserver").Process(target=int)
    first.start()
    first.join(60 * PATIENCE)


def call_dvc(arguments: list[str], folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs ``dvc`` in this process; its stages start processes."""
    import dvc.logger
    from dvc.cli import main

    def fresh(arguments: list[str]) -> int:
        dvc.logger.setup()  # its handlers keep the streams that exist at their creation
        return int(main(arguments))

    return call_main(fresh, arguments, folder, environment)


def call_main(
    main: Callable[[list[str]], int], arguments: list[str], folder: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Calls the entry point of a program as a shell would."""
    with _in_folder(folder, environment), _captured() as output:
        try:
            code = main(arguments)
        except SystemExit as stop:  # argparse
            code = stop.code if isinstance(stop.code, int) else 1
        except Exception:
            traceback.print_exc()
            code = 1
    return subprocess.CompletedProcess(arguments, code, *output)


@contextlib.contextmanager
def _in_folder(folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """Sets folder, environment and modules as in a new process, and restores them."""
    path, here, modules, main = list(sys.path), os.getcwd(), set(sys.modules), sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")  # without a file, or each stage's process would import pytest
    os.chdir(folder)
    try:
        # With what a run sets for Prefect's client already set, further calls read no settings again.
        with mock.patch.dict(os.environ, {**CLIENT_SETTINGS, **environment}, clear=True):
            read_settings_again()
            forget_databases()
            source_file.cache_clear()
            yield
    finally:
        os.chdir(here)
        sys.path[:] = path
        sys.modules["__main__"] = main
        for name in sys.modules.keys() - modules:
            file = getattr(sys.modules[name], "__file__", None)
            if file and Path(file).is_relative_to(folder):  # a user's module, which differs in the next test
                del sys.modules[name]


def forget_databases() -> None:
    """Closes MLflow's databases: it keeps them open by path, and the file may have changed."""
    for name, registry in {
        "mlflow.store.tracking.sqlalchemy_store": "mlflow.tracking._tracking_service.registry.TrackingStoreRegistry",
        "mlflow.store.model_registry.sqlalchemy_store": (
            "mlflow.tracking._model_registry.registry.ModelRegistryStoreRegistry"
        ),
    }.items():
        if name in sys.modules:
            engines = sys.modules[name].SqlAlchemyStore._engine_map
            for engine in engines.values():
                engine.dispose()
            engines.clear()
            module, _, cls = registry.rpartition(".")
            getattr(sys.modules[module], cls)._get_store_with_resolved_uri.cache_clear()


@contextlib.contextmanager
def _captured() -> Iterator[list[str]]:
    """Stdout and stderr, available at the end; they include the output of child processes."""
    output: list[str] = []
    streams = sys.stdout, sys.stderr
    kept = [os.dup(number) for number in (1, 2)]
    with contextlib.ExitStack() as stack, _fresh_logging():
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in kept]
        for stream, file, number in zip(streams, files, (1, 2), strict=True):
            stream.flush()
            os.dup2(file.fileno(), number)
        sys.stdout, sys.stderr = ours = [os.fdopen(number, "w", closefd=False) for number in (1, 2)]
        try:
            yield output
        finally:
            sys.stdout, sys.stderr = streams
            for stream, number, saved in zip(ours, (1, 2), kept, strict=True):
                stream.flush()
                os.dup2(saved, number)
                os.close(saved)
            for file in files:
                file.seek(0)
                output.append(file.read().decode())


@contextlib.contextmanager
def _fresh_logging() -> Iterator[None]:
    """Removes pytest's logging handlers, which keep warnings off stderr."""
    loggers = [logging.root, *(logging.getLogger(name) for name in LOGGERS)]
    before = [(logger, logger.handlers, logger.level) for logger in loggers]
    for logger in loggers:
        logger.handlers = []
    logging.root.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, handlers, level in before:
            logger.handlers = handlers
            logger.setLevel(level)


def wait_until(condition: Callable[[], object], what: str, seconds: float = 120) -> None:
    seconds *= PATIENCE
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.1)


def sleeper_of(run_id: str) -> subprocess.Popen[bytes]:
    """A process of a run, in a group and session of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True,
        env={**os.environ, RUN_VARIABLE: run_id},
    )  # fmt: skip
    wait_until(lambda: RUN_VARIABLE in psutil.Process(process.pid).environ(), "its environment can be read")
    return process


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """A process and its descendants."""
    parent = psutil.Process(process.pid)
    return [parent, *parent.children(recursive=True)]


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def wait_until_gone(processes: list[psutil.Process], seconds: float = 60) -> None:
    """Waits for processes to exit; fails after so many seconds, naming those that are alive."""
    _, left = psutil.wait_procs(processes, seconds)
    assert not alive(left), f"still there after {seconds} s: {alive(left)}"
