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

from flows.stages.job import CheckJob, Job
from flows.stages.process_settings import stage_environment
from flows.stages.shared_imports import shares_imports
from flows.stages.stage_process import Answer, answer, ask_to_stop, stage_main
from lineage.errors import LostError, PrunedError, StageError, StoppedError
from tasks.context import Launcher, Metrics

_GRACE_SECONDS = 5.0  # for a process that was told to end
_POLL_SECONDS = 0.1
_SAVE_SECONDS = 20.0  # for a training that saves first; whoever stops us gives 30 s in all


_hurried = threading.Event()  # of the whole process, as its signals are


def hurry() -> None:
    """Whoever asked for a stop asks again: stages that save are not waited for."""
    _hurried.set()


class StageProcesses:
    """The stages' processes of one run.

    A fork server that has imported torch, transformers, trl and ray starts each training stage in
    milliseconds; stages that only read and write rows start in a fresh interpreter beside it.
    """

    def __init__(self) -> None:
        self._server: ForkServerContext = multiprocessing.get_context("forkserver")
        self._fresh: SpawnContext = multiprocessing.get_context("spawn")
        self._running: dict[Path, tuple[Job, BaseProcess]] = {}  # by the stage's directory
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
            self._running[job.directory] = job, process
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
        if isinstance(reply, StoppedError):
            self.raise_if_stopped()
            raise LostError(job.stage, f"its process was asked to end by SIGTERM, and saved: {reply}", str(job.log))
        return _result(reply if reply is not None else _death(job, process.exitcode))

    def stop(self) -> None:
        """Ends every running stage with its whole group: a training saves first, what takes too long is killed."""
        self._stopped.set()
        with self._lock:
            running = list(self._running.values())
        for job, process in running:
            _ask(job, process)
        deadline = time.monotonic() + _SAVE_SECONDS
        for _, process in running:
            while process.is_alive() and time.monotonic() < deadline and not _hurried.is_set():
                process.join(_POLL_SECONDS)
            _signal_group(process, signal.SIGKILL)
        _end_fork_server()

    def end(self, directory: Path, why: str) -> None:
        """Ends one stage with its whole group, now or when it would start; whoever waits for it is told why."""
        with self._lock:
            self._unwanted[directory] = why
            _, process = self._running.get(directory, (None, None))
        if process:
            _signal_group(process, signal.SIGKILL)

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


def _ask(job: Job, process: BaseProcess) -> None:
    """Asks a stage to end: one that trains finishes its step and saves."""
    if job.method.trains and not isinstance(job, CheckJob):
        ask_to_stop(job)
    else:
        _signal_group(process, signal.SIGTERM)


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
        return LostError(job.stage, f"its process was killed by {name}{hint}", str(job.log))
    cause = f"its process ended with exit code {exitcode} and no answer"
    if not job.resources.on_cluster:
        return StageError(job.stage, cause, str(job.log))  # by its own code, which would do it again
    address = os.environ.get("RAY_ADDRESS")
    hint = f"; is RAY_ADDRESS={address} reachable?" if address else "; its Ray cluster was lost"
    return LostError(job.stage, cause + hint, str(job.log))


def _result(reply: Answer) -> Metrics:
    if isinstance(reply, StageError | StoppedError):
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
