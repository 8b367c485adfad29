"""Starts the process of one stage, waits for its answer, and can stop them all."""

import atexit
import contextlib
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import cast

import psutil

from flows.declare.pipeline import Stage
from flows.planning.plan import PlannedStage
from flows.stages.exit_reasons import asked, death, left, lost, memory_kills
from flows.stages.job import Job
from flows.stages.process_settings import in_stage_environment
from flows.stages.stage_process import Answer, answer, ask_to_stop, kill_session, stage_main
from flows.stops import ended, hurried
from lineage.errors import LostError, PipelineError, StageError, StoppedError
from tasks.context import Launcher, Metrics, Resources
from tasks.heartbeat import UNWATCHED, Heartbeat, Phase, heartbeats, stacks
from tasks.method import Method

_LONGEST_SECONDS = 10.0  # from one poll to the next
_START_SECONDS = 120.0  # in which a process may start, however short a step is
# The innermost frame of a thread that waits for other workers: in a collective, or in a backward pass that holds some.
_WAITING = re.compile(r'recent call first\):\n  File ".*/torch/(distributed|autograd)/')


class HangWatch:
    """Polls the heartbeats of one attempt, from its driver.

    Hosts have clocks of their own: what counts is how long a heartbeat has not changed, by the driver's clock.
    """

    def __init__(self, job: Job) -> None:
        self._job, self._work = job, job.directory / "work"
        minutes = job.resources.hang_minutes
        # In the foreground a debugger may stop a stage for as long as it likes.
        watched = job.trains and job.resources.launcher != Launcher.FOREGROUND
        self._limit = 60 * minutes if watched and minutes else None
        self._seen: dict[int, tuple[Heartbeat | None, float]] = {}  # rank -> the last one, and when it was seen
        # A cluster that is joined may have capacity for the first worker only after hours.
        self._queues = bool(job.resources.on_cluster and os.environ.get("RAY_ADDRESS"))

    @property
    def pause_seconds(self) -> float | None:
        """From one poll to the next; None: nothing is watched."""
        return None if self._limit is None else min(self._limit / 10, _LONGEST_SECONDS)

    def hung(self) -> LostError | None:
        """The loss of the worker that the others wait for; the stacks of all that hang go to the stage's log."""
        if self._limit is None:
            return None
        now = time.monotonic()
        with contextlib.suppress(OSError, ValueError):  # the store is unreachable
            for latest in heartbeats(self._work):
                if self._seen.get(latest.rank, (None, now))[0] != latest:
                    self._seen[latest.rank] = latest, now
        if self._seen or not self._queues:
            for rank in range(self._job.resources.num_workers):
                self._seen.setdefault(rank, (None, now))
        hanging = [rank for rank, (beat, since) in sorted(self._seen.items()) if self._hangs(beat, now - since)]
        if not hanging:
            return None
        found = {rank: stacks(self._work, rank) for rank in hanging}
        with self._job.log.open("a") as log:
            log.writelines(f"rank={rank} state=hung\n{text or 'no stack'}\n" for rank, text in found.items())
        rank = min(hanging, key=lambda rank: self._order(rank, found[rank]))
        beat, since = self._seen[rank]
        phase = beat.doing if beat else "starting"
        return lost(self._job, [rank], "hangs", f", {phase}: no progress for {now - since:.3g} s")

    def _hangs(self, beat: Heartbeat | None, seconds: float) -> bool:
        assert self._limit is not None
        if beat is None:
            return seconds >= max(self._limit, _START_SECONDS)
        # Workers that have their inputs wait for those that fetch them.
        fetches = any(other and other.doing == Phase.FETCHING for other, _ in self._seen.values())
        return seconds >= self._limit and beat.doing not in UNWATCHED and not (fetches and beat.step is None)

    def _order(self, rank: int, text: str) -> tuple[int, bool, bool, float]:
        """By steps done, then those that do not wait for others in the step, then the oldest heartbeat."""
        beat, since = self._seen[rank]
        if beat is None:
            return -2, False, False, since
        return -1 if beat.step is None else beat.step, beat.doing == Phase.STEPPING, bool(_WAITING.search(text)), since


FOR_US = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def saving_first(stage: Stage, stop_file: Path) -> Iterator[None]:
    """Around a stage in this very process: the signal that asks us to end asks it first, and is heeded when it ends.

    One that comes in its last step, after which nothing is saved, is so heeded once its output is committed. A second
    Ctrl-C is heeded at once.

    Args:
        stop_file: asks the stage, if it trains.
    """
    trains_here = stage.method.trains and stage.resources.launcher == Launcher.FOREGROUND
    asked: list[int] = []

    def ask_it(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        ask_to_stop(stop_file)
        if signal.SIGINT in handlers:
            signal.signal(signal.SIGINT, handlers[signal.SIGINT])

    heeded = [number for number in FOR_US if trains_here and signal.getsignal(number) != signal.SIG_IGN]
    handlers = {number: signal.signal(number, ask_it) for number in heeded}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if asked:
            signal.raise_signal(asked[0])


def ask(job: Job, process: BaseProcess) -> None:
    """Asks a stage to end: one that trains finishes its step and saves."""
    if job.trains:
        ask_to_stop(job.stop_file)
    else:
        signal_group(process, signal.SIGTERM)


def signal_group(process: BaseProcess, number: signal.Signals) -> None:
    """Signals a stage and everything that it has started."""
    if process.pid is None:
        return
    if number == signal.SIGKILL:
        kill_session(process.pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        try:
            os.killpg(process.pid, number)  # the stage made its pid its group
        except ProcessLookupError:
            if process.is_alive():  # it is starting, and does not lead a group yet
                os.kill(process.pid, number)


def end_fork_server() -> None:
    """It ends by itself when we do, but first finishes its imports."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "multiprocessing.forkserver" in " ".join(child.cmdline()):
                child.kill()


_BEGIN = "flows.stages.imports_begin"
_RAY_TRAIN = "flows.stages.ray_train"  # around every method that trains


def shares_imports(method: Method, resources: Resources, *, is_first: bool) -> bool:
    """Whether a stage starts from the fork server: else it need not wait for what that imports.

    transformers imports torchao where it is installed, and torchao initializes CUDA, which no forked process can then
    use: there a stage with a GPU imports everything itself.

    Args:
        is_first: it reads sources alone, and so begins while the imports still go on.
    """
    if resources.gpus_per_worker and find_spec("torchao"):
        return False
    return method.trains or bool(method.preload and not is_first)


def shared_modules(stages: Sequence[PlannedStage]) -> list[str]:
    """The modules that the stages' processes import: each once, in order."""
    shared = [
        each.stage for each in stages
        if shares_imports(each.stage.method, each.stage.resources, is_first=not each.upstream)
    ]  # fmt: skip
    return modules_of([type(stage.method) for stage in shared])


def modules_of(methods: Sequence[type[Method]]) -> list[str]:
    """The modules of these methods and of what runs them, without duplicates; none if there are no methods."""
    own = [module for method in methods for module in method.preload]
    around = [_RAY_TRAIN] if any(method.trains for method in methods) else []
    return list(dict.fromkeys([_BEGIN, *own, *around])) if methods else []


_GRACE_SECONDS = 5.0  # for a process that was asked to end
_POLL_SECONDS = 0.1
_WHOLE_SECONDS = 2.0  # until it is known whether the run, not just one stage, was asked to end
_SAVE_SECONDS = 20.0  # for a training that saves first; the process that stops us gives 30 s in all


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
        from multiprocessing.resource_tracker import ensure_running as ensure_tracker

        self._server.set_forkserver_preload(list(modules))
        with in_stage_environment():
            # A signal to our process group is for us: without the fork server its stages could not be waited for. It
            # starts with these blocked, and ignores them from its first import on; one that comes now waits for us.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_US)
            try:
                ensure_tracker()  # which unblocks what it has blocked
                signal.pthread_sigmask(signal.SIG_BLOCK, FOR_US)
                ensure_running()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        atexit.unregister(end_fork_server)
        atexit.register(end_fork_server)  # until then the next run of this process finds its imports done

    def raise_if_ended(self, directory: Path) -> None:
        """For callers that wait with one stage.

        Raises:
            StoppedError: the run is being stopped.
            PipelineError: the ``why`` of ``end``; once.
        """
        if self._stopped.is_set():
            raise StoppedError("the run was stopped")
        with self._lock:
            why = self._unwanted.pop(directory, None)
        if why is not None:
            raise why

    def run(self, job: Job) -> Metrics:
        """Runs a job to its end.

        Raises:
            StageError: the stage raised, or its process died.
            StoppedError: the run is being stopped.
            PipelineError: this stage was ended: the ``why`` of ``end``.
        """
        self.raise_if_ended(job.directory)
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
            self._raise_if_ended(job)
            reply = death(job, process.exitcode, kills)
        if isinstance(reply, StoppedError | LostError):
            if process.exitcode != -signal.SIGKILL:
                self._stopped.wait(_WHOLE_SECONDS)
            self._raise_if_ended(job)
        return _result(job, reply)

    def _raise_if_ended(self, job: Job) -> None:
        """The error of a stage that started, and ended without a result."""
        if self._stopped.is_set():
            ended.append(left(job))
        self.raise_if_ended(job.directory)

    def _start(self, job: Job) -> tuple[BaseProcess, Connection]:
        reader, writer = multiprocessing.Pipe(duplex=False)
        is_first = all(each.planned.source is not None for each in job.inputs.values())
        context = self._server if shares_imports(job.method, job.resources, is_first=is_first) else self._fresh
        try:
            with self._starting, in_stage_environment():
                # The fork server itself has the environment of the run that started it.
                process = context.Process(target=stage_main, args=(job, writer, dict(os.environ)), name=job.stage)
                process.start()
        except (OSError, EOFError):
            self.raise_if_ended(job.directory)  # a stop has taken the fork server away
            raise
        with self._lock:
            self._running[job.directory] = job, process
        writer.close()
        if self._stopped.is_set() or job.directory in self._unwanted:  # between the look above and the start
            signal_group(process, signal.SIGKILL)
        return process, reader

    def _answer(self, job: Job, process: BaseProcess, reader: Connection) -> Answer | None:
        """Waits for the answer; None: the process died, or was ended."""
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
        """Ends every running stage with its whole group: a training saves first; one that takes too long is killed."""
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

    def end(self, directory: Path, why: PipelineError | None) -> None:
        """Ends one stage with its whole group, now or when it would start.

        Args:
            why: raised to callers that wait; None: none is raised, and the stage is lost as by a machine that fails.
        """
        with self._lock:
            if why is not None:
                self._unwanted[directory] = why
            _, process = self._running.get(directory, (None, None))
        if process:
            signal_group(process, signal.SIGKILL)

    def _end(self, directory: Path, process: BaseProcess) -> None:
        process.join(_GRACE_SECONDS)
        signal_group(process, signal.SIGKILL)  # what the stage started and left behind, or the stage itself
        process.join()
        with self._lock:
            self._running.pop(directory, None)


def _result(job: Job, reply: Answer) -> Metrics:
    if isinstance(reply, StoppedError) and job.resources.launcher != Launcher.FOREGROUND:
        raise asked(job, reply)
    if isinstance(reply, StoppedError):
        ended.append(left(job))
    if isinstance(reply, StageError | StoppedError):
        raise reply
    return reply
