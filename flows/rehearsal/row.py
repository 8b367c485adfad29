"""What became of one stage of a rehearsal, read from what it left behind."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePosixPath

from flows.planning.plan import Plan, PlannedStage
from flows.planning.verdicts import judgements
from flows.rehearsal.compare import WEIGHTS
from flows.rehearsal.reported import reported
from flows.wording import counted
from lineage.artifact import DATA, MODELS, Kind
from lineage.manifest import Manifest
from tasks.method import Training
from tasks.train.adapter_files import ADAPTER_DIR

_DOES = {Kind.REPORT: "evaluate", Kind.VERDICT: "judge", **dict.fromkeys(DATA, "prepare")}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One stage.

    Args:
        exercised: what of the real stage was done.
        seconds: of the rehearsal.
        memory_gib: the most that a step reported.
        checkpoint_bytes: of one checkpoint.
        real_seconds: about what the real stage will take: by the pace of the fastest step; of all but trainings, which
            did the real work, as long as they took. None: nothing says.
        verdict: ``works``, or what is wrong.
    """

    stage: str
    exercised: tuple[str, ...] = ()
    seconds: float | None = None
    memory_gib: float | None = None
    checkpoint_bytes: int | None = None
    real_seconds: float | None = None
    verdict: str = "works"


def row_of(
    plan: Plan, planned: PlannedStage, *, seconds: float, num_steps: int | None, checkpoint_bytes: int | None
) -> Row:
    """Of a stage that is finished.

    Args:
        num_steps: of the real stage; None: unknown, or it does not train.
        checkpoint_bytes: of the checkpoint that it went on from.
    """
    entry = plan.entry(planned)
    manifest = entry.manifest()
    assert manifest is not None
    made = _made(plan, planned, manifest)
    if not isinstance(planned.stage.method, Training):
        return Row(
            stage=planned.name, exercised=made, seconds=seconds, real_seconds=seconds, verdict=_verdict(plan, planned)
        )
    reports = [report.metrics for report in reported(entry.metrics)]
    resumed = bool(manifest.provenance.resumed_at)
    pace = step_seconds(reports)
    return Row(
        stage=planned.name,
        exercised=(counted(len(reports), "step"), *(("save", "resume") if resumed else ()), *made),
        seconds=seconds,
        memory_gib=max((metrics["memory_gib"] for metrics in reports if "memory_gib" in metrics), default=None),
        checkpoint_bytes=checkpoint_bytes,
        real_seconds=None if pace is None or num_steps is None else pace * num_steps,
        verdict="works" if resumed else "works, but leaves no checkpoint when it is stopped",
    )


def step_seconds(reports: Sequence[Mapping[str, float]]) -> float | None:
    """Of the fastest step, by its tokens and their pace: no save is in it, but each is the first of a process.

    None: not reported.
    """
    totals = [0.0, *(step.get("num_tokens", 0.0) for step in reports)]
    tokens = [total - before for before, total in pairwise(totals)]
    paces = [step.get("tokens_per_second", 0.0) for step in reports]
    return min((count / pace for count, pace in zip(tokens, paces, strict=True) if count > 0 < pace), default=None)


def _made(plan: Plan, planned: PlannedStage, manifest: Manifest) -> tuple[str, ...]:
    """What was done to its output; whether MLflow has it too is asked at the end, of all at once."""
    method, kind = planned.stage.method, planned.stage.method.produces
    registers = kind in MODELS and manifest.mlflow_run_id is not None
    does = () if isinstance(method, Training) else (_DOES.get(kind, "make"),)
    return (*does, *(("merge",) if _is_merged(manifest.files) else ()), *(("register",) if registers else ()))


def _is_merged(files: Iterable[str]) -> bool:
    """Whether an output is a whole model with the adapter beside it that it was merged from."""
    weights = [path for path in map(PurePosixPath, files) if path.suffix == WEIGHTS]
    return {PurePosixPath(), PurePosixPath(ADAPTER_DIR)} <= {path.parent for path in weights}


def _verdict(plan: Plan, planned: PlannedStage) -> str:
    """A refusal is what a model of two steps deserves: that the gate could judge it is what counts."""
    judged = next((each for each in judgements(plan) if each.gate == planned.name), None)
    return f"works: {judged.verdict.result}, of models of two steps" if judged else "works"
