"""One command with all processes that it starts: its seconds, CPU seconds and memory.

Every half second or so all processes are sampled: memory that is resident (RSS), and, where that is higher than before
by 1 %, proportional (PSS: a page that n processes share counts 1/n in each). The kernel counts PSS page by page, which
takes 0.02 s of a core for a GB and keeps the process from more memory meanwhile.
"""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

MB = 1e6
HIGHER = 1.01


@dataclass
class Tree:
    """The most memory that a tree of processes held at one time, in bytes, and its CPU seconds."""

    resident: int = 0
    proportional: int = 0
    cpu_of: dict[tuple[int, float], float] = field(default_factory=dict)  # process -> CPU seconds when last sampled

    def watch(self, pid: int, ended: threading.Event, every_seconds: float) -> None:
        """Samples until the process has ended."""
        root, highest = psutil.Process(pid), 0.0
        while not ended.wait(every_seconds):
            resident, tree = 0, [root, *children(root)]
            for process in tree:
                with contextlib.suppress(psutil.Error):  # ended meanwhile
                    times, begun = process.cpu_times(), process.create_time()
                    resident += process.memory_info().rss
                    self.cpu_of[process.pid, begun] = times.user + times.system
            self.resident = max(self.resident, resident)
            if resident > HIGHER * highest:
                highest, self.proportional = resident, max(self.proportional, sum(map(proportional, tree)))


def proportional(process: psutil.Process) -> int:
    """Its PSS in bytes, RSS where the system has none; 0: it has ended."""
    try:
        memory = process.memory_full_info()
    except psutil.Error:
        return 0
    return int(getattr(memory, "pss", memory.rss))


def children(root: psutil.Process) -> list[psutil.Process]:
    """All that it started and that is alive."""
    try:
        return root.children(recursive=True)
    except psutil.Error:
        return []


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a command took.

    Args:
        cpu: seconds; of a process that was still running at the end, up to the last sample.
        one: peak resident memory of one process that was waited for.
    """

    seconds: float
    cpu: float
    resident: int
    proportional: int
    one: int
    output: str


def measure(
    command: Sequence[str], log: Path, cwd: Path, env: Mapping[str, str] | None = None, every_seconds: float = 0.2
) -> Measured:
    """Runs a command, with stderr to ``log``; exits if it fails.

    It keeps the byte code of modules, as ``make`` does: else each process compiles thousands of them.
    """
    env = {name: value for name, value in (env or os.environ).items() if name != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    with log.open("wb") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, cwd=cwd, env=env, text=True)
    tree, ended = Tree(), threading.Event()
    watcher = threading.Thread(target=tree.watch, args=(process.pid, ended, every_seconds))
    watcher.start()
    assert process.stdout
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - start
    ended.set()
    watcher.join()
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{log.read_text()[-4000:]}")
    return Measured(
        seconds=seconds, cpu=max(usage.ru_utime + usage.ru_stime, sum(tree.cpu_of.values())), output=output,
        resident=tree.resident, proportional=tree.proportional, one=usage.ru_maxrss * 1024,
    )  # fmt: skip
