"""What the commands print: the plan, and at the end of a run what came of it."""

import shlex
from collections.abc import Sequence

from rich.text import Text

from flows.planning.plan import Plan, PlannedStage
from flows.reports.tables import empty_table, plain_text
from flows.wording import printable_text
from lineage.artifact import Kind
from lineage.fingerprint import short
from lineage.manifest import Manifest
from lineage.verdict import VERDICT_TABLE
from tasks.evaluate.report import TABLE_FILE
from tasks.method import Training

_TABLES = {Kind.REPORT: TABLE_FILE, Kind.VERDICT: VERDICT_TABLE}  # what people read of an output


def plan_table(plan: Plan) -> str:
    """A line per stage: what happens to it, and why."""
    table = empty_table("stage", "state", "fingerprint", "reason")
    for planned in plan.stages:
        table.add_row(planned.name, planned.state, short(planned.fingerprint), Text(planned.reason))
    count = len(plan.stale)
    verdict = (
        f"{count} of {len(plan.stages)} stages to run"
        if count
        else f"nothing to do: all {len(plan.stages)} stages are finished"
    )
    head = [f"pipeline {plan.pipeline.name}  store {plan.pipeline.store}", *plan.notes]
    trained = [f"{planned.name}: {planned.hyperparameters}" for planned in plan.stale if planned.hyperparameters]
    return printable_text("\n".join([*head, plain_text(table), *trained, verdict]))


def run_dict(plan: Plan, seconds: dict[str, float], wall: float, mlflow_run_id: str | None) -> dict[str, object]:
    """The object that ``run --json`` prints: the plan's, with what each stage took and measured."""
    document = plan.to_dict()
    rows = document["stages"]
    assert isinstance(rows, list)
    for row, planned in zip(rows, plan.stages, strict=True):
        metrics = _manifest(plan, planned).metrics
        row["seconds"] = seconds.get(planned.name, 0.0)
        row["train_seconds"] = metrics.get("train_seconds", 0.0) if planned.name in seconds else 0.0
        row["metrics"] = metrics
    return {**document, "seconds": wall, "mlflow_run_id": mlflow_run_id}


def summary(plan: Plan, seconds: dict[str, float], wall: float, words: Sequence[str]) -> str:
    """The end of a run for people: what was measured, what it took, where every model lies, what to try next."""
    shown = [(plan.entry(planned).output, _TABLES.get(planned.stage.method.produces)) for planned in plan.stages]
    tables = [output / name for output, name in shown if name]
    parts = [path.read_text() for path in tables if path.exists()]
    table = empty_table("stage", "seconds", "tokens/s", "output", numbers=("seconds", "tokens/s"))
    for planned in plan.stages:
        speed = _manifest(plan, planned).metrics.get("tokens_per_second")
        took = f"{seconds[planned.name]:.1f}" if planned.name in seconds else "reused"
        table.add_row(planned.name, took, f"{speed:,.0f}" if speed else "", str(plan.entry(planned).output))
    parts.append(plain_text(table))
    if not plan.stale:
        parts.append(f"nothing to do: all {len(plan.stages)} stages are finished ({wall:.1f} s)")
    else:
        parts.append(f"{plan.pipeline.name}: {len(plan.stale)} of {len(plan.stages)} stages run in {wall:.1f} s")
    parts.append(_next(plan, words))
    return printable_text("\n\n".join(part.rstrip() for part in parts))


def _next(plan: Plan, words: Sequence[str]) -> str:
    """A change of one field that is worth a look: the last trained stage at half its learning rate."""
    trained = [planned for planned in plan.stages if isinstance(planned.stage.method, Training)]
    if not trained:
        return f"next: posttrain plan {shlex.join(words)}".rstrip()
    rate = trained[-1].stage.method.recipe()["learning_rate"]
    change = f"stages.{trained[-1].name}.method.learning_rate={float(str(rate)) / 2:g}"
    return f"next: posttrain plan {shlex.join([*words, change])}"


def _manifest(plan: Plan, planned: PlannedStage) -> Manifest:
    manifest = plan.entry(planned).manifest()
    assert manifest is not None
    return manifest
