"""Sweeps without a pipeline: settings, manifests and results, each in one line."""

from collections.abc import Mapping

from hydra.core.override_parser.types import Override

from flows.declare.sweep import Objective, Sweep
from flows.sweep.folder import TrialResult
from flows.sweep.space import read_values
from lineage.store import Manifest
from tests.written_store import ran_at

RANDOM = {"_target_": "optuna.samplers.RandomSampler", "seed": 0}
TPE = {"_target_": "optuna.samplers.TPESampler", "seed": 0}


def sweep(**changes) -> Sweep:
    nothing = dict.fromkeys(("name", "until", "sampler", "pruning", "num_trials", "parallel"))
    return Sweep(**{**nothing, "params": {}, "fixed": {}, "objectives": {}, **changes})


def space_of(params: Mapping[str, str]) -> dict[str, Override]:
    return {field: read_values(field, values) for field, values in params.items()}


def maximize(metric: str = "left/score") -> Objective:
    return Objective(metric=metric, direction="maximize")


def minimize(metric: str = "left/loss") -> Objective:
    return Objective(metric=metric, direction="minimize")


def manifest(stage: str = "left", fingerprint: str = "0" * 64, **metrics: float) -> Manifest:
    return Manifest(
        pipeline="toy", stage=stage, method="M", recipe={}, fingerprint=fingerprint, inputs={}, files={},
        output_digest="", metrics=metrics, provenance=ran_at(),
    )  # fmt: skip


def complete(number: int, params: Mapping[str, str] | None = None, **values: float) -> TrialResult:
    """A trial with these objectives."""
    return TrialResult(number=number, params=params or {}, state="complete", seconds=2.0, values=values)


def ended(number: int, state: str, params: Mapping[str, str] | None = None, cause: str = "a cause") -> TrialResult:
    return TrialResult(number=number, params=params or {}, state=state, seconds=1.0, cause=cause)
