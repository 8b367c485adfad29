"""What follows a run: the promotion that its verdicts allow, or none, and one paragraph that says how it ended."""

import shlex
import sys
from collections.abc import Sequence

from flows.declare.operation import Retrain
from flows.planning.plan import Plan
from flows.planning.verdicts import judgements, may_ask, standing
from flows.prefect.address import configured_api_url
from flows.promotion.promote import outcome, promote
from flows.tracking import mirror_alias
from lineage.errors import ArtifactError, GateError, PipelineError
from lineage.graph.places import node_key
from lineage.promotions import read_events, rolled_back, stacks


def follow_up(plan: Plan, words: Sequence[str], error: PipelineError | None = None) -> str | None:
    """Promotes what ``retrain`` names if every gate passes, and notifies the block of ``notify``.

    Call it when the record is closed, so that MLflow knows the model, and while a Prefect API can be reached.

    Args:
        plan: as it was made before the run: what was stale has run.
        words: the options and overrides that state the pipeline.
        error: why the run failed.

    Returns:
        What came of the run, in one paragraph; None: there was nothing to do, or no ``retrain`` is set.

    Raises:
        ArtifactError: the model is not what was committed.
    """
    retrain, notified = plan.pipeline.operation.retrain, plan.pipeline.operation.notify
    if not (retrain or notified):
        return None
    before = _holder(plan)
    kept = _promote(plan, retrain) if retrain and error is None else ""
    after = _holder(plan)
    if not plan.stale and after == before:
        return None
    subject, body = outcome(plan, before, after, kept, error)
    if error:
        body = f"{body} To go on from what is finished: {shlex.join(['posttrain', 'run', *words])}"
    if notified:
        _tell(notified, subject, body)
    return body


def promotion_due(plan: Plan) -> bool:
    """Whether a finished model waits for its promotion: its run was stopped on the way there."""
    retrain = plan.pipeline.operation.retrain
    return retrain is not None and not plan.stale and _why_not(plan, retrain) == ""


def has_work(plan: Plan) -> bool:
    """Whether a run would do something: make a stage, ask a person, or promote a model."""
    return bool(plan.stale) or may_ask(plan) or promotion_due(plan)


def pending(plan: Plan) -> list[str]:
    """A line for each thing that a run would still do, or refuse, where it has nothing to make."""
    retrain = plan.pipeline.operation.retrain
    try:
        lines = standing(plan)
        if retrain and promotion_due(plan):
            lines.append(f"{_model(plan, retrain)} waits for alias {retrain.alias}: a run promotes it")
        elif retrain and not plan.stale and _was_taken_back(plan, retrain):
            lines.append(f"{_model(plan, retrain)}: {_why_not(plan, retrain)}")
    except ArtifactError as error:  # a verdict was altered: a run says so too, and ends
        return [str(error)]
    return lines


def _promote(plan: Plan, retrain: Retrain) -> str:
    """Gives the alias to the model if it may have it; else why not."""
    why_not = _why_not(plan, retrain)
    if why_not:
        return why_not
    gates = ", ".join(each.gate for each in judgements(plan))
    try:
        promote(plan.pipeline, _model(plan, retrain), retrain.alias, why=f"retrain: passed {gates}", force=False)
    except GateError as error:  # its licence; or someone has moved the alias meanwhile
        return str(error)
    mirror_alias(plan.pipeline, retrain.alias)
    return ""


def _why_not(plan: Plan, retrain: Retrain) -> str:
    """Why the model does not get the alias now; empty: it may."""
    if _holder(plan) == _model(plan, retrain):
        return "it holds the alias already"
    refusals = [refusal for refusal in (each.refusal() for each in judgements(plan)) if refusal]
    if refusals:
        return "; ".join(refusal.partition(":\n")[0] for refusal in refusals)  # the rules stand in the verdict
    if _was_taken_back(plan, retrain):
        return (
            f"it held alias {retrain.alias} before, and a person took it back: posttrain promote "
            f"{_model(plan, retrain)} --alias {retrain.alias} gives it again"
        )
    return ""


def _was_taken_back(plan: Plan, retrain: Retrain) -> bool:
    model = (retrain.promote, plan.stage(retrain.promote).fingerprint)
    return model in rolled_back(read_events(plan.pipeline.store), retrain.alias)


def _holder(plan: Plan) -> str | None:
    """Who holds the alias that ``retrain`` gives, as ``stage@digits``."""
    retrain = plan.pipeline.operation.retrain
    held = stacks(read_events(plan.pipeline.store)).get(retrain.alias, []) if retrain else []
    return node_key(held[-1].stage or "", held[-1].fingerprint) if held else None


def _model(plan: Plan, retrain: Retrain) -> str:
    """What is to be promoted, as ``stage@digits``."""
    return node_key(retrain.promote, plan.stage(retrain.promote).fingerprint)


def _tell(name: str, subject: str, body: str) -> None:
    if configured_api_url() is None:  # Prefect would start a server of its own that outlives us
        print(f"posttrain: notify={name}: nobody was told: no Prefect API is running", file=sys.stderr)
        return
    from flows.promotion.notify import notify  # imports prefect

    notify(name, subject, body)
