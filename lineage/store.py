"""The store: ``<root>/<stage>/<fingerprint>/``, the only place of outputs; and their record, ``manifest.json``."""

import contextlib
import json
import logging
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from stat import S_ISDIR
from typing import TYPE_CHECKING

from lineage.artifact import SOURCE
from lineage.checkpoints import Checkpoints
from lineage.errors import ArtifactError, ConfigError
from lineage.filesystem.digest import DigestCache, damage_of, digest_files
from lineage.filesystem.files import atomic_write, flush, flush_tree, local_path
from lineage.fingerprint import short
from lineage.record.metrics_file import cut_reports, read_reports
from lineage.secrets import redacted
from lineage.source.source_checks import readable_as

if TYPE_CHECKING:
    from lineage.filesystem.lock import Lock  # of no use to who only asks the record, and slow to import

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 2  # 1: no `produces`, `source` and `execution_run_id`
MANIFEST = "manifest.json"
METRICS = "metrics.json"  # the final metrics, for `dvc metrics`
PLOTS = "plots.json"  # the reports of every step, for `dvc plots`
CACHE = "cache"  # what stages share and can rebuild, such as tokens
MODELS = "models"  # in the cache: models converted from wheels
COMPILED = "compiled"  # in the cache: what torch and Triton compile
REFERENCE_LOGPS = "reference_logps"  # in the cache: see tasks.train.losses.reference_logps
REHEARSALS = "rehearsals"  # stores of rehearsals, a directory each, with a lock
# Directories of the store that belong to no stage.
RESERVED = (CACHE, "certificates", "logs", "pipelines", REHEARSALS, "runs", "sweeps", "watch")

ENTRY_NAME = re.compile("[0-9a-f]{16}")  # of a directory: the first digits of its fingerprint

MARKER = ".posttrain-store"  # a file that commands which run stages write into a new store
# Stores that predate the marker are recognised by a manifest, a stage's log or a run record.
_ENTRY = f"*/{'[0-9a-f]' * 16}"
_OLDER = (f"{_ENTRY}/{MANIFEST}", f"{_ENTRY}/logs", f"pipelines/*/*/{MANIFEST}", "runs/????????-??????-*.json")


_NO_URL = (
    "a store needs locks and atomic renames, which object storage lacks: a local disk works, and NFSv4, Lustre or "
    "CephFS where several hosts share it; `dvc remote add -d team s3://bucket/path` and `dvc push` copy outputs to a "
    "bucket"
)


def store_path(configured: str) -> Path:
    """The absolute path of a store, which need not exist.

    Raises:
        ConfigError: the path is empty, or names a file.
        OSError: the path is not accessible.
    """
    if not configured.strip():
        raise ConfigError("store= is empty; the path of a directory is accepted; give one, or leave store= out")
    path = local_path(configured, "store=", _NO_URL).absolute()
    with contextlib.suppress(FileNotFoundError):
        if not S_ISDIR(path.stat().st_mode):
            raise ConfigError(f"store={path}: is a file; name a directory, which is created if it does not exist")
    return path


def is_store(root: Path) -> bool:
    """Whether a directory is a store: it has the marker, or files of an older store."""
    return (root / MARKER).is_file() or any(next(root.glob(pattern), None) for pattern in _OLDER)


def require_store(root: Path) -> Path:
    """Returns the store for a read-only command, which must not create one.

    Raises:
        ConfigError: the directory is not a store.
    """
    if is_store(root):
        return root
    if root.exists():
        raise ConfigError(f"store={root}: is not a store (it has no {MARKER}); name a store with store=DIR")
    raise ConfigError(
        f"there is no store here (store={root} does not exist): posttrain run makes it; or name another with store=DIR"
    )


def require_writable(root: Path) -> None:
    """Refuses a store into which nothing can be written, before a stage is to write there; leaves no file.

    Raises:
        ConfigError: it, or the folder in which it would be created, takes no files.
    """
    there = next(path for path in (root, *root.parents) if path.exists())
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        place = "it" if there == root else there
        raise ConfigError(
            f"store={root}: {place} cannot be written ({error.strerror}); name a folder that this account may write: "
            "store=DIR"
        ) from error


def create_store(root: Path) -> None:
    """Creates a store for a command that runs stages; leaves a read-only store unchanged."""
    if not is_store(root):
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"store={root}: cannot be created ({error.strerror}); a folder in one that this account may write is "
                "accepted; name another"
            ) from error
    if not (root / MARKER).exists() and os.access(root, os.W_OK):
        (root / MARKER).write_text("A store of posttrain: outputs of stages, each in STAGE/FINGERPRINT/.\n")


@dataclass(frozen=True, kw_only=True)
class SourceRecord:
    """A source as it was when a stage read it.

    Args:
        files: absolute path -> SHA-256 of every file that was read; empty if the revision is the identity.
        dvc: the hash in its ``.dvc`` file, if DVC tracks it.
        reading: the reading options that were set: format, columns, sample_count ...
    """

    path: str
    kind: str
    revision: str | None
    split: str
    labels: list[str]
    files: dict[str, str]
    dvc: str | None
    reading: dict[str, object] = field(default_factory=dict)

    def configured(self) -> dict[str, object]:
        """The declared fields besides the path, all of which are identity."""
        return {"kind": self.kind, "revision": self.revision, "split": self.split, **self.reading}


@dataclass(frozen=True, kw_only=True)
class InputRecord:
    """One slot of a finished stage: the artifact that filled it, by identity and by content."""

    artifact: str  # pipeline name of the stage, or source:NAME
    fingerprint: str
    digest: str | None  # of the bytes; None if the revision is the identity (hub ids, quickstart)
    source: SourceRecord | None = None  # None if a stage produced it


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """When, where and with what a stage ran. Not identity."""

    start: float  # seconds since the epoch
    end: float = 0.0
    hosts: list[str] = field(default_factory=list)
    python: str = ""
    libraries: dict[str, str] = field(default_factory=dict)
    git_commit: str | None = None
    git_dirty: bool | None = None
    code_digest: str = ""  # of the method's source files
    seed: int | None = None
    resources: dict[str, object] = field(default_factory=dict)
    resumed_at: list[int] = field(default_factory=list)  # steps of the checkpoints that it was resumed from
    earlier_code_digests: list[str] = field(default_factory=list)  # other code that some steps were trained by
    changed_at: list[int] = field(default_factory=list)  # those of resumed_at where the environment signature changed
    hardware: dict[str, str] = field(default_factory=dict)  # of its workers: names of cpu and gpu; empty: unknown
    kernels: dict[str, str] = field(default_factory=dict)  # on a GPU: its layers, and what sampled; with the reasons
    nodes: list[dict[str, object]] = field(default_factory=list)  # of its last attempt: host, node, workers, gpu
    because: str = ""  # why its settings were changed: RULE:STAGE@FINGERPRINT of `posttrain diagnose`

    @property
    def code_digests(self) -> list[str]:
        """Digests of all code that trained it, oldest first."""
        return [*self.earlier_code_digests, self.code_digest]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The record of a finished artifact, written last and atomically; a directory without one is unfinished."""

    pipeline: str
    stage: str
    method: str
    recipe: dict[str, object]
    fingerprint: str
    inputs: dict[str, InputRecord]
    files: dict[str, str]  # below output/: path -> SHA-256
    output_digest: str
    metrics: dict[str, float]
    provenance: Provenance
    produces: str | None = None  # kind of the output
    schema_version: int = SCHEMA_VERSION
    mlflow_run_id: str | None = None  # of this stage
    execution_run_id: str | None = None  # of the pipeline execution that produced it
    parent_run_ids: list[str] = field(default_factory=list)  # of the stages that it reads
    certificate: str | None = None  # SHA-256 of the certificate of its recipe, by `posttrain certify`
    failed_scores: dict[str, str] = field(default_factory=dict)  # of its evaluation: step, and metric -> why

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"

    @staticmethod
    def from_json(text: str) -> "Manifest":
        fields = json.loads(redacted(text))  # older versions may have recorded an address with a secret
        for slot, record in fields["inputs"].items():
            source = record.pop("source", None)
            fields["inputs"][slot] = InputRecord(**record, source=SourceRecord(**source) if source else None)
        fields["provenance"] = Provenance(**fields["provenance"])
        return Manifest(**fields)

    def missing(self, output: Path) -> list[str]:
        """Recorded files that are not below ``output``; contents are not read."""
        return [name for name in self.files if not (output / name).is_file()]

    def damage(self, output: Path, cache: DigestCache | None = None) -> list[str]:
        """How the files below ``output`` differ from the recorded ones, one phrase per file.

        Args:
            cache: as in ``digest_files``.
        """
        return damage_of(self.files, digest_files(output, cache))


DATA_REPORT = "report.json"  # of a data stage, in its output
OUTSIDE = "outside the slice"  # the report's reason for rows that the source's ``split`` excludes


def rows_read(manifest: Manifest, output: Path) -> dict[str, int]:
    """Slot -> rows that its source has: bad, held-out and excluded ones count, those outside its slice do not.

    Args:
        output: of the stage. Without its report, as after gc, a stage that reads one source has the sum in its metrics.
    """
    try:
        sources = json.loads((output / DATA_REPORT).read_text(encoding="utf-8"))["sources"]
        return {slot: each["rows_read"] - each["dropped"].get(OUTSIDE, 0) for slot, each in sources.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        slots = [slot for slot, each in manifest.inputs.items() if each.artifact.startswith(SOURCE)]
        if len(slots) != 1 or "rows" not in manifest.metrics:
            return {}
        return {slots[0]: int(manifest.metrics["rows"] + manifest.metrics.get("dropped", 0))}


class Entry:
    """One directory of the store, for one artifact, finished or not."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def output(self) -> Path:
        return self.path / "output"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def log(self) -> Path:
        return self.logs / "stage.log"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.path / "checkpoints")

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
                f"delete {self.path} to produce it again"
            ) from error

    def readable_manifest(self) -> Manifest | None:
        """The record; None while the artifact is unfinished, or the record is unreadable, which ``verify`` reports."""
        try:
            return self.manifest()
        except ArtifactError:
            return None

    def is_finished(self) -> bool:
        """Whether the artifact was committed and its files still exist."""
        manifest = self.manifest()
        if manifest is None:
            return False
        missing = manifest.missing(self.output)
        if missing:
            logger.warning("output=%s state=damaged missing=%s", self.output, ",".join(missing[:3]))
        return not missing

    def require_intact(self, cache: DigestCache | None = None) -> Manifest:
        """The manifest of a finished output, after verifying all files (except those whose digest ``cache`` knows).

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
                f"restore it, or delete {self.path} to produce it again"
            )
        return manifest

    def begin(self, step: int = 0) -> None:
        """Removes the leftovers of an unfinished attempt, and creates the directories of a new one.

        Args:
            step: of the checkpoint to resume from: reports up to there are kept.
        """
        for name in (MANIFEST, METRICS, PLOTS):
            (self.path / name).unlink(missing_ok=True)
        if step:
            self.checkpoints.keep(each for each in self.checkpoints.steps() if each <= step)  # the others are damaged
            cut_reports(self.metrics, step)
        else:
            self.checkpoints.clear()  # before the reports: after a kill there are no checkpoints without reports
            self.metrics.unlink(missing_ok=True)
        self.fence()
        shutil.rmtree(self.output, ignore_errors=True)
        self.output.mkdir(parents=True)
        self.open()

    def open(self) -> None:
        """Creates the directories that are also written before an attempt starts: scratch space and logs."""
        for directory in (self.work, self.logs):
            directory.mkdir(parents=True, exist_ok=True)

    def fence(self) -> None:
        """Removes all drafts, so that a worker that outlived its driver can commit nothing."""
        gone = self.path / f"work.{uuid.uuid4().hex[:8]}.gone"
        with contextlib.suppress(FileNotFoundError):
            self.work.replace(gone)
        for rest in self.path.glob("*.gone"):  # also of a process that was killed here
            shutil.rmtree(rest, ignore_errors=True)
        self.checkpoints.discard_drafts()

    @property
    def work(self) -> Path:
        """Scratch space of a running stage."""
        return self.path / "work"

    def commit(self, manifest: Manifest, lock: "Lock", kept: Collection[int] = ()) -> None:
        """Commits the output as an artifact: the manifest is written last and atomically.

        Args:
            kept: steps of the checkpoints to keep.

        Raises:
            ArtifactError: another process owns the lock.
        """
        lock.require()
        self.summarize(manifest)
        (self.work / MANIFEST).write_text(manifest.to_json())
        readable_as(self.output, self.work / MANIFEST)
        self.finish(lock)
        self.checkpoints.clear(kept)

    def finish(self, lock: "Lock") -> None:
        """Moves the manifest from ``work/`` to its final place, after everything that it records is on the disk.

        Raises:
            ArtifactError: another process owns the lock, and has moved ``work/`` away.
        """
        try:
            flush_tree(self.output)
            recorded = (self.metrics, self.path / METRICS, self.path / PLOTS, self.work / MANIFEST)
            flush(path for path in recorded if path.exists())
            lock.require()
            (self.work / MANIFEST).replace(self.path / MANIFEST)
        except FileNotFoundError:
            lock.require()
            raise
        flush([self.path])
        shutil.rmtree(self.work, ignore_errors=True)

    def summarize(self, manifest: Manifest) -> None:
        """Writes ``metrics.json`` and ``plots.json`` unless they exist: DVC links them, so they must not change."""
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
        """Stage name and entry of every artifact, finished or not, in order."""
        for stage in sorted(self.root.iterdir() if self.root.is_dir() else ()):
            if stage.name in RESERVED:
                continue
            with contextlib.suppress(
                FileNotFoundError, NotADirectoryError
            ):  # deleted since with its last entry, or a file
                found = sorted(stage.iterdir())
                yield from ((stage.name, Entry(path)) for path in found if ENTRY_NAME.fullmatch(path.name))

    def finished(self, stage: str) -> Iterator[Manifest]:
        """Manifests of all finished artifacts of a stage, newest first."""
        paths = (self.root / stage).glob(f"*/{MANIFEST}")
        for path in sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True):
            try:
                manifest = Entry(path.parent).manifest()
            except ArtifactError as error:  # damaged
                logger.warning("%s", error)
                continue
            if manifest:
                yield manifest
