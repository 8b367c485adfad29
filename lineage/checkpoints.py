"""Checkpoints of a running stage, ``<store>/<stage>/<fingerprint>/checkpoints/step-N/``: whole ones, or none.

A checkpoint is written aside, digested, and moved to its name by one rename. Whatever bears the name is
therefore complete, and what is damaged later is found by its digests.
"""

import contextlib
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
from lineage.flush import flush, flush_tree
from lineage.readable import readable_as

__all__ = ["RECORD", "Checkpoint", "Checkpoints"]

_NAME = re.compile(r"step-(\d+)")


class Checkpoints:
    """The committed ones of one stage.

    Args:
        directory: ``checkpoints/`` of the stage; may not exist yet.
        require: called before one is committed, and before ``keep`` removes any; raises where another process may
            write here now.
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
        """The last one whose record can be read and whose files are there, whatever is in them; None: none is."""
        for each in reversed(self.records()):
            if all((self.path(each.step) / name).exists() for name in each.files):
                return each
        return None

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

        Who sleeps anywhere in here harms no heir: its ``Entry.fence`` takes the draft away, first where it was written,
        then where it waits for its name; what has its name by then is whole, and gone on from. Nothing is removed for
        it, and no directory is renamed onto another: all of later steps went before the first (``Entry.begin``), so
        one that is there is the heir's.

        Args:
            draft: on the file system of the store; it is gone afterwards.
            checkpoint: without ``files``; of a step that has none.

        Raises:
            FileNotFoundError: the draft was taken away, by the owner of the lock now.
            OSError: there is one of that step; or the disk is full, or away.
            PipelineError: as ``require`` raises it.
        """
        files = digest_files(draft)
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

    def keep(self, steps: Iterable[int]) -> None:
        """Removes all others, the oldest first.

        Raises:
            PipelineError: as ``require`` raises it.
        """
        others = sorted(set(self.steps()) - set(steps))  # first: whoever sleeps from here on removes no heir's
        self._require()
        for step in others:
            self._remove(step)

    def clear(self, kept: Collection[int] = ()) -> None:
        """Removes them, all at once, and what a kill left of others; where some are to stay, the others one by one.

        Without ``kept`` nothing is required: for callers that have just acquired or checked the lock.

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
        """Removes what never got its name, or has it no more."""
        for draft in self.directory.glob(".*"):
            gone = draft.with_name(f".{uuid.uuid4().hex[:8]}.gone")
            with contextlib.suppress(FileNotFoundError):
                draft.replace(gone)  # first: whoever would give it its name finds it whole, or not at all
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
    return f"{path} has SHA-256 {short(found)}, recorded is {short(recorded)}"
