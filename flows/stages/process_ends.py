"""How the process of a stage is ended: asked, or killed with its whole group."""

import contextlib
import os
import signal
from multiprocessing.process import BaseProcess

import psutil

from flows.stages.job import CheckJob, Job
from flows.stages.session import kill_session
from flows.stages.stage_process import ask_to_stop


def ask(job: Job, process: BaseProcess) -> None:
    """Asks a stage to end: one that trains finishes its step and saves."""
    if job.method.trains and not isinstance(job, CheckJob):
        ask_to_stop(job)
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
