"""A control group with little memory, in which the kernel kills for want of it."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

_BYTES = 64 * 2**20
_ROOT = Path("/sys/fs/cgroup")
# Of cgroup v2 and v1: where groups are made, the limit, what keeps them from swapping, and where the kills are counted.
_KINDS = (
    (_ROOT, "memory.max", "memory.swap.max", "memory.events"),
    (_ROOT / "memory", "memory.limit_in_bytes", "memory.swappiness", "memory.oom_control"),
)


class MemoryGroup:
    """One of 64 MiB."""

    def __init__(self, path: Path, counted: str) -> None:
        self.path = path
        self._counted = path / counted

    def kills(self) -> int:
        """How many processes in it the kernel has killed."""
        return int(dict(line.split() for line in self._counted.read_text().splitlines())["oom_kill"])


@contextlib.contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """Makes one, or skips the test where nobody may."""
    for root, limit, swap, counted in _KINDS:
        path = root / f"posttrain-test-{os.getpid()}"
        try:
            path.mkdir()
        except OSError:
            continue
        try:
            if not (path / limit).exists():  # memory is not limited by this kind
                continue
            (path / limit).write_text(str(_BYTES))
            if (path / swap).exists():
                (path / swap).write_text("0")
            yield MemoryGroup(path, counted)
            return
        finally:
            path.rmdir()
    pytest.skip(
        "no control group with a memory limit can be made here: that needs root, and cgroups that may be written"
    )
