"""What of a store nobody needs, and how much room it takes."""

import contextlib
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lineage.digest import file_names
from lineage.graph.places import node_key
from lineage.lease import LOCK, living_holder
from lineage.manifest import Manifest
from lineage.store import CACHE, ENTRY_NAME, MODELS, REFERENCE_LOGPS, REHEARSALS, Entry, Store

TOKENS = "tokens"  # the key of all that is cached: any run may read some

RESUMABLE_SECONDS = 7 * 86400.0  # for which what can be gone on from stays, unless it is said otherwise
_LEFT = ("work", "*.gone", "*.tmp", f"{LOCK}.*")  # beside a finished output: of a kill


@dataclass(frozen=True, kw_only=True)
class Garbage:
    """One thing to free.

    Args:
        what: ``stage@`` and the first digits of its fingerprint, or what else it is.
        path: its directory, of which only some things may go.
        paths: that go.
        key: by which somebody may need it; None: that keeps nothing of it.
        fingerprint: of a finished output; None: it is unfinished, or no output.
        lock: held by whoever makes it, where that is no lease.
        last_used: in seconds since the epoch.
        spared: seconds for which it stays after that, unless it is said otherwise.
    """

    what: str
    why: str
    path: Path
    paths: tuple[Path, ...]
    last_used: float
    key: str | None = None
    fingerprint: str | None = None
    lock: Path | None = None
    spared: float = 0.0

    def used_since(self) -> bool:
        """Whether it was taken up, or written to, after it was found; what only took its lease did neither."""
        below = [path for path in self.path.iterdir() if path.name != LOCK]
        return _newest([*below, self.path] if self.lock else below) > self.last_used


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
        needed: key -> who needs it; of artifacts the node, with all ancestors.
        older_than: seconds since its last use; None: as each thing is spared.

    Raises:
        ArtifactError: a manifest cannot be read, so that nobody knows what its output needs.
    """
    found = [*_outputs(store, needed), *_rehearsals(store / REHEARSALS)]
    if TOKENS not in needed:
        found += _cached(store / CACHE / "tokens", "tokens")
        found += _cached(store / CACHE / MODELS, "model")
        found += _cached(store / CACHE / REFERENCE_LOGPS, REFERENCE_LOGPS)
    now = time.time()
    gone: list[Garbage] = []
    young: list[Garbage] = []
    for each in found:
        spared = each.spared if older_than is None else older_than
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


def _outputs(store: Path, needed: Mapping[str, str]) -> Iterator[Garbage]:
    found = []
    for stage, entry in Store(store).entries():
        with contextlib.suppress(FileNotFoundError):  # another `gc` is at work: it is gone by now
            manifest = entry.manifest()
            garbage = _output(node_key(stage, entry.path.name), entry, manifest, needed)
            if garbage.paths and not living_holder(entry.path):
                found.append((manifest.provenance.end if manifest else math.inf, garbage))
    for _, garbage in sorted(found, key=lambda each: each[0], reverse=True):
        yield garbage


def _output(node: str, entry: Entry, manifest: Manifest | None, needed: Mapping[str, str]) -> Garbage:
    """Without a path where nothing of it goes."""
    last_used, steps = _last_used(entry.path), entry.checkpoints.steps()  # first: it may come into use meanwhile
    fingerprint = manifest.fingerprint if manifest else None
    if node in needed:
        paths = tuple(_left(entry, manifest)) if manifest else ()
        why = f"left by a kill beside a finished output: {', '.join(path.name for path in paths)}"
        return Garbage(
            what=node, why=why, path=entry.path, paths=paths, last_used=last_used, fingerprint=fingerprint
        )  # fmt: skip
    return Garbage(
        what=node, why="nothing refers to it" if manifest else _unfinished(entry), path=entry.path,
        paths=(entry.path,), last_used=last_used, key=node, fingerprint=fingerprint,
        spared=RESUMABLE_SECONDS if steps and not manifest else 0.0,
    )  # fmt: skip


def _left(entry: Entry, manifest: Manifest) -> Iterator[Path]:
    """What a kill left beside a finished output; of its checkpoints none that ``keep_best`` was to keep."""
    checkpoints = "checkpoints/.*" if manifest.provenance.resources.get("keep_best") else "checkpoints"
    for pattern in (*_LEFT, checkpoints):
        yield from sorted(entry.path.glob(pattern))


def _unfinished(entry: Entry) -> str:
    newest = entry.checkpoints.newest()
    return f"unfinished, with a checkpoint of step {newest.step}" if newest else "unfinished, without a checkpoint"


def _rehearsals(folder: Path) -> Iterator[Garbage]:
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_dir() and not living_holder(path):
            with contextlib.suppress(FileNotFoundError):
                yield Garbage(
                    what=f"{folder.name}/{path.name}", why="left by a rehearsal that has ended", path=path,
                    paths=(path,), last_used=_last_used(path), lock=folder / "guard", spared=RESUMABLE_SECONDS,
                )  # fmt: skip


def _cached(cache: Path, what: str) -> Iterator[Garbage]:
    """Tokens, models from wheels, and log-probabilities of references: all of it can be made again."""
    for path in sorted(cache.iterdir()) if cache.is_dir() else ():
        if path.is_dir() and ENTRY_NAME.fullmatch(path.stem):
            with contextlib.suppress(FileNotFoundError):
                yield Garbage(
                    what=f"{what} {path.name}", why="not used lately", path=path, paths=(path,),
                    last_used=_last_used(path), key=TOKENS, lock=path.with_suffix(".lock"), spared=RESUMABLE_SECONDS,
                )  # fmt: skip


def _last_used(directory: Path) -> float:
    """When a run last took it up, or something was written: a heartbeat, a report, a checkpoint, its manifest."""
    return _newest([directory, *directory.iterdir()])


def _newest(paths: Iterable[Path]) -> float:
    times = [0.0]
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            times.append(path.stat().st_mtime)
    return max(times)
