"""The view ``<store>/pipelines/<pipeline>/<stage>/``: a pipeline as declared, as it is now, in hard links."""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from filelock import FileLock

from lineage.digest import DigestCache, file_names
from lineage.errors import ArtifactError
from lineage.files import replace_jsonl
from lineage.lock import Lock
from lineage.manifest import Manifest
from lineage.store import MANIFEST, METRICS, PLOTS, Entry, Store

VIEWS = "pipelines"

_Link = Callable[[Path, Path], object]


class View:
    """The current outputs of one pipeline, at paths that no fingerprint is part of: what DVC tracks."""

    def __init__(self, store: Path, pipeline: str) -> None:
        self.root = store / VIEWS / pipeline
        self.digests = DigestCache(store / "digests.json")
        self._store = store

    def place(self, stage: str) -> Path:
        return self.root / stage

    def show(self, entries: Mapping[str, Entry]) -> None:
        """Moves the view to these finished entries of the store, each stage whole or not at all."""
        stale = {stage: entry for stage, entry in entries.items() if not self.shows(stage, entry)}
        if not stale:
            return
        self.root.mkdir(parents=True, exist_ok=True)
        with FileLock(self.root / ".lock"):
            for stage, entry in stale.items():
                if not self.shows(stage, entry):  # another run may have moved it meanwhile
                    self._move(stage, entry)

    def shows(self, stage: str, entry: Entry) -> bool:
        """Whether the view holds this entry, each file the same inode or at least the same bytes."""
        manifest, place = entry.manifest(), self.place(stage)
        if manifest is None or set(file_names(place / "output")) != manifest.files.keys():
            return False
        return all(
            _is_same(entry.path / name, place / name, digest, self.digests)
            for name, digest in _contents(manifest).items()
        )

    def adopt(self, stage: str) -> str | None:
        """Links what the view holds and the store lacks into the store: of a clone after ``dvc pull``.

        Returns:
            A sentence on what was done, or why it cannot be done; None where there is nothing to do.
        """
        place = self.place(stage)
        try:
            manifest = Entry(place).manifest()
        except ArtifactError as error:
            return f"{place}: is not adopted: {error}"
        if manifest is None:
            return None
        if manifest.stage != stage or not re.fullmatch("[0-9a-f]{64}", manifest.fingerprint):
            return f"{place}: is not adopted: its {MANIFEST} is of stage {manifest.stage}; restore it: dvc checkout"
        entry = Store(self._store).entry(stage, manifest.fingerprint)
        if entry.is_finished():
            return None
        damage = manifest.damage(place / "output", self.digests)
        if damage:
            return (
                f"{place}/output: is not adopted, since it is not what was committed: {'; '.join(damage[:3])}; "
                "restore it with dvc pull --force, or run the stage again"
            )
        try:
            lock = Lock(entry.path)
            if not lock.try_acquire():  # another run makes it now
                return None
            with lock.holding():
                if entry.is_finished():  # by a run that ended between the look and the lock
                    return None
                self._fill(entry, place, manifest, lock)
        except OSError as error:  # a store that may only be read
            return f"{place}: is not adopted: {error}"
        return f"{stage}: {place} is adopted as {entry.path}"

    def _move(self, stage: str, entry: Entry) -> None:
        """Builds the links beside their place and swaps: a kill leaves the old view, the new one, or none."""
        manifest = entry.manifest()
        assert manifest is not None
        entry.summarize(manifest)  # of an output that an older version made
        place, fresh, old = self.place(stage), self.root / f".{stage}.new", self.root / f".{stage}.old"
        for rest in (fresh, old):  # of an earlier attempt that was killed
            shutil.rmtree(rest, ignore_errors=True)
        for name in _contents(manifest):
            _place(entry.path / name, fresh / name, (os.link, os.symlink, shutil.copyfile))
        if place.exists():
            place.rename(old)
        fresh.rename(place)
        shutil.rmtree(old, ignore_errors=True)

    def _fill(self, entry: Entry, place: Path, manifest: Manifest, lock: Lock) -> None:
        entry.begin()
        for name in _contents(manifest):
            if (place / name).exists():
                # No symbolic link into the view: DVC deletes what lies there.
                target = entry.work if name == MANIFEST else entry.path
                _place(place / name, target / name, (os.link, shutil.copyfile))
        _restore_reports(entry)
        entry.finish(lock)


def _contents(manifest: Manifest) -> dict[str, str | None]:
    """What a view holds of an entry: path -> SHA-256, None where the manifest does not say."""
    return {
        MANIFEST: None,
        METRICS: None,
        PLOTS: None,
        **{f"output/{name}": sha for name, sha in manifest.files.items()},
    }


def _is_same(stored: Path, shown: Path, digest: str | None, digests: DigestCache) -> bool:
    """DVC links equal files of several stages to one of them, so that another inode may hold the same bytes."""
    try:
        one, other = stored.stat(), shown.stat()
    except FileNotFoundError:
        return False
    if os.path.samestat(one, other):
        return True
    return one.st_size == other.st_size and digests.digest(shown) == (digest or digests.digest(stored))


def _place(source: Path, target: Path, ways: tuple[_Link, ...]) -> None:
    """Makes ``target`` the same file as ``source`` in the first way that the file system can."""
    target.parent.mkdir(parents=True, exist_ok=True)
    source = source.resolve()  # DVC may have made it a symbolic link to its cache
    for way in ways[:-1]:
        with contextlib.suppress(OSError):
            way(source, target)
            return
    ways[-1](source, target)


def _restore_reports(entry: Entry) -> None:
    """``metrics.jsonl`` is not in the view; ``plots.json`` holds all that it said."""
    try:
        reports = json.loads((entry.path / PLOTS).read_text())
        lines = [
            {"step": report.pop("step"), "time": report.pop("time"), "metrics": report} for report in reports if report
        ]
    except (OSError, ValueError, KeyError, AttributeError):  # it is for the eye: no output depends on it
        return
    if lines:
        replace_jsonl(entry.metrics, lines)
