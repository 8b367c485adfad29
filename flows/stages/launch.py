"""Starts the process of one stage, waits for its answer, and can stop them all."""

import atexit
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import cast

from flows.stages.endings import asked, death, left
from flows.stages.hang import HangWatch
from flows.stages.job import Job
from flows.stages.memory_kills import memory_kills
from flows.stages.process_ends import FOR_US, ask, end_fork_server, signal_group
from flows.stages.process_settings import in_stage_environment
from flows.stages.shared_imports import shares_imports
from flows.stages.stage_process import Answer, answer, stage_main
from flows.stages.stopping import ended, hurried
from lineage.errors import LostError, PipelineError, StageError, StoppedError
from tasks.context import Launcher, Metrics

_GRACE_SECONDS = 5.0  # for a process that was told to end
_POLL_SECONDS = 0.1
_WHOLE_SECONDS = 2.0  # in which it shows that not one stage was asked to end, but the run
_SAVE_SECONDS = 20.0  # for a training that saves first; whoever stops us gives 30 s in all


class StageProcesses:
    """The stages' processes of one run.

    A fork server that has imported torch, transformers, trl and ray starts each training stage in
    milliseconds; stages that only read and write rows start in a fresh interpreter beside it.
    """

    def __init__(self) -> None:
        self._server: ForkServerContext = multiprocessing.get_context("forkserver")
        self._fresh: SpawnContext = multiprocessing.get_context("spawn")
        self._running: dict[Path, tuple[Job, BaseProcess]] = {}  # by the stage's directory
        self._unwanted: dict[Path, PipelineError] = {}  # directory -> why
        self._lock = threading.Lock()
        self._starting = threading.Lock()  # apart: a start may wait for the fork server's imports, a stop must not
        self._stopped = threading.Event()

    def warm_up(self, modules: Sequence[str]) -> None:
        """Starts the fork server's imports, without waiting for them."""
        from multiprocessing.forkserver import ensure_running

        self._server.set_forkserver_preload(list(modules))
        # A signal to our process group is for us: without the fork server its stages could not be waited for.
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in FOR_US}
        try:
            with in_stage_environment():
                ensure_running()
            atexit.unregister(end_fork_server)
            atexit.register(end_fork_server)  # until then the next run of this process finds its imports done
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

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
            PipelineError: this stage was ended, as ``end`` was told.
        """
        self.raise_if_stopped()
        self.raise_if_unwanted(job.directory)
        if job.resources.launcher == Launcher.FOREGROUND:
            with contextlib.redirect_stdout(sys.stderr), in_stage_environment():  # stdout is for the result
                return _result(job, answer(job))
        kills = memory_kills()
        process, reader = self._start(job)
        try:
            reply = self._answer(job, process, reader)
        except KeyboardInterrupt:  # it is waited for in the command's own thread, as by `posttrain stage`
            self.stop()
            reply = None
        finally:
            self._end(job.directory, process)
        if reply is None:
            self._raise_if_stopped(job)
            self.raise_if_unwanted(job.directory)
            reply = death(job, process.exitcode, kills)
        if isinstance(reply, StoppedError | LostError):
            if process.exitcode != -signal.SIGKILL:
                self._stopped.wait(_WHOLE_SECONDS)
            self._raise_if_stopped(job)
        return _result(job, reply)

    def _raise_if_stopped(self, job: Job) -> None:
        """For one that had begun, and has ended without a result."""
        if self._stopped.is_set():
            ended.append(left(job))
        self.raise_if_stopped()

    def _start(self, job: Job) -> tuple[BaseProcess, Connection]:
        reader, writer = multiprocessing.Pipe(duplex=False)
        context = self._server if shares_imports(job.method, is_first=_reads_sources(job)) else self._fresh
        try:
            with self._starting, in_stage_environment():
                # The fork server itself has the environment of the run that started it.
                process = context.Process(target=stage_main, args=(job, writer, dict(os.environ)), name=job.stage)
                process.start()
        except (OSError, EOFError):
            self.raise_if_stopped()  # a stop has taken the fork server away
            raise
        with self._lock:
            self._running[job.directory] = job, process
        writer.close()
        if self._stopped.is_set() or job.directory in self._unwanted:  # between the look above and the start
            signal_group(process, signal.SIGKILL)
        return process, reader

    def _answer(self, job: Job, process: BaseProcess, reader: Connection) -> Answer | None:
        """Waits for it; None: it died, or it was ended."""
        watch = HangWatch(job)
        while not wait([reader, process.sentinel], watch.pause_seconds):
            hung = watch.hung()
            if hung:
                self.end(job.directory, hung)
                return None
        try:
            return cast(Answer, reader.recv()) if reader.poll() else None
        except EOFError:
            return None

    def stop(self) -> None:
        """Stops the run: ends every stage that runs, and the fork server, for whose imports one may be waiting."""
        self.end_all()
        end_fork_server()

    def end_all(self) -> None:
        """Ends every running stage with its whole group: a training saves first, what takes too long is killed."""
        self._stopped.set()
        with self._lock:
            running = list(self._running.values())
        for job, process in running:
            ask(job, process)
        deadline = time.monotonic() + _SAVE_SECONDS
        for _, process in running:
            while process.is_alive() and time.monotonic() < deadline and not hurried.is_set():
                process.join(_POLL_SECONDS)
            signal_group(process, signal.SIGKILL)

    def end(self, directory: Path, why: PipelineError) -> None:
        """Ends one stage with its whole group, now or when it would start; whoever waits for it gets ``why`` raised."""
        with self._lock:
            self._unwanted[directory] = why
            _, process = self._running.get(directory, (None, None))
        if process:
            signal_group(process, signal.SIGKILL)

    def kill(self, directory: Path) -> None:
        """Kills one stage with its whole group, as a machine that fails would: the stage is lost, not unwanted."""
        with self._lock:
            _, process = self._running.get(directory, (None, None))
        if process:
            signal_group(process, signal.SIGKILL)

    def raise_if_unwanted(self, directory: Path) -> None:
        """For whoever waits with one stage.

        Raises:
            PipelineError: as ``end`` was told; once.
        """
        with self._lock:
            why = self._unwanted.pop(directory, None)
        if why is not None:
            raise why

    def _end(self, directory: Path, process: BaseProcess) -> None:
        process.join(_GRACE_SECONDS)
        signal_group(process, signal.SIGKILL)  # what the stage started and left behind, or the stage itself
        process.join()
        with self._lock:
            self._running.pop(directory, None)


def _reads_sources(job: Job) -> bool:
    return all(entry.source is not None for entry in job.inputs.values())


def _result(job: Job, reply: Answer) -> Metrics:
    if isinstance(reply, StoppedError) and job.resources.launcher != Launcher.FOREGROUND:
        raise asked(job, reply)
    if isinstance(reply, StoppedError):
        ended.append(left(job))
    if isinstance(reply, StageError | StoppedError):
        raise reply
    return reply
