"""Whether the kernel has killed for want of memory: it counts that per control group (cgroup v2)."""

from pathlib import Path

_HINT = "; out of memory?"


def memory_kills(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """How many processes of our control group, and of those below it, the kernel has killed; None: it does not say."""
    try:
        [path] = [line.partition("::")[2] for line in own.read_text().splitlines() if line.startswith("0::")]
        events = dict(line.split() for line in (root / path.lstrip("/") / "memory.events").read_text().splitlines())
        return int(events["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None


def memory_hint(before: int | None, after: int | None) -> str:
    """What to say of a process that was killed by SIGKILL between two readings."""
    if before is not None and after is not None and after > before:
        return ": the kernel ran out of memory for it"
    return _HINT
