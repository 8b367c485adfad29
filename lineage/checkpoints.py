"""Checkpoints of a running stage, ``<store>/<stage>/<fingerprint>/checkpoints/step-N/``: whole ones, or none.

A checkpoint is written aside, digested, and moved to its name by one rename. Whatever bears the name is
therefore complete, and what is damaged later is found by its digests.
"""

import contextlib
import os
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from pathlib import Path

from lineage.checkpoint_record import RECORD, Checkpoint, read_record, write_record
from lineage.digest import digest_files
from lineage.errors import ArtifactError
from lineage.fingerprint import short

__all__ = ["RECORD", "Checkpoint", "Checkpoints"]

_NAME = re.compile(r"step-(\d+)")


class Checkpoints:
    """The committed checkpoints of one stage.

    Args:
        directory: ``checkpoints/`` of the stage; may not exist yet.
        require: called before one is committed or removed; raises where another process may write here now.
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
            ArtifactError: the record is gone, cannot be read, or is not what was committed.
        """
        record = read_record(self.path(step))
        if record.step != step:
            raise ArtifactError(f"{self.path(step) / RECORD} is the record of step {record.step}")
        return record

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

        Raises:
            FileNotFoundError: the draft was taken away, by who holds the lease now.
        """
        files = digest_files(draft)
        write_record(draft, replace(checkpoint, files=files))
        for name in (*files, RECORD):
            _flush(draft / name)
        for folder in (draft, *(path for path in draft.rglob("*") if path.is_dir())):
            _flush(folder)
        self.directory.mkdir(parents=True, exist_ok=True)
        fresh = self.directory / f".step-{checkpoint.step}.{uuid.uuid4().hex[:8]}"
        draft.replace(fresh)  # before anything is removed for it: a holder that came after us has taken it away
        self._require()
        self._remove(checkpoint.step)  # a damaged one of the same step, which was gone back behind
        fresh.replace(self.path(checkpoint.step))
        _flush(self.directory)
        return self.path(checkpoint.step)

    def keep(self, steps: Iterable[int]) -> None:
        """Removes all others, the oldest first."""
        self._require()
        kept = set(steps)
        for step in self.steps():
            if step not in kept:
                self._remove(step)

    def clear(self, kept: Collection[int] = ()) -> None:
        """Removes all of them but those that are to stay, and what a kill left of others; all of them at once."""
        if kept:
            self.keep(kept)
            self.discard_drafts()
            return
        gone = self.directory.with_name(f"{self.directory.name}.{uuid.uuid4().hex[:8]}.gone")
        with contextlib.suppress(FileNotFoundError):
            self.directory.replace(gone)
        shutil.rmtree(gone, ignore_errors=True)

    def discard_drafts(self) -> None:
        """Removes what never got its name, or has it no more."""
        for draft in self.directory.glob(".*"):
            shutil.rmtree(draft, ignore_errors=True)

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
    return f"{path} has SHA-256 {short(found)}, recorded is {short(recorded)}"


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
