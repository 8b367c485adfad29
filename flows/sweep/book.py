"""What is told of a sweep's trials, to people, to its files and to MLflow, in the order of their ends."""

from collections.abc import Collection

from flows.declare.sweep import Sweep
from flows.progress.observer import Observer
from flows.sweep.files import SweepFiles
from flows.sweep.objective import judged
from flows.sweep.trial import Outcome, Trial
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

    def begins(self, trial: Trial) -> None:
        """The first stage that it does not share has begun."""
        self._begun.add(trial.number)
        self._tracker.trial_begins(trial.number, trial.params)

    def ends(self, trial: Trial, outcome: Outcome) -> Outcome:
        """Returns the outcome with its objectives; a trial without them has failed."""
        if trial.number not in self._begun:
            self.begins(trial)
        outcome = judged(self._sweep, outcome)
        self._files.add(trial, outcome)
        if outcome.state != "complete":
            cause = outcome.cause.strip().partition("\n")[0]
            self._observer.announce(f"trial {trial.number} {outcome.state}: {' '.join(trial.overrides)}: {cause}")
        own = {name: value for name, value in outcome.metrics.items() if name.partition("/")[0] in self._own}
        self._tracker.trial_ends(
            trial.number,
            TrialEnd(
                state=outcome.state, manifests=outcome.manifests, metrics=own | dict(outcome.values),
                cause=outcome.cause,
            ),
        )  # fmt: skip
        return outcome

    def failure(self) -> str | None:
        """Which trials failed, in this run of the sweep or before; None: none has."""
        rows = self._files.rows()
        failed = [str(row.number) for row in rows if row.state == "failed"]
        if not failed:
            return None
        once = ", each once more at most" if self._sweep.sampler else ""
        return (
            f"{len(failed)} of {len(rows)} trials failed: {', '.join(failed)}; each said why when it failed; "
            f"the same command again tries these, and only these{once}"
        )
