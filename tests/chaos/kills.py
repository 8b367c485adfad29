"""The ways in which a run is interrupted, and who is hit."""

import contextlib
import os
import random
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.command import REPOSITORY
from tests.marked import MARK, marked, reported

Kill = Callable[[subprocess.Popen[bytes], str, random.Random], None]


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def _driver(number: signal.Signals) -> Kill:
    def kill(driver: subprocess.Popen[bytes], mark: str, chance: random.Random) -> None:
        driver.send_signal(number)

    return kill


def _all(driver: subprocess.Popen[bytes], mark: str, chance: random.Random) -> None:
    family = marked(mark)
    chance.shuffle(family)
    for process in family:
        _signal(process, signal.SIGKILL)


def _one(cli_args: str) -> Kill:
    """One of the processes whose command line holds these words; where there is none yet, the driver."""

    def kill(driver: subprocess.Popen[bytes], mark: str, chance: random.Random) -> None:
        found = [each for each in marked(mark) if each.pid != driver.pid and cli_args in reported(each)]
        if found:
            _signal(chance.choice(found), signal.SIGKILL)
        else:
            driver.kill()

    return kill


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to interrupt a run.

    Args:
        codes: with which its command may end: 0 where it goes on by itself, or was about to end.
    """

    kill: Kill
    codes: frozenset[int]


_KILLED, _STOPPED = frozenset({-signal.SIGKILL, 0}), frozenset({130, 0})

WAYS = {
    "SIGKILL of the driver": Way(kill=_driver(signal.SIGKILL), codes=_KILLED),
    "SIGTERM to the driver": Way(kill=_driver(signal.SIGTERM), codes=_STOPPED | {-signal.SIGTERM}),  # while it imports
    "Ctrl-C": Way(kill=_driver(signal.SIGINT), codes=_STOPPED | {-signal.SIGINT}),
    "SIGKILL of all": Way(kill=_all, codes=_KILLED),
    "SIGKILL of a stage or its fork server": Way(kill=_one("multiprocessing"), codes=_KILLED),
    "SIGKILL of Prefect's server": Way(kill=_one("flows.prefect.server"), codes=_KILLED | {1}),  # before any stage
}
CLUSTER_WAYS = {
    "SIGKILL of a Ray worker": Way(kill=_one("ray::"), codes=_KILLED),
    "SIGKILL of Ray's head": Way(kill=_one("gcs_server"), codes=_KILLED),
    "SIGKILL of Ray's node": Way(kill=_one("raylet/raylet"), codes=_KILLED),
}


def start(command: list[str], folder: Path, mark: str, log: int) -> subprocess.Popen[bytes]:
    """A run in a session of its own."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), MARK: mark}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )
