"""The names of this host's processors: what decides the last bits of a sum, apart from software."""

import contextlib
import platform
import subprocess
from functools import cache
from pathlib import Path

_CPUS = Path("/proc/cpuinfo")
_GPUS = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
_SECONDS = 20


@cache
def hardware() -> dict[str, str]:
    """``cpu`` by name, and ``gpu`` where there is one; each kind once, however many there are."""
    gpus = _gpus()
    return {"cpu": _cpu(), **({"gpu": gpus} if gpus else {})}


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in _CPUS.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _gpus() -> str:
    """Asks the driver, not torch, which takes seconds to import."""
    try:
        listing = subprocess.run(_GPUS, capture_output=True, text=True, timeout=_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return ", ".join(sorted({line.strip() for line in listing.splitlines() if line.strip()}))
