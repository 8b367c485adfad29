"""Who may use this machine's CPUs and GPUs now: slots that all runs of a user share.

A slot is a file lock, so that it is free again the moment its owner dies. Requests are served in
the order in which they come, GPUs apart from CPUs, so that a stage which waits for a GPU holds
nobody up who needs none.
"""

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from filelock import FileLock, Timeout

from lineage.errors import ConfigError
from lineage.remote_files import private_folder

_POLL_SECONDS = 0.05


Waiting = Callable[[], None]


@contextlib.contextmanager
def admitted(cpus: int, gpus: int, waiting: Waiting) -> Iterator[tuple[str, ...]]:
    """Waits until the machine has room, then holds it.

    Args:
        cpus: a request for more than the machine has is served with all of them.
        gpus: not more than ``require_gpus`` has let pass.
        waiting: called at every look that was in vain; may raise, to end the wait.

    Yields:
        The GPUs, as ``CUDA_VISIBLE_DEVICES`` names them.
    """
    cores = [str(index) for index in range(count_cpus())]
    with _hold("gpu", gpus, visible_gpus(), waiting) as devices, _hold("cpu", min(cpus, len(cores)), cores, waiting):
        yield devices


def require_gpus(stage: str, gpus: int) -> None:
    """Refuses, before anything starts, what would wait for ever.

    Raises:
        ConfigError: there are fewer GPUs than asked.
    """
    if gpus and gpus > len(visible_gpus()):
        raise ConfigError(
            f"stages.{stage}.resources asks for {gpus} GPUs, this machine shows {len(visible_gpus())}; "
            "use resources=local for a run without, or launcher=cluster and RAY_ADDRESS for a cluster that has them"
        )


def count_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def visible_gpus() -> list[str]:
    """The NVIDIA GPUs that this process may use: those the user or a scheduler has named, else all."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [device for device in named.split(",") if device and device != "-1"]
    return [str(index) for index in range(_count_gpus())]


@cache
def _count_gpus() -> int:
    """Asks the driver, not torch, which takes seconds to import."""
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in listing.splitlines())


@contextlib.contextmanager
def _hold(kind: str, wanted: int, slots: list[str], waiting: Waiting) -> Iterator[tuple[str, ...]]:
    if not wanted:
        yield ()
        return
    folder = private_folder() / "slots"
    folder.mkdir(exist_ok=True)
    held: list[str] = []
    with contextlib.ExitStack() as stack:
        with contextlib.ExitStack() as turn:
            while not _take(folder / f"{kind}.turn", turn):
                _wait(waiting)
            while len(held) < wanted:
                held += _take_free(
                    folder, kind, wanted - len(held), [slot for slot in slots if slot not in held], stack
                )
                if len(held) < wanted:
                    _wait(waiting)
        yield tuple(held)


def _take_free(folder: Path, kind: str, wanted: int, slots: list[str], stack: contextlib.ExitStack) -> Iterator[str]:
    for slot in slots:
        if wanted and _take(folder / f"{kind}-{slot}", stack):
            wanted -= 1
            yield slot


def _wait(waiting: Waiting) -> None:
    waiting()
    time.sleep(_POLL_SECONDS)


def _take(path: Path, stack: contextlib.ExitStack) -> bool:
    """Takes a lock if it is free; the stack gives it back."""
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return False
    stack.callback(lock.release)
    return True
