"""One thread that does what is asked of it in order, so that nobody waits for MLflow. Imports no mlflow."""

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable

Task = Callable[[], None]


_FAILED_SECONDS = 10.0
_LOOK_SECONDS = 0.2
_CAUSE_LENGTH = 200


class Worker:
    """Does tasks in order, and an idle task about once a second between them.

    What a task raises is told once on stderr and ends nothing.

    Args:
        name: of what the tasks write to, for that message.
    """

    def __init__(self, name: str, idle: Task, interval_seconds: float) -> None:
        self._name = name
        self._idle = idle
        self._interval = interval_seconds
        self._tasks: queue.Queue[Task | None] = queue.Queue()
        self._told = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True, name="mlflow")

    def start(self) -> None:
        self._thread.start()

    def has_failed(self) -> bool:
        """Whether anything was not done."""
        return self._told.is_set()

    def do(self, task: Task) -> None:
        self._tasks.put(task)

    def close(self, timeout_seconds: float) -> None:
        """Waits for all that was asked; gives up on it when that takes too long, sooner where something failed."""
        self._tasks.put(None)
        start = time.monotonic()
        end = start + timeout_seconds
        while self._thread.is_alive() and time.monotonic() < end:
            self._thread.join(_LOOK_SECONDS)
            if self._told.is_set():  # each task that is left would wait for its own time-out
                end = min(end, start + _FAILED_SECONDS)
        if self._thread.is_alive():
            self._tell(f"no answer within {end - start:.0f} s")

    def _work(self) -> None:
        looked = time.monotonic()
        while True:
            try:
                task = self._tasks.get(timeout=self._interval)
            except queue.Empty:
                task = self._idle
            if task is None:
                return
            self._attempt(task)
            if time.monotonic() - looked > self._interval:  # also while tasks keep coming
                self._attempt(self._idle)
                looked = time.monotonic()

    def _attempt(self, task: Task) -> None:
        try:
            task()
        except Exception as error:  # MLflow's own, its HTTP library's, its database's: no common base
            cause = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            self._tell(cause if len(cause) <= _CAUSE_LENGTH else f"{cause[:_CAUSE_LENGTH]} ...")

    def _tell(self, cause: str) -> None:
        if self._told.is_set():
            return
        self._told.set()
        with contextlib.suppress(OSError):  # nobody reads stderr
            print(
                f"posttrain: MLflow at {self._name}: {cause}; the run goes on, part of its record is missing there; "
                "`posttrain rebuild` fills it in later from the manifests",
                file=sys.stderr, flush=True,
            )  # fmt: skip
