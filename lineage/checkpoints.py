"""Checkpoints of a stage: committed atomically with a record of step, metrics and digests; read only when whole."""

import contextlib
import hashlib
import json
import math
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath

from lineage.errors import ArtifactError, ConfigError
from lineage.filesystem.digest import damage_of, digest_files
from lineage.filesystem.files import flush, flush_tree
from lineage.filesystem.remote_files import file_system, is_url
from lineage.fingerprint import digest_json, short
from lineage.secrets import first_line, redacted, refuse_secrets
from lineage.source.source_checks import readable_as

RECORD = "checkpoint.json"
NOT_SENT = "not-sent.txt"  # in a stage's work directory: why its mirror lacks the newest checkpoint
_PIECE_BYTES = 8 * 2**20
_DIGEST = "digest"  # SHA-256 of all else in the record


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The record of one checkpoint.

    Args:
        step: completed optimizer steps; the position in the data is ``step`` global batches.
        time: when it was committed, in seconds since the epoch.
        train_seconds: of all attempts so far.
        num_workers, zero_stage, micro_batch_size, cpus_per_worker, sharding: of the attempt that wrote it; None:
            unknown.
        metrics: means of the last steps' reports.
        can_move: whether another number of workers or another sharding can resume from it.
        files: path below the checkpoint -> SHA-256.
    """

    step: int
    time: float
    train_seconds: float
    num_workers: int
    zero_stage: int
    metrics: Mapping[str, float]
    micro_batch_size: int | None = None
    cpus_per_worker: int | None = None
    sharding: str | None = None
    can_move: bool = True
    files: Mapping[str, str] = field(default_factory=dict)


def write_record(directory: Path, checkpoint: Checkpoint) -> None:
    """Writes the record into its checkpoint, without non-finite metrics, which JSON cannot express."""
    numbers = {name: value for name, value in checkpoint.metrics.items() if math.isfinite(value)}
    fields = asdict(replace(checkpoint, metrics=numbers))
    (directory / RECORD).write_text(json.dumps({**fields, _DIGEST: digest_json(fields)}, indent=1) + "\n")


def read_record(directory: Path) -> Checkpoint:
    """The record in a checkpoint (ArtifactError: it is missing, unreadable or modified)."""
    path = directory / RECORD
    try:
        fields = json.loads(path.read_text())
        recorded = fields.pop(_DIGEST)
        found = digest_json(fields)
        checkpoint = Checkpoint(**fields)
    except FileNotFoundError as error:
        raise ArtifactError(f"{path} is missing") from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ArtifactError(f"{path} cannot be read ({type(error).__name__}: {error})") from error
    if found != recorded:
        raise ArtifactError(f"{path} has SHA-256 {short(found)}, recorded in it is {str(recorded)[:16]}")
    return checkpoint


_NAME = re.compile(r"step-(\d+)")


class Checkpoints:
    """The committed checkpoints of one stage.

    Args:
        directory: ``checkpoints/`` of the stage; may not exist yet.
        require: called before a commit and before ``keep`` removes checkpoints; raises if another process owns the
            directory.
    """

    def __init__(self, directory: Path, require: Callable[[], None] = lambda: None) -> None:
        self.directory = directory
        self._require = require

    def steps(self) -> list[int]:
        """Steps of the committed checkpoints, ascending."""
        names = [path.name for path in self.directory.iterdir()] if self.directory.is_dir() else []
        return sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step}"

    def read(self, step: int) -> Checkpoint:
        """The record of a committed checkpoint; its files are not read.

        Raises:
            ArtifactError: the record is missing, unreadable or modified.
        """
        record = read_record(self.path(step))
        if record.step != step:
            raise ArtifactError(f"{self.path(step) / RECORD} is the record of step {record.step}")
        return record

    @staticmethod
    def at(path: Path) -> Checkpoint:
        """The record of the checkpoint in a directory (ArtifactError: as ``read``)."""
        match = _NAME.fullmatch(path.name)
        if not match:
            raise ArtifactError(f"{path} is not a checkpoint: its name is not step-N")
        return Checkpoints(path.parent).read(int(match[1]))

    def records(self) -> list[Checkpoint]:
        """Records of the committed checkpoints, by ascending step; unreadable records are skipped."""
        found = []
        for step in self.steps():
            with contextlib.suppress(ArtifactError):
                found.append(self.read(step))
        return found

    def newest(self) -> Checkpoint | None:
        """The last checkpoint with a readable record and all files present, contents unchecked; None: there is none."""
        for each in reversed(self.records()):
            if all((self.path(each.step) / name).exists() for name in each.files):
                return each
        return None

    def damage(self, step: int) -> list[str]:
        """How its files differ from what was committed, one phrase per file; reads every byte."""
        try:
            recorded = self.read(step).files
        except ArtifactError as error:
            return [str(error)]
        found = digest_files(self.path(step))
        found.pop(RECORD, None)
        return damage_of(recorded, found, f"{self.path(step)}/")

    def newest_intact(self) -> tuple[Checkpoint | None, list[str]]:
        """The last undamaged checkpoint, and the damage of the later ones; reads every byte."""
        damaged: list[str] = []
        for step in reversed(self.steps()):
            damage = self.damage(step)
            if not damage:
                return self.read(step), damaged
            damaged += damage
        return None, damaged

    def commit(self, draft: Path, checkpoint: Checkpoint, digests: Mapping[str, str] | None = None) -> Path:
        """Renames a written directory to the checkpoint of its step, after flushing it to the disk.

        A suspended former owner harms no successor: ``Entry.fence`` of the successor removes the draft, at its first
        place and at the one where it waits for the rename; a checkpoint that was renamed before that is complete, and
        the successor resumes from it. No directory is renamed onto another: ``Entry.begin`` has removed all later
        steps, so an existing one belongs to the successor.

        Args:
            draft: a directory on the file system of the store; it is moved.
            checkpoint: its record, without ``files``.
            digests: path below the draft -> SHA-256, as far as they were computed while the files were written.

        Raises:
            FileNotFoundError: the new owner of the lock has removed the draft.
            OSError: the step has a checkpoint already; or the disk is full or not reachable.
            PipelineError: as ``require`` raises it.
        """
        files = digest_files(draft, known=digests)
        write_record(draft, replace(checkpoint, files=files))
        readable_as(draft, draft / RECORD)
        flush_tree(draft)
        self.directory.mkdir(parents=True, exist_ok=True)
        fresh = self.directory / f".step-{checkpoint.step}.{uuid.uuid4().hex[:8]}"
        draft.replace(fresh)
        self._require()
        fresh.replace(self.path(checkpoint.step))
        flush([self.directory])
        return self.path(checkpoint.step)

    def adopt(self, mirror: "Mirror", step: int) -> Checkpoint:
        """Copies a checkpoint from its mirror, in place of a damaged one.

        Raises:
            ArtifactError: the mirror has other bytes than were committed.
        """
        fresh = self.directory / f".step-{step}.{uuid.uuid4().hex[:8]}"
        fresh.mkdir(parents=True)
        try:
            record = mirror.pull(step, fresh)
            flush_tree(fresh)
            self._require()
            self._remove(step)
            fresh.replace(self.path(step))
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        flush([self.directory])
        return record

    def keep(self, steps: Iterable[int]) -> None:
        """Removes all other checkpoints, oldest first (PipelineError: as ``require`` raises it)."""
        others = sorted(
            set(self.steps()) - set(steps)
        )  # listed before the check: a process suspended in between removes nothing of its successor
        self._require()
        for step in others:
            self._remove(step)

    def clear(self, kept: Collection[int] = ()) -> None:
        """Removes all checkpoints and drafts at once; with ``kept``, removes the others one by one.

        Without ``kept``, ``require`` is not called: the caller has just acquired or checked the lock.

        Raises:
            PipelineError: as ``require`` raises it, with ``kept``.
        """
        if kept:
            self.keep(kept)
            self.discard_drafts()
            return
        gone = self.directory.with_name(f"{self.directory.name}.{uuid.uuid4().hex[:8]}.gone")
        with contextlib.suppress(FileNotFoundError):
            self.directory.replace(gone)
        shutil.rmtree(gone, ignore_errors=True)

    def discard_drafts(self) -> None:
        """Removes uncommitted drafts and half-removed checkpoints."""
        for draft in self.directory.glob(".*"):
            gone = draft.with_name(f".{uuid.uuid4().hex[:8]}.gone")
            with contextlib.suppress(FileNotFoundError):
                draft.replace(gone)  # a process that commits it now finds all of it, or nothing
            shutil.rmtree(gone, ignore_errors=True)

    def _remove(self, step: int) -> None:
        """Renames before it deletes: a kill in the middle leaves no partial checkpoint under a step's name."""
        if not self.path(step).exists():
            return
        gone = self.directory / f".step-{step}.gone"
        shutil.rmtree(gone, ignore_errors=True)
        self.path(step).replace(gone)
        shutil.rmtree(gone, ignore_errors=True)


_KEYS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and AWS_ENDPOINT_URL for a server of your own"
_ACCESS = (
    f"with its package installed (s3fs, gcsfs, adlfs) and credentials in the environment (of s3:// {_KEYS}); or set it "
    "to null"
)
_IN_ENVIRONMENT = f"export the secret where its package reads it (of s3:// {_KEYS})"


def not_sent(work: Path) -> str:
    """What the mirror of a training lacks, to be added to a message; empty: nothing."""
    with contextlib.suppress(OSError):
        return f"; {(work / NOT_SENT).read_text()}"
    return ""


class Mirror:
    """Copies of a stage's checkpoints in object storage, ``URL/STAGE/FINGERPRINT/step-N/``.

    The record of a checkpoint is written last and deleted first: a step with one is whole.

    Args:
        url: as ``resources.checkpoint_mirror`` has it; credentials are those of the environment.
        directory: of the stage in the store.

    Raises:
        ConfigError: it is no URL, or holds a secret.
    """

    def __init__(self, url: str, directory: Path) -> None:
        if not is_url(url):
            raise ConfigError(
                f"resources.checkpoint_mirror={url}: is no URL; s3://BUCKET/PREFIX and others that fsspec writes are "
                "accepted, and file:///PATH for a disk of this machine"
            )
        refuse_secrets(url, "resources.checkpoint_mirror", _IN_ENVIRONMENT)
        self.url = f"{url.rstrip('/')}/{directory.parent.name}/{directory.name}"
        self._configured = url

    def require_writable(self) -> None:
        """Requires that files can be written and deleted there."""
        try:
            with file_system(f"{self.url}/.probe") as (files, path):
                files.pipe_file(path, b"posttrain")
                files.rm_file(path)
        except Exception as error:  # of a file system's own library: no common base
            raise ConfigError(
                f"resources.checkpoint_mirror={redacted(self._configured)}: cannot be written "
                f"({first_line(error)}); give a URL that fsspec writes, such as s3://BUCKET/PREFIX, {_ACCESS}"
            ) from error

    def steps(self) -> list[int]:
        """Steps of its whole checkpoints, ascending (ConfigError: it cannot be listed)."""
        try:
            with file_system(self.url) as (files, path):
                files.invalidate_cache()
                found = files.glob(f"{path}/step-*/{RECORD}")
        except Exception as error:
            raise ConfigError(
                f"resources.checkpoint_mirror={redacted(self._configured)}: cannot be listed "
                f"({first_line(error)}); see that it is there, {_ACCESS}"
            ) from error
        return sorted(int(match[1]) for each in found if (match := _NAME.fullmatch(PurePosixPath(each).parent.name)))

    def read(self, step: int) -> Checkpoint:
        """The record of a checkpoint (ArtifactError: it is unreadable or modified)."""
        with tempfile.TemporaryDirectory() as folder, file_system(f"{self.url}/step-{step}") as (files, path):
            (Path(folder) / RECORD).write_bytes(files.cat_file(f"{path}/{RECORD}"))
            return read_record(Path(folder))

    def push(self, folder: Path, record: Checkpoint, is_cancelled: Callable[[], bool] = lambda: False) -> bool:
        """Copies a committed checkpoint there, and digests what it sends; false: it was cancelled.

        Raises:
            ArtifactError: a file is not what was committed, or the copy has another size.
        """
        with file_system(f"{self.url}/step-{record.step}") as (files, path):
            for name in (*record.files, RECORD):
                digest, size = hashlib.sha256(), 0
                with (folder / name).open("rb") as source, files.open(f"{path}/{name}", "wb") as target:
                    while piece := source.read(_PIECE_BYTES):
                        if is_cancelled():
                            return False
                        digest.update(piece)
                        target.write(piece)
                        size += len(piece)
                if digest.hexdigest() != record.files.get(name, digest.hexdigest()):
                    raise ArtifactError(f"{folder / name} is not what was committed")
                files.invalidate_cache()
                if files.size(f"{path}/{name}") != size:
                    raise ArtifactError(f"{self.url}/step-{record.step}/{name} has not the size that was sent")
        return True

    def pull(self, step: int, folder: Path) -> Checkpoint:
        """Copies a checkpoint from there into an empty directory (ArtifactError: it is not what was committed)."""
        with file_system(f"{self.url}/step-{step}") as (files, path):
            (folder / RECORD).write_bytes(files.cat_file(f"{path}/{RECORD}"))
            record = read_record(folder)
            for name in record.files:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                files.get_file(f"{path}/{name}", str(folder / name))
        found = digest_files(folder)
        found.pop(RECORD)
        if damage := damage_of(record.files, found, f"{self.url}/step-{step}/"):
            raise ArtifactError("; ".join(damage[:3]))
        return record

    def keep(self, steps: Collection[int]) -> None:
        """Deletes all other checkpoints, oldest first, and what was sent of one that a stop or a kill cut off."""
        with file_system(self.url) as (files, path):
            whole = self.steps()
            names = (_NAME.fullmatch(PurePosixPath(each).name) for each in files.glob(f"{path}/step-*"))
            for step in sorted({int(match[1]) for match in names if match} - {*steps}):
                if step in whole:
                    files.rm_file(f"{path}/step-{step}/{RECORD}")
                files.rm(f"{path}/step-{step}", recursive=True)
