"""Starts the process of one stage, waits for its answer, and can stop them all."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

from flows.stages.job import Job
from flows.stages.process_settings import stage_environment
from flows.stages.shared_imports import shares_imports
from flows.stages.stage_process import Answer, answer, stage_main
from lineage.errors import PrunedError, StageError, StoppedError
from tasks.context import Launcher, Metrics

_GRACE_SECONDS = 5.0


class StageProcesses:
    """The stages' processes of one run.

    A fork server that has imported torch, transformers, trl and ray starts each training stage in
    milliseconds; stages that only read and write rows start in a fresh interpreter beside it.
    """

    def __init__(self) -> None:
        self._server: ForkServerContext = multiprocessing.get_context("forkserver")
        self._fresh: SpawnContext = multiprocessing.get_context("spawn")
        self._running: dict[Path, BaseProcess] = {}  # by the stage's directory
        self._unwanted: dict[Path, str] = {}  # directory -> why
        self._lock = threading.Lock()
        self._starting = threading.Lock()  # apart: a start may wait for the fork server's imports, a stop must not
        self._stopped = threading.Event()

    def warm_up(self, modules: Sequence[str]) -> None:
        """Starts the fork server's imports, without waiting for them."""
        from multiprocessing.forkserver import ensure_running

        self._server.set_forkserver_preload(list(modules))
        # A Ctrl-C is for us; the fork server would die of it while it still imports.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            with _environment(stage_environment()):
                ensure_running()
        finally:
            signal.signal(signal.SIGINT, handler)

    def raise_if_stopped(self) -> None:
        """For whoever waits.

        Raises:
            StoppedError: the run is being stopped.
        """
        if self._stopped.is_set():
            raise StoppedError("the run was stopped")

    def run(self, job: Job) -> Metrics:
        """Runs a job to its end.

        Raises:
            StageError: the stage raised, or its process died.
            StoppedError: the run is being stopped.
            PrunedError: this stage was ended.
        """
        self.raise_if_stopped()
        self._raise_if_unwanted(job.directory)
        if job.resources.launcher == Launcher.FOREGROUND:
            with contextlib.redirect_stdout(sys.stderr):  # stdout is for the result
                return _result(answer(job))
        reader, writer = multiprocessing.Pipe(duplex=False)
        context = self._server if shares_imports(job.method, is_first=_reads_sources(job)) else self._fresh
        process = context.Process(target=stage_main, args=(job, writer), name=job.stage)
        try:
            with self._starting, _environment(stage_environment()):
                process.start()
        except (OSError, EOFError):
            self.raise_if_stopped()  # a stop has taken the fork server away
            raise
        with self._lock:
            self._running[job.directory] = process
        writer.close()
        if self._stopped.is_set() or job.directory in self._unwanted:  # between the look above and the start
            _signal_group(process, signal.SIGKILL)
        try:
            wait([reader, process.sentinel])
            reply = reader.recv() if reader.poll() else None
        except EOFError:
            reply = None
        finally:
            self._end(job.directory, process)
        if reply is None:
            self.raise_if_stopped()
            self._raise_if_unwanted(job.directory)
        return _result(reply if reply is not None else _death(job, process.exitcode))

    def stop(self) -> None:
        """Ends every running stage with its whole group: asked first, killed after a grace."""
        self._stopped.set()
        with self._lock:
            processes = list(self._running.values())
        for process in processes:
            _signal_group(process, signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_SECONDS
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            _signal_group(process, signal.SIGKILL)
        _end_fork_server()

    def end(self, directory: Path, why: str) -> None:
        """Ends one stage with its whole group, now or when it would start; whoever waits for it is told why."""
        with self._lock:
            self._unwanted[directory] = why
            process = self._running.get(directory)
        if process:
            _signal_group(process, signal.SIGTERM)
            threading.Thread(target=_kill_later, args=(process,), daemon=True).start()

    def _raise_if_unwanted(self, directory: Path) -> None:
        with self._lock:
            why = self._unwanted.pop(directory, None)
        if why is not None:
            raise PrunedError(why)

    def _end(self, directory: Path, process: BaseProcess) -> None:
        process.join(_GRACE_SECONDS)
        _signal_group(process, signal.SIGKILL)  # what the stage started and left behind, or the stage itself
        process.join()
        with self._lock:
            self._running.pop(directory, None)


def _reads_sources(job: Job) -> bool:
    return all(entry.source is not None for entry in job.inputs.values())


def _signal_group(process: BaseProcess, number: signal.Signals) -> None:
    if process.pid is None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        try:
            os.killpg(process.pid, number)  # the stage made its pid its group
        except ProcessLookupError:
            if process.is_alive():  # it is starting, and has not come to that
                os.kill(process.pid, number)


def _kill_later(process: BaseProcess) -> None:
    process.join(_GRACE_SECONDS)
    if process.is_alive():
        _signal_group(process, signal.SIGKILL)


def _end_fork_server() -> None:
    """It ends by itself when we do, but first finishes its imports."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "multiprocessing.forkserver" in " ".join(child.cmdline()):
                child.kill()


def _death(job: Job, exitcode: int | None) -> StageError:
    if exitcode is not None and exitcode < 0:
        name = signal.Signals(-exitcode).name
        hint = "; out of memory?" if -exitcode == signal.SIGKILL else ""
        return StageError(job.stage, f"its process was killed by {name}{hint}", str(job.log))
    address = os.environ.get("RAY_ADDRESS")
    hint = f"; is RAY_ADDRESS={address} reachable?" if address and job.resources.on_cluster else ""
    return StageError(job.stage, f"its process ended with exit code {exitcode} and no answer{hint}", str(job.log))


def _result(reply: Answer) -> Metrics:
    if isinstance(reply, StageError):
        raise reply
    return reply


@contextlib.contextmanager
def _environment(extra: Mapping[str, str]) -> Iterator[None]:
    """Variables for a process about to start; what the user has set wins."""
    added = {name: value for name, value in extra.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
