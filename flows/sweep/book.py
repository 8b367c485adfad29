"""What is told of a sweep's trials, to people, to its files and to MLflow, in the order of their ends."""

import math
from collections.abc import Collection

from flows.observer import Observer
from flows.sweep.files import SweepFiles
from flows.sweep.objective import judged
from flows.sweep.settings import Sweep
from flows.sweep.trial import Outcome, Trial, TrialState
from lineage.tracker import Tracker, TrialEnd


class Book:
    """Hears of every trial.

    Args:
        own: the stages that differ from trial to trial: theirs are the metrics that are compared.
    """

    def __init__(
        self, tracker: Tracker, observer: Observer, sweep: Sweep, files: SweepFiles, own: Collection[str]
    ) -> None:
        self._tracker, self._observer = tracker, observer
        self._sweep, self._files, self._own = sweep, files, own
        self._begun: set[int] = set()
        self._states: dict[int, TrialState] = {}

    def begins(self, trial: Trial) -> None:
        """The first stage that it does not share has begun."""
        self._begun.add(trial.number)
        self._tracker.trial_begins(trial.number, trial.params)

    def ends(self, trial: Trial, outcome: Outcome) -> Outcome:
        """Returns the outcome with its objectives; a trial without them has failed."""
        if trial.number not in self._begun:
            self.begins(trial)
        outcome = judged(self._sweep, outcome)
        self._states[trial.number] = outcome.state
        self._files.add(trial, outcome)
        if outcome.state != "complete":
            cause = outcome.cause.strip().partition("\n")[0]
            self._observer.announce(f"trial {trial.number} {outcome.state}: {' '.join(trial.overrides)}: {cause}")
        metrics = _own_metrics(outcome, self._own) | dict(outcome.values)
        self._tracker.trial_ends(
            trial.number,
            TrialEnd(state=outcome.state, manifests=outcome.manifests, metrics=metrics, cause=outcome.cause),
        )
        return outcome

    def failure(self) -> str | None:
        """Which trials failed; None: none has."""
        failed = sorted(number for number, state in self._states.items() if state == "failed")
        if not failed:
            return None
        return (
            f"{len(failed)} of {len(self._states)} trials failed: {', '.join(map(str, failed))}; each said why when it "
            "failed; the same command again tries these, and only these"
        )


def _own_metrics(outcome: Outcome, own: Collection[str]) -> dict[str, float]:
    """``STAGE/METRIC`` -> number, of the stages that this trial does not share with all others."""
    return {
        f"{stage}/{name}": value
        for stage, manifest in outcome.manifests.items()
        if stage in own
        for name, value in manifest.metrics.items()
        if math.isfinite(value)
    }
