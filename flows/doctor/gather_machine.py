"""Looks at disks, memory, limits and GPUs. What is written for a try is gone again."""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from flows.doctor.facts import Gpus, Machine, StorePlace
from lineage.store import Entry, Store

_SHM = Path("/dev/shm")
_SMI_SECONDS = 20.0
_TORCH_SECONDS = 120.0
_ASK_TORCH = """
import json, torch
cuda = torch.version.cuda
nccl = ".".join(map(str, torch.cuda.nccl.version())) if cuda and torch.distributed.is_nccl_available() else None
print(json.dumps({"cuda": cuda, "seen": torch.cuda.device_count(), "nccl": nccl}))
"""


def gather_machine(store: Path, stages: Iterable[str]) -> Machine:
    """Of this machine, for a store and the stages of one pipeline."""
    tmp = tempfile.gettempdir()
    return Machine(
        store=_place(store, stages),
        tmp=tmp,
        tmp_free_bytes=shutil.disk_usage(tmp).free,
        shm_bytes=shutil.disk_usage(_SHM).total if _SHM.is_dir() else None,
        open_files=_open_files(),
        gpus=_gpus(),
    )


def _place(store: Path, stages: Iterable[str]) -> StorePlace:
    there = next(path for path in (store, *store.parents) if path.exists())
    refusal, links = _try_to_write(there)
    newest = [max(_outputs(store, stage), key=lambda path: path.stat().st_mtime, default=None) for stage in stages]
    size = sum(file.stat().st_size for output in newest if output for file in output.rglob("*") if file.is_file())
    return StorePlace(
        path=str(store), free_bytes=shutil.disk_usage(there).free, last_bytes=size, refusal=refusal, links=links
    )


def _outputs(store: Path, stage: str) -> list[Path]:
    entries = (Entry(path).output for path in (Store(store).root / stage).glob("*"))
    return [output for output in entries if output.is_dir()]


def _try_to_write(folder: Path) -> tuple[str, bool]:
    """Why nothing can be written, and whether a file can have two names."""
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".posttrain-doctor-") as name:
            file = Path(name, "file")
            file.touch()
            try:
                os.link(file, Path(name, "link"))
            except OSError:
                return "", False
            return "", True
    except OSError as error:
        return error.strerror or str(error), False


def _open_files() -> int:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


def _gpus() -> Gpus | None:
    """Asks torch only where the driver shows a GPU: its import takes seconds."""
    try:
        listing = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=_SMI_SECONDS, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    rows = [line.rpartition(", ") for line in listing.splitlines() if line.strip()]
    if not rows:
        return None
    names, driver = [row[0] for row in rows], rows[0][2]
    try:
        answer = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=_TORCH_SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
        trouble = said.strip().splitlines()[-1] if said and said.strip() else str(error)
        return Gpus(names=names, driver=driver, cuda=None, seen=0, nccl=None, trouble=trouble)
    torch = json.loads(answer.splitlines()[-1])
    return Gpus(names=names, driver=driver, cuda=torch["cuda"], seen=torch["seen"], nccl=torch["nccl"])
