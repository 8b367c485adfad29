"""Checkpoints of a running stage, ``<store>/<stage>/<fingerprint>/checkpoints/step-N/``: whole ones, or none.

A checkpoint is written aside, digested, and moved to its name by one rename. Whatever bears the name is
therefore complete, and what is damaged later is found by its digests.
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lineage.digest import digest_files
from lineage.errors import ArtifactError

RECORD = "checkpoint.json"
_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What is known of one checkpoint.

    Args:
        step: optimizer steps that were done; the position in the data is ``step`` global batches.
        time: when it was committed, in seconds since the epoch.
        train_seconds: of all attempts, up to here.
        num_workers, zero_stage: of the attempt that wrote it.
        metrics: means of the last steps' reports.
        files: path below the checkpoint -> SHA-256.
    """

    step: int
    time: float
    train_seconds: float
    num_workers: int
    zero_stage: int
    metrics: Mapping[str, float]
    files: Mapping[str, str] = field(default_factory=dict)


class Checkpoints:
    """The committed checkpoints of one stage.

    Args:
        directory: ``checkpoints/`` of the stage; may not exist yet.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def steps(self) -> list[int]:
        """Steps of the committed checkpoints, ascending."""
        names = [path.name for path in self.directory.iterdir()] if self.directory.is_dir() else []
        return sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step}"

    def read(self, step: int) -> Checkpoint:
        """The record of a committed checkpoint; its files are not read.

        Raises:
            ArtifactError: the record is gone, or cannot be read.
        """
        path = self.path(step) / RECORD
        try:
            return Checkpoint(**json.loads(path.read_text()))
        except FileNotFoundError as error:
            raise ArtifactError(f"{path} is missing") from error
        except (OSError, ValueError, TypeError) as error:
            raise ArtifactError(f"{path} cannot be read ({error})") from error

    @staticmethod
    def at(path: Path) -> Checkpoint:
        """The record of the checkpoint in a directory.

        Raises:
            ArtifactError: as ``read``.
        """
        match = _NAME.fullmatch(path.name)
        if not match:
            raise ArtifactError(f"{path} is no checkpoint: its name is not step-N")
        return Checkpoints(path.parent).read(int(match[1]))

    def records(self) -> list[Checkpoint]:
        """The committed ones by step, ascending; without those whose record cannot be read."""
        found = []
        for step in self.steps():
            with contextlib.suppress(ArtifactError):
                found.append(self.read(step))
        return found

    def newest(self) -> Checkpoint | None:
        """The last one whose record can be read; None: there is none."""
        return next(reversed(self.records()), None)

    def damage(self, step: int) -> list[str]:
        """What sets its files apart from what was committed, a phrase each; every byte is read."""
        try:
            recorded = self.read(step).files
        except ArtifactError as error:
            return [str(error)]
        found = digest_files(self.path(step))
        found.pop(RECORD, None)
        names = sorted(recorded.keys() | found.keys())
        return [
            _phrase(self.path(step) / name, recorded.get(name), found.get(name))
            for name in names
            if recorded.get(name) != found.get(name)
        ]

    def newest_intact(self) -> tuple[Checkpoint | None, list[str]]:
        """The last one whose every byte is what was committed, and the damage of those after it."""
        damaged: list[str] = []
        for step in reversed(self.steps()):
            damage = self.damage(step)
            if not damage:
                return self.read(step), damaged
            damaged += damage
        return None, damaged

    def commit(self, draft: Path, checkpoint: Checkpoint) -> Path:
        """Makes a written directory the checkpoint of its step; on the disk before it has its name.

        Args:
            draft: on the file system of the store; it is gone afterwards.
            checkpoint: without ``files``.
        """
        files = digest_files(draft)
        record = Checkpoint(**{**asdict(checkpoint), "files": files})
        (draft / RECORD).write_text(json.dumps(asdict(record), indent=1) + "\n")
        for name in (*files, RECORD):
            _flush(draft / name)
        for folder in (draft, *(path for path in draft.rglob("*") if path.is_dir())):
            _flush(folder)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._remove(checkpoint.step)  # a damaged one of the same step, which was gone back behind
        draft.replace(self.path(checkpoint.step))
        _flush(self.directory)
        return self.path(checkpoint.step)

    def keep(self, steps: Iterable[int]) -> None:
        """Removes all others, the oldest first."""
        kept = set(steps)
        for step in self.steps():
            if step not in kept:
                self._remove(step)

    def clear(self, kept: Collection[int] = ()) -> None:
        """Removes all of them but those that are to stay, and what a kill left of others."""
        self.keep(kept)
        for gone in self.directory.glob(".*") if kept else (self.directory,):
            shutil.rmtree(gone, ignore_errors=True)

    def _remove(self, step: int) -> None:
        """Its name goes first: a kill in the middle leaves no half of a checkpoint that bears it."""
        if not self.path(step).exists():
            return
        gone = self.directory / f".step-{step}.gone"
        shutil.rmtree(gone, ignore_errors=True)
        self.path(step).replace(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _phrase(path: Path, recorded: str | None, found: str | None) -> str:
    if found is None:
        return f"{path} is missing"
    if recorded is None:
        return f"{path} was added"
    return f"{path} has SHA-256 {found[:16]}, recorded is {recorded[:16]}"


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
