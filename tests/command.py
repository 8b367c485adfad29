"""The command as a user calls it, in a folder and an environment of its own.

A call runs ``main`` in the test's process, where all imports are done and one warm fork server starts the stages. What
is of signals, kills or several commands at once starts a process.
"""

import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

import psutil

from flows.prefect_server import CLIENT_SETTINGS, read_settings_again
from lineage.code import source_file

REPOSITORY = Path(__file__).parent.parent
CONF = REPOSITORY / "tests" / "conf"
STATING = ("plan", "run", "rehearse", "certify")  # the commands that take what states a pipeline
LOGGERS = ("lineage", "tasks", "flows", "dvc", "dvc_data", "dvc_objects")
PATIENCE = float(os.environ.get("TEST_PATIENCE", "1"))  # raise it on a machine that is busy with something else
TOY = ("pipeline=toy", "model=none", "sources.rows.path=rows.txt")


class Command:
    """Calls ``posttrain`` in one folder, always with the same leading overrides.

    Args:
        tracked: whether MLflow and DVC record; off, because most tests are of something else.
    """

    def __init__(
        self, folder: Path, *overrides: str, environment: dict[str, str] | None = None, tracked: bool = False
    ) -> None:
        self.folder = folder
        self._overrides = overrides if tracked else ("tracking=none", *overrides)
        self.environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **(environment or {})}

    def _words(self, verb: str) -> list[str]:
        """What states the pipeline, for the commands that take one; of the others the folder is enough."""
        return ["--config-dir", str(CONF), *self._overrides] if verb in STATING else []

    def start(self, verb: str, *arguments: str, stderr: Path | None = None) -> subprocess.Popen[str]:
        """Starts a command; its stderr goes to a file where one is named, to be read while it runs."""
        with stderr.open("w") if stderr else contextlib.nullcontext(subprocess.PIPE) as errors:
            return subprocess.Popen(
                [sys.executable, "-m", "flows", verb, *self._words(verb), *arguments],
                cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=errors, text=True,
            )  # fmt: skip

    def __call__(self, verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return call([verb, *self._words(verb), *arguments], self.folder, self.environment)

    def process(self, verb: str, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """As a call, in a process of its own: for what depends on how a process starts or ends."""
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

    return call_main(main, arguments, folder, environment)


def call_dvc(arguments: list[str], folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs ``dvc`` in this process; what its stages call are processes."""
    import dvc.logger
    from dvc.cli import main

    def fresh(arguments: list[str]) -> int:
        dvc.logger.setup()  # its handlers write to the streams of the time when they are made
        return int(main(arguments))

    return call_main(fresh, arguments, folder, environment)


def call_main(
    main: Callable[[list[str]], int], arguments: list[str], folder: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Calls the entry point of a program as a shell would."""
    with _placed(folder, environment), _captured() as said:
        try:
            code = main(arguments)
        except SystemExit as stop:  # argparse
            code = stop.code if isinstance(stop.code, int) else 1
        except Exception:
            traceback.print_exc()
            code = 1
    return subprocess.CompletedProcess(arguments, code, *said)


@contextlib.contextmanager
def _placed(folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """Gives a command what a process of its own would have, and takes back what it changed."""
    path, here, modules, main = list(sys.path), os.getcwd(), set(sys.modules), sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")  # without a file: else each stage's process would import pytest
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
            if file and Path(file).is_relative_to(folder):  # a user's own, of which the next test has another
                del sys.modules[name]


def forget_databases() -> None:
    """MLflow keeps databases open by their address, where the file may be another one by now."""
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
    """Stdout and stderr, filled in at the end: also what processes wrote that were started meanwhile."""
    said: list[str] = []
    streams = sys.stdout, sys.stderr
    kept = [os.dup(number) for number in (1, 2)]
    with contextlib.ExitStack() as stack, _fresh_logging():
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in kept]
        for stream, file, number in zip(streams, files, (1, 2), strict=True):
            stream.flush()
            os.dup2(file.fileno(), number)
        sys.stdout, sys.stderr = ours = [os.fdopen(number, "w", closefd=False) for number in (1, 2)]
        try:
            yield said
        finally:
            sys.stdout, sys.stderr = streams
            for stream, number, saved in zip(ours, (1, 2), kept, strict=True):
                stream.flush()
                os.dup2(saved, number)
                os.close(saved)
            for file in files:
                file.seek(0)
                said.append(file.read().decode())


@contextlib.contextmanager
def _fresh_logging() -> Iterator[None]:
    """No handler but those that the command makes: pytest's keep warnings off stderr."""
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


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """A process and all it has started."""
    parent = psutil.Process(process.pid)
    return [parent, *parent.children(recursive=True)]


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def wait_until_gone(processes: list[psutil.Process], seconds: float = 10) -> None:
    """Fails after so many seconds, and says who is still there."""
    _, left = psutil.wait_procs(processes, seconds)
    assert not alive(left), f"still there after {seconds} s: {alive(left)}"
