"""Who may use this machine's CPUs and GPUs now: slots that all runs of a user share.

A slot is a file lock, so that it is free again the moment its holder dies. Requests are served in
the order in which they come, GPUs apart from CPUs, so that a stage which waits for a GPU holds
nobody up who needs none.
"""

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from filelock import FileLock, Timeout

from lineage.errors import ConfigError

_POLL_SECONDS = 0.05


@contextlib.contextmanager
def admitted(cpus: int, gpus: int) -> Iterator[tuple[int, ...]]:
    """Waits until the machine has room, then holds it.

    Args:
        cpus: a request for more than the machine has is served with all of them.
        gpus: not more than ``require_gpus`` has let pass.

    Yields:
        The indices of the GPUs.
    """
    with _hold("gpu", gpus, count_gpus()) as indices, _hold("cpu", min(cpus, count_cpus()), count_cpus()):
        yield indices


def require_gpus(stage: str, gpus: int) -> None:
    """Refuses, before anything starts, what would wait for ever.

    Raises:
        ConfigError: there are fewer GPUs than asked.
    """
    if gpus and gpus > count_gpus():
        raise ConfigError(
            f"stages.{stage}.resources asks for {gpus} GPUs, this machine has {count_gpus()}; "
            f"use resources=local for a run without, or launcher=cluster and RAY_ADDRESS for a cluster that has them"
        )


def count_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


@cache
def count_gpus() -> int:
    """NVIDIA GPUs of this machine; asks the driver, not torch, which takes seconds to import."""
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in listing.splitlines())


@contextlib.contextmanager
def _hold(kind: str, wanted: int, total: int) -> Iterator[tuple[int, ...]]:
    if not wanted:
        yield ()
        return
    folder = Path(tempfile.gettempdir()) / f"posttrain-slots-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    held: dict[int, FileLock] = {}
    with contextlib.ExitStack() as stack:
        with FileLock(folder / f"{kind}.turn", thread_local=False, poll_interval=_POLL_SECONDS):
            while len(held) < wanted:
                _take(folder, kind, wanted, total, held, stack)
        yield tuple(sorted(held))


def _take(
    folder: Path, kind: str, wanted: int, total: int, held: dict[int, FileLock], stack: contextlib.ExitStack
) -> None:
    """Takes the slots that are free now; waits a moment when they do not suffice."""
    for index in range(total):
        if index not in held and len(held) < wanted:
            lock = FileLock(folder / f"{kind}-{index}", thread_local=False)
            with contextlib.suppress(Timeout):
                lock.acquire(blocking=False)
                held[index] = lock
                stack.callback(lock.release)
    if len(held) < wanted:
        time.sleep(_POLL_SECONDS)
