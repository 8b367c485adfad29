"""How a stage is ended: asked, or killed with its whole group."""

import contextlib
import os
import signal
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

import psutil

from flows.declare.pipeline import Stage
from flows.stages.job import CheckJob, Job
from flows.stages.session import kill_session
from flows.stages.stage_process import ask_to_stop
from tasks.context import Launcher

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
    if job.method.trains and not isinstance(job, CheckJob):
        ask_to_stop(job.stop_file)
    else:
        signal_group(process, signal.SIGTERM)


def signal_group(process: BaseProcess, number: signal.Signals) -> None:
    """Signals a stage and all that it has started."""
    if process.pid is None:
        return
    if number == signal.SIGKILL:
        kill_session(process.pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        try:
            os.killpg(process.pid, number)  # the stage made its pid its group
        except ProcessLookupError:
            if process.is_alive():  # it is starting, and has not come to that
                os.kill(process.pid, number)


def end_fork_server() -> None:
    """It ends by itself when we do, but first finishes its imports."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "multiprocessing.forkserver" in " ".join(child.cmdline()):
                child.kill()
