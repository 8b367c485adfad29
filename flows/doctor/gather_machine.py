"""Looks at disks, memory and limits. What is written for a try is gone again."""

import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from flows.doctor.facts import Machine, StorePlace
from flows.doctor.gather_gpus import gather_gpus
from lineage.store import Entry, Store

_SHM = Path("/dev/shm")


def gather_machine(store: Path, stages: Iterable[str]) -> Machine:
    """Of this machine, for a store and the stages of one pipeline."""
    tmp = tempfile.gettempdir()
    return Machine(
        store=_place(store, stages),
        tmp=tmp,
        tmp_free_bytes=shutil.disk_usage(tmp).free,
        shm_bytes=shutil.disk_usage(_SHM).total if _SHM.is_dir() else None,
        open_files=_open_files(),
        gpus=gather_gpus(),
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
