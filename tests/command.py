"""The command as a user calls it: a process of its own, in a folder of its own."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).parent.parent
CONF = REPOSITORY / "tests" / "conf"
STATING = ("plan", "run", "rehearse", "certify")  # the commands that take what states a pipeline
TOY = ("pipeline=toy", "model=none", "sources.rows.path=rows.txt")


class Command:
    """Calls ``posttrain`` in one folder, always with the same leading overrides.

    Args:
        tracked: whether MLflow and DVC record; off, because most tests are of something else.
    """

    def __init__(
        self, folder: Path, *overrides: str, environment: dict[str, str] | None = None, tracked: bool = False
    ) -> None:
        self.folder = folder
        self._overrides = overrides if tracked else ("tracking=none", *overrides)
        self.environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **(environment or {})}

    def _words(self, verb: str) -> list[str]:
        """What states the pipeline, for the commands that take one; of the others the folder is enough."""
        return ["--config-dir", str(CONF), *self._overrides] if verb in STATING else []

    def start(self, verb: str, *arguments: str, stderr: Path | None = None) -> subprocess.Popen[str]:
        """Starts a command; its stderr goes to a file where one is named, to be read while it runs."""
        with stderr.open("w") if stderr else contextlib.nullcontext(subprocess.PIPE) as errors:
            return subprocess.Popen(
                [sys.executable, "-m", "flows", verb, *self._words(verb), *arguments],
                cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=errors, text=True,
            )  # fmt: skip

    def __call__(self, verb: str, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        process = self.start(verb, *arguments)
        out, err = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def run(self, *arguments: str) -> dict[str, dict]:
        """Runs to success and returns the stages of ``run --json`` by name."""
        result = self("run", "--json", *arguments)
        assert result.returncode == 0, result.stderr
        return {row["stage"]: row for row in json.loads(result.stdout)["stages"]}

    def states(self, *arguments: str) -> dict[str, str]:
        result = self("plan", "--json", *arguments)
        assert result.returncode == 0, result.stderr
        return {row["stage"]: row["state"] for row in json.loads(result.stdout)["stages"]}


def wait_until(condition: Callable[[], object], what: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.1)


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """A process and all it has started."""
    parent = psutil.Process(process.pid)
    return [parent, *parent.children(recursive=True)]


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def wait_until_gone(processes: list[psutil.Process], seconds: float = 10) -> None:
    """Fails after so many seconds, and says who is still there."""
    _, left = psutil.wait_procs(processes, seconds)
    assert not alive(left), f"still there after {seconds} s: {alive(left)}"
