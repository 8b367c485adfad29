"""The store: ``<root>/<stage>/<fingerprint>/``, the only place of outputs."""

import contextlib
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path
from stat import S_ISDIR
from typing import TYPE_CHECKING

from lineage.checkpoints import Checkpoints
from lineage.digest import DigestCache
from lineage.errors import ArtifactError, ConfigError
from lineage.files import atomic_write, flush, flush_tree
from lineage.fingerprint import short
from lineage.manifest import Manifest
from lineage.metrics_file import cut_reports, read_reports
from lineage.source_checks import readable_as

if TYPE_CHECKING:
    from lineage.lock import Lock  # of no use to who only asks the record, and slow to import

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
METRICS = "metrics.json"  # the final metrics, for `dvc metrics`
PLOTS = "plots.json"  # the reports of every step, for `dvc plots`
CACHE = "cache"  # what stages share and can make again, such as tokens
MODELS = "models"  # below it: those that were converted from wheels
REFERENCE_LOGPS = "reference_logps"  # in the cache: see tasks.train.reference_logps
REHEARSALS = "rehearsals"  # stores of rehearsals, a directory each, with a lock
# Directories of the store that belong to no stage.
RESERVED = (CACHE, "certificates", "logs", "pipelines", REHEARSALS, "runs", "sweeps", "watch")

ENTRY_NAME = re.compile("[0-9a-f]{16}")  # of a directory: the first digits of its fingerprint

MARKER = ".posttrain-store"  # a file that only `run` and its kind write: nothing else makes a store of a directory
# What a store without it holds that was written before there was one: a manifest, a stage's log, the note of a run.
_ENTRY = f"*/{'[0-9a-f]' * 16}"
_OLDER = (f"{_ENTRY}/{MANIFEST}", f"{_ENTRY}/logs", f"pipelines/*/*/{MANIFEST}", "runs/????????-??????-*.json")


def store_path(stated: str) -> Path:
    """Where a store is to be, which need not exist.

    Raises:
        ConfigError: nothing is stated, or it is a file.
        OSError: no directory can be there.
    """
    if not stated.strip():
        raise ConfigError("store= is empty; the path of a directory is accepted; state one, or leave store= out")
    path = Path(stated).expanduser().absolute()
    with contextlib.suppress(FileNotFoundError):
        if not S_ISDIR(path.stat().st_mode):
            raise ConfigError(f"store={path}: is a file; name a directory, which is made if it does not exist")
    return path


def is_store(root: Path) -> bool:
    """Whether a directory is a store: it has the marker, or what an older one holds."""
    return (root / MARKER).is_file() or any(next(root.glob(pattern), None) for pattern in _OLDER)


def require_store(root: Path) -> Path:
    """The store, for a command that asks it: nothing is created or written where there is none.

    Raises:
        ConfigError: there is none.
    """
    if is_store(root):
        return root
    found = f"is no store (it has no {MARKER})" if root.exists() else "does not exist; posttrain run creates it"
    raise ConfigError(f"store={root}: {found}; name a store with store=DIR")


def create_store(root: Path) -> None:
    """Makes a directory a store, for a command that runs stages; one that can only be read stays as it is."""
    if not is_store(root):
        root.mkdir(parents=True, exist_ok=True)
    if not (root / MARKER).exists() and os.access(root, os.W_OK):
        (root / MARKER).write_text("A store of posttrain: outputs of stages, each in STAGE/FINGERPRINT/.\n")


class Entry:
    """One directory of the store: the place of one artifact, finished or not."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.output = path / "output"
        self.logs = path / "logs"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = Checkpoints(path / "checkpoints")

    def manifest(self) -> Manifest | None:
        """The record, or None while the artifact is unfinished.

        Raises:
            ArtifactError: the record is there but cannot be read.
        """
        try:
            return Manifest.from_json((self.path / MANIFEST).read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ArtifactError(
                f"{self.path / MANIFEST} is not a manifest of this version ({error}); "
                f"delete {self.path} to make it again"
            ) from error

    def is_finished(self) -> bool:
        """Whether the artifact was committed and its files are still there."""
        manifest = self.manifest()
        if manifest is None:
            return False
        missing = manifest.missing(self.output)
        if missing:
            logger.warning("output=%s state=damaged missing=%s", self.output, ",".join(missing[:3]))
        return not missing

    def require_intact(self, cache: DigestCache | None = None) -> Manifest:
        """The record of a finished output, after reading every byte of it again (all that ``cache`` does not know).

        Raises:
            ArtifactError: it is unfinished, or a file is missing, changed or new.
        """
        manifest = self.manifest()
        if manifest is None:
            raise ArtifactError(f"{self.path}: is not finished: it has no {MANIFEST}; run its pipeline again")
        damage = manifest.damage(self.output, cache)
        if damage:
            raise ArtifactError(
                f"{self.output}: is not what was committed: {'; '.join(damage[:3])}; "
                f"restore it, or delete {self.path} to make it again"
            )
        return manifest

    def begin(self, step: int = 0) -> None:
        """Clears what an unfinished attempt left, and makes the directories of a new one.

        Args:
            step: of the checkpoint that is gone on from: its reports up to there stay.
        """
        for name in (MANIFEST, METRICS, PLOTS):
            (self.path / name).unlink(missing_ok=True)
        if step:
            self.checkpoints.keep(each for each in self.checkpoints.steps() if each <= step)  # the others are damaged
            cut_reports(self.metrics, step)
        else:
            self.checkpoints.clear()  # first: a restart after a kill finds none, or all with their reports
            self.metrics.unlink(missing_ok=True)
        self.fence()
        shutil.rmtree(self.output, ignore_errors=True)
        self.output.mkdir(parents=True)
        self.open()

    def open(self) -> None:
        """Makes the directories that are written to before an attempt begins too: scratch space and logs."""
        for directory in (self.work, self.logs):
            directory.mkdir(parents=True, exist_ok=True)

    def fence(self) -> None:
        """A worker that outlived its driver commits nothing from here on: what it would move to its name is gone."""
        gone = self.path / f"work.{uuid.uuid4().hex[:8]}.gone"
        with contextlib.suppress(FileNotFoundError):
            self.work.replace(gone)
        for rest in self.path.glob("*.gone"):  # also of one that was killed here
            shutil.rmtree(rest, ignore_errors=True)
        self.checkpoints.discard_drafts()

    @property
    def work(self) -> Path:
        """Scratch space of a running stage."""
        return self.path / "work"

    def commit(self, manifest: Manifest, lock: "Lock", kept: Collection[int] = ()) -> None:
        """Makes the output an artifact: the manifest is written last, and atomically.

        Args:
            kept: steps of the checkpoints that stay beside the output.

        Raises:
            ArtifactError: another process owns the lock.
        """
        lock.require()
        self.summarize(manifest)
        (self.work / MANIFEST).write_text(manifest.to_json())
        readable_as(self.output, self.work / MANIFEST)
        self.finish(lock)
        self.checkpoints.clear(kept)  # the output is what the others were for

    def finish(self, lock: "Lock") -> None:
        """Moves the manifest from ``work/`` to its place, the last of all: what it records is on the disk by then.

        Raises:
            ArtifactError: another process owns the lock, which takes ``work/`` away before it looks.
        """
        try:
            flush_tree(self.output)
            told = (self.metrics, self.path / METRICS, self.path / PLOTS, self.work / MANIFEST)
            flush(path for path in told if path.exists())
            lock.require()
            (self.work / MANIFEST).replace(self.path / MANIFEST)
        except FileNotFoundError:
            lock.require()
            raise
        flush([self.path])
        shutil.rmtree(self.work, ignore_errors=True)

    def summarize(self, manifest: Manifest) -> None:
        """Writes ``metrics.json`` and ``plots.json`` where they are lacking: once, since DVC links them too."""
        plots = [{"step": each.step, "time": each.time, **each.metrics} for each in read_reports(self.metrics)]
        for name, content in ((METRICS, manifest.metrics), (PLOTS, plots)):
            if not (self.path / name).exists():
                atomic_write(self.path / name, json.dumps(content, indent=1) + "\n")


class Store:
    """All entries below one root."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def entry(self, stage: str, fingerprint: str) -> Entry:
        return Entry(self.root / stage / short(fingerprint))

    def entries(self) -> Iterator[tuple[str, Entry]]:
        """Every directory of an artifact, finished or not, with its stage's name; in order."""
        for stage in sorted(self.root.iterdir() if self.root.is_dir() else ()):
            if stage.name in RESERVED:
                continue
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # gone since, with its last entry; a file
                found = sorted(stage.iterdir())
                yield from ((stage.name, Entry(path)) for path in found if ENTRY_NAME.fullmatch(path.name))

    def finished(self, stage: str) -> Iterator[Manifest]:
        """Records of every finished artifact of a stage, newest first."""
        paths = (self.root / stage).glob(f"*/{MANIFEST}")
        for path in sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True):
            try:
                manifest = Entry(path.parent).manifest()
            except ArtifactError as error:  # of another artifact than the one that is asked for
                logger.warning("%s", error)
                continue
            if manifest:
                yield manifest
