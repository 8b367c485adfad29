"""A trial, what became of it, and who proposes trials."""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from lineage.manifest import Manifest

TrialState = Literal["complete", "pruned", "failed"]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of the pipeline.

    Args:
        number: from 0, in the order of proposal.
        params: field -> value as an override states it.
    """

    number: int
    params: Mapping[str, str]

    @property
    def overrides(self) -> list[str]:
        return [f"{field}={value}" for field, value in self.params.items()]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a trial.

    Args:
        manifests: stage -> record of its output, of all that is finished.
        seconds: of the stages of its own that are finished, whoever made them; no wait counts.
        cause: of a failure or a pruning; empty for a complete trial.
        values: objective -> number of a complete trial; ``objective.judged`` fills them in.
    """

    state: TrialState
    manifests: Mapping[str, Manifest]
    seconds: float
    cause: str = ""
    values: Mapping[str, float] = field(default_factory=dict)

    @property
    def metrics(self) -> dict[str, float]:
        """``STAGE/METRIC`` -> number, of every stage that is finished."""
        return {
            f"{stage}/{name}": value
            for stage, manifest in self.manifests.items()
            for name, value in manifest.metrics.items()
            if math.isfinite(value)
        }


class Proposer(Protocol):
    """Proposes trials and hears of them, from one thread."""

    def at_work(self) -> AbstractContextManager[None]:
        """Around all that follows: meanwhile no other process takes up the trials that this one asked for."""

    def ask(self) -> Trial | None:
        """The next trial; None: there is none any more."""

    def report(self, trial: Trial, stage: str, step: int, metrics: Mapping[str, float]) -> bool:
        """Hears a report of a running stage; True: the trial is to be pruned."""

    def tell(self, trial: Trial, outcome: Outcome) -> None:
        """Hears the end of a trial."""
