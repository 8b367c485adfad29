"""What of a store nobody needs, how much room it takes, and its end: crash-safe, and alone with each entry."""

import contextlib
import json
import math
import os
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from lineage.digest import file_names
from lineage.graph.places import node_key
from lineage.lease import LOCK, Lease, living_holder
from lineage.store import CACHE, ENTRY_NAME, MANIFEST, Entry, Store

FREED = "freed.jsonl"  # of the store: the finished outputs that were freed, so that no mirror of theirs is an orphan

RESUMABLE_SECONDS = 7 * 86400.0  # for which an output that can be gone on from is spared, unless it is said otherwise
_LEFT = ("work", "work.*.gone", "checkpoints", "*.tmp", f"{LOCK}.*")  # beside a finished output: of a kill


@dataclass(frozen=True, kw_only=True)
class Garbage:
    """One thing to free.

    Args:
        what: ``stage@`` and the first digits of its fingerprint, or what else it is.
        paths: that go.
        entry: of an output; None: it is none.
        fingerprint: of a finished one; None: it is unfinished, or no output.
        last_used: in seconds since the epoch.
    """

    what: str
    why: str
    paths: tuple[Path, ...]
    last_used: float
    entry: Path | None = None
    fingerprint: str | None = None


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much room something takes.

    Args:
        num_bytes: of its files.
        freed: of those of them that no hard link from elsewhere keeps on the disk, such as one of DVC's cache.
    """

    num_bytes: int
    freed: int


def find(store: Path, needed: Mapping[str, str], older_than: float | None) -> tuple[list[Garbage], list[Garbage]]:
    """What nobody needs, and of that what is too young to go; children before what they were made from.

    Args:
        needed: node -> who needs it; with all ancestors.
        older_than: seconds since its last use; None: no matter, but for what can be gone on from.

    Raises:
        ArtifactError: a manifest cannot be read, so that nobody knows what its output needs.
    """
    found = [*_outputs(store, needed), *_tokens(store / CACHE / "tokens")]
    now = time.time()
    gone: list[Garbage] = []
    young: list[Garbage] = []
    for each in found:
        spared = older_than
        if spared is None:
            is_resumable = each.entry and not each.fingerprint and Entry(each.entry).checkpoints.steps()
            spared = RESUMABLE_SECONDS if is_resumable or each.entry is None else 0.0
        (gone if now - each.last_used >= spared else young).append(each)
    return gone, young


def size(garbage: Iterable[Garbage]) -> Size:
    """Of all of it together: bytes that two of them share count once."""
    links: dict[tuple[int, int], int] = {}
    status: dict[tuple[int, int], os.stat_result] = {}
    for path in (path for each in garbage for path in each.paths):
        for file in [path / name for name in file_names(path)] if path.is_dir() else [path]:
            with contextlib.suppress(OSError):  # it goes, or went, by itself
                found = file.lstat()
                key = found.st_dev, found.st_ino
                links[key] = links.get(key, 0) + 1
                status[key] = found
    freed = sum(found.st_size for key, found in status.items() if links[key] >= found.st_nlink)
    return Size(num_bytes=sum(found.st_size for found in status.values()), freed=freed)


def free(store: Path, garbage: Garbage) -> bool:
    """Deletes it, unless somebody is at work there or it is no longer what was found. A kill leaves it unfinished."""
    if garbage.entry is None:
        with contextlib.suppress(Timeout), FileLock(garbage.paths[0].with_suffix(".lock"), timeout=0):
            _delete(garbage.paths)
            return True
        return False
    entry, lease = Entry(garbage.entry), Lease(garbage.entry)
    if not lease.try_acquire():
        return False
    with lease.holding():
        manifest = entry.manifest()
        if (manifest.fingerprint if manifest else None) != garbage.fingerprint:
            return False
        if manifest and entry.path in garbage.paths:
            _note(store, manifest.stage, manifest.fingerprint)
            (entry.path / MANIFEST).unlink()  # first: what is half deleted is unfinished
        for path in garbage.paths:
            _delete([below for below in path.iterdir() if below.name != LOCK] if path == entry.path else [path])
    with contextlib.suppress(OSError):  # a run that waited for it begins there now
        entry.path.rmdir()
        entry.path.parent.rmdir()
    return True


def freed(store: Path) -> set[tuple[str, str]]:
    """Stage and fingerprint of the finished outputs that were ever freed."""
    found = set()
    with contextlib.suppress(FileNotFoundError):
        for line in (store / FREED).read_text().splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # cut by a kill
                told = json.loads(line)
                found.add((told["stage"], told["fingerprint"]))
    return found


def _note(store: Path, stage: str, fingerprint: str) -> None:
    with (store / FREED).open("a") as file:
        file.write(json.dumps({"time": time.time(), "stage": stage, "fingerprint": fingerprint}) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _outputs(store: Path, needed: Mapping[str, str]) -> Iterator[Garbage]:
    found = []
    for stage, entry in Store(store).entries():
        manifest, node = entry.manifest(), node_key(stage, entry.path.name)
        if living_holder(entry.path):
            continue
        paths: tuple[Path, ...] = (entry.path,)
        why = "nothing refers to it" if manifest else _unfinished(entry)
        if node in needed:
            paths = tuple(path for pattern in _LEFT for path in sorted(entry.path.glob(pattern))) if manifest else ()
            why = f"left by a kill beside a finished output: {', '.join(path.name for path in paths)}"
        if paths:
            garbage = Garbage(
                what=node, why=why, paths=paths, entry=entry.path, last_used=_last_used(entry),
                fingerprint=manifest.fingerprint if manifest else None,
            )  # fmt: skip
            found.append((manifest.provenance.end if manifest else math.inf, garbage))
    for _, garbage in sorted(found, key=lambda each: each[0], reverse=True):
        yield garbage


def _unfinished(entry: Entry) -> str:
    newest = entry.checkpoints.newest()
    return f"unfinished, with a checkpoint of step {newest.step}" if newest else "unfinished, without a checkpoint"


def _last_used(entry: Entry) -> float:
    """When something was last written: a heartbeat of its stage, a report, a checkpoint, its manifest."""
    times = [entry.path.stat().st_mtime]
    for path in entry.path.iterdir():
        with contextlib.suppress(FileNotFoundError):
            times.append(path.stat().st_mtime)
    return max(times)


def _tokens(cache: Path) -> Iterator[Garbage]:
    """Tokens that can be made again; when they were last read is as exact as the file system notes it, often a day."""
    for path in sorted(cache.iterdir()) if cache.is_dir() else ():
        if path.is_dir() and ENTRY_NAME.fullmatch(path.stem):
            times = [file.stat() for file in path.iterdir()] or [path.stat()]
            used = max(max(each.st_atime, each.st_mtime) for each in times)
            yield Garbage(what=f"tokens {path.name}", why="not used lately", paths=(path,), last_used=used)


def _delete(paths: Collection[Path]) -> None:
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
