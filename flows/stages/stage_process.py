"""The inside of a stage's process: logs to its file, ends with the driver, answers with metrics or one error."""

import contextlib
import gc
import logging
import math
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection

import psutil

from flows.stages.exit_reasons import failed
from flows.stages.job import Job
from flows.stages.worker import run_worker
from lineage.errors import StageError, StoppedError
from tasks.context import Metrics

Answer = Metrics | StageError | StoppedError

logger = logging.getLogger(__name__)


def stage_main(job: Job, connection: Connection, environment: dict[str, str]) -> None:
    """Entry point of the process.

    Args:
        environment: of the run; a process that a fork server started has that of an earlier one.
    """
    gc.freeze()  # a collection would touch, and so copy, everything that the fork server imported
    gc.enable()
    os.environ.clear()
    os.environ.update(environment)
    if job.visible_gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(job.visible_gpus)
    os.setsid()  # a session and a group of its own: whatever the stage starts can be ended with it
    threading.Thread(target=_die_with_parent, daemon=True, name="die-with-parent").start()
    _log_to(job)
    # A scheduler that ends a machine asks every process of it: save first, as if our driver had asked. The fork server
    # ignores the signal, and so do the processes that it starts.
    signal.signal(signal.SIGTERM, (lambda *_: job.ask_to_stop()) if job.method.trains else signal.SIG_DFL)
    reply = answer(job)
    with contextlib.suppress(OSError):  # the log is on a full disk
        sys.stdout.flush()
    connection.send(reply)
    connection.close()


def answer(job: Job) -> Answer:
    """Runs a job; every way to fail becomes one error that names the stage, the cause and the log."""
    try:
        if job.method.trains:
            from flows.stages.ray_train import train

            return finite(train(job))
        return finite(run_worker(job))
    except StoppedError as error:
        logger.info("stage=%s state=stopped: %s", job.stage, error)
        return error
    except (Exception, SystemExit) as error:  # a method's `sys.exit()` ends it, not us
        with contextlib.suppress(OSError):  # the log is on a full disk, as the answer says
            traceback.print_exc()
        if isinstance(error, StageError):  # it already names the worker
            return error
        return failed(job, None if job.resources.on_cluster else 0, error)


def finite(metrics: Metrics) -> dict[str, float]:
    """The metrics that JSON can represent; one that it cannot must not cost a trained model."""
    kept = {name: value for name, value in metrics.items() if isinstance(value, int | float) and math.isfinite(value)}
    for name in metrics.keys() - kept.keys():
        logger.warning("metric=%s value=%r is no finite number and is left out", name, metrics[name])
    return kept


def kill_session(leader: int) -> None:
    """Kills every process of a session except this one, including Ray's workers, which lead their own groups."""
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == leader and pid != os.getpid():
                os.kill(pid, signal.SIGKILL)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    kill_session(os.getpid())
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _log_to(job: Job) -> None:
    log = os.open(job.entry.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", force=True
    )
