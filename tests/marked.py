"""The processes of a run, found by a mark that all it starts inherits: also those that were started later."""

import contextlib
import time

import psutil

MARK = "POSTTRAIN_TEST_RUN"  # in the environment
LEFT_SECONDS = 60.0


def marked(mark: str) -> list[psutil.Process]:
    """Every living process of the runs that bear a mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it ended meanwhile, or is not ours to look at
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def left(mark: str) -> list[str]:
    """What still runs a minute after the end of a run, by command line; nothing, as soon as there is nothing.

    What does not run holds no port and no file.
    """
    deadline = time.monotonic() + LEFT_SECONDS
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.2)
    return [reported(process) for process in marked(mark)]


def reported(process: psutil.Process) -> str:
    """Its command line."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return "?"
