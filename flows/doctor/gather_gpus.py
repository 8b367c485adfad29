"""Asks the NVIDIA driver for its GPUs, then torch for what it can use of them."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from flows.doctor.facts import Gpus

_ROOT = Path("/")
_SIGNS = ("dev/nvidia*", "proc/driver/nvidia")  # what a driver leaves where no nvidia-smi is installed
_LIST = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
_SMI_SECONDS = 20.0
_TORCH_SECONDS = 120.0
_TORCH = """
import json, torch
cuda = torch.version.cuda
nccl = ".".join(map(str, torch.cuda.nccl.version())) if cuda and torch.distributed.is_nccl_available() else None
print(json.dumps({"cuda": cuda, "seen": torch.cuda.device_count(), "nccl": nccl}))
"""


def gather_gpus() -> Gpus | None:
    """None only where nothing speaks of a GPU: one that does not work is not the same as none."""
    if shutil.which(_LIST[0]) is None:
        sign = next((path for pattern in _SIGNS for path in sorted(_ROOT.glob(pattern))), None)
        return Gpus(driver_trouble=f"{sign} is there, and no nvidia-smi on PATH") if sign else None
    try:
        listing = _output(_LIST, _SMI_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        return Gpus(driver_trouble=_said(error, num_lines=2))  # of a mismatch the last line is but a version
    rows = [line.rpartition(", ") for line in listing.splitlines() if ", " in line]
    if not rows:
        return Gpus(driver_trouble=listing.strip() or "nvidia-smi lists none")
    return _ask_torch([row[0] for row in rows], rows[0][2])


def _ask_torch(names: Sequence[str], driver: str) -> Gpus:
    """Only where the driver shows a GPU: the import of torch takes seconds."""
    try:
        answer = json.loads(_output((sys.executable, "-c", _TORCH), _TORCH_SECONDS).splitlines()[-1])
    except (OSError, subprocess.SubprocessError) as error:
        return Gpus(names=names, driver=driver, trouble=_said(error, num_lines=1))
    return Gpus(names=names, driver=driver, cuda=answer["cuda"], seen=answer["seen"], nccl=answer["nccl"])


def _output(command: Sequence[str], seconds: float) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=True).stdout


def _said(error: Exception, num_lines: int) -> str:
    """The last lines of a command that failed: nvidia-smi prints them, Python writes them to stderr."""
    said = f"{error.stdout}\n{error.stderr}" if isinstance(error, subprocess.CalledProcessError) else ""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return "; ".join(lines[-num_lines:]) or str(error)
