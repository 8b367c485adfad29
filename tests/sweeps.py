"""Sweeps without a pipeline: settings, manifests and outcomes, made in a line."""

from collections.abc import Mapping

from flows.declare.sweep import Objective, Sweep
from flows.sweep.trial import Outcome
from lineage.manifest import Manifest, Provenance

RANDOM = {"_target_": "optuna.samplers.RandomSampler", "seed": 0}
TPE = {"_target_": "optuna.samplers.TPESampler", "seed": 0}
_PROVENANCE = Provenance(
    start=0.0, end=1.0, hosts=[], python="", libraries={}, git_commit=None, git_dirty=None, code_digest="", seed=0,
    resources={},
)  # fmt: skip


def sweep(**changes) -> Sweep:
    nothing = dict.fromkeys(("name", "until", "sampler", "pruning", "num_trials", "parallel"))
    return Sweep(**{**nothing, "params": {}, "fixed": {}, "objectives": {}, **changes})


def maximize(metric: str = "left/score") -> Objective:
    return Objective(metric=metric, direction="maximize")


def minimize(metric: str = "left/loss") -> Objective:
    return Objective(metric=metric, direction="minimize")


def manifest(stage: str = "left", fingerprint: str = "0" * 64, **metrics: float) -> Manifest:
    return Manifest(
        pipeline="toy", stage=stage, method="M", recipe={}, fingerprint=fingerprint, inputs={}, files={},
        output_digest="", metrics=metrics, provenance=_PROVENANCE,
    )  # fmt: skip


def complete(values: Mapping[str, float] | None = None, seconds: float = 2.0, **metrics: float) -> Outcome:
    """A trial of one stage, ``left``."""
    made = {"left": manifest(**metrics)}
    return Outcome(state="complete", manifests=made, seconds=seconds, values=values or {})


def ended(state: str, cause: str = "told to") -> Outcome:
    return Outcome(state=state, manifests={}, seconds=1.0, cause=cause)
