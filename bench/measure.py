"""One command with all processes that it starts: its seconds, CPU seconds and memory.

Every half second or so all processes are sampled: memory that is resident (RSS), and proportional (PSS: a page that n
processes share counts 1/n in each).
"""

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


@dataclass
class Tree:
    """The most memory that a tree of processes held at one time, in bytes, and its CPU seconds."""

    resident: int = 0
    proportional: int = 0
    cpu_of: dict[tuple[int, float], float] = field(default_factory=dict)  # process -> CPU seconds when last sampled

    def watch(self, pid: int, ended: threading.Event, every_seconds: float) -> None:
        """Samples until the process has ended."""
        root = psutil.Process(pid)
        while not ended.wait(every_seconds):
            resident = proportional = 0
            for process in [root, *children(root)]:
                try:
                    memory, times, begun = process.memory_full_info(), process.cpu_times(), process.create_time()
                except psutil.Error:  # ended meanwhile
                    continue
                resident, proportional = resident + memory.rss, proportional + getattr(memory, "pss", memory.rss)
                self.cpu_of[process.pid, begun] = times.user + times.system
            self.resident, self.proportional = max(self.resident, resident), max(self.proportional, proportional)


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
