"""What follows a run: the promotion of a model that passed its gates, and a notification."""

import shlex
import sys
from collections.abc import Sequence

from flows.declare.operation import Retrain
from flows.planning.plan import Plan
from flows.planning.verdicts import blocking_gates, judgements, may_ask, refusals
from flows.prefect.address import configured_api_url
from flows.progress.tracking import mirror_alias
from flows.promotion.promote import other_champion, outcome, promote
from lineage.errors import ArtifactError, GateError, PipelineError
from lineage.graph.places import node_key
from lineage.promotions import read_events, rolled_back, stacks


def follow_up(plan: Plan, cli_args: Sequence[str], error: PipelineError | None = None) -> str | None:
    """Promotes what ``retrain`` names if every gate passes, and notifies the block of ``notify``.

    To be called after the record is closed, so that MLflow knows the model, and while a Prefect API is reachable.

    Args:
        plan: the plan from before the run; its stale stages have run.
        cli_args: arguments of the command.
        error: why the run failed.

    Returns:
        A paragraph on the outcome; None: nothing was to do, or no ``retrain`` is set.

    Raises:
        ArtifactError: the model was modified.
    """
    retrain, notified = plan.pipeline.operation.retrain, plan.pipeline.operation.notify
    if not (retrain or notified):
        return None
    before = _promoted_model(plan)
    kept = _promote(plan, retrain) if retrain and error is None else ""
    after = _promoted_model(plan)
    if not plan.stale and after == before:
        return None
    subject, body = outcome(plan, before, after, kept, error)
    if error:
        body = f"{body} To resume from what is finished: {shlex.join(['posttrain', 'run', *cli_args])}"
    if notified:
        _notify(notified, subject, body)
    return body


def promotion_due(plan: Plan) -> bool:
    """Whether a finished model still has to be promoted, because its run was stopped before."""
    retrain = plan.pipeline.operation.retrain
    return retrain is not None and not plan.stale and _why_not(plan, retrain) == ""


def has_work(plan: Plan) -> bool:
    """Whether a run would do something: run a stage, ask a person, or promote a model."""
    return bool(plan.stale) or may_ask(plan) or promotion_due(plan)


def pending(plan: Plan) -> list[str]:
    """A line for each approval, refusal or promotion that is due although all stages are finished."""
    retrain = plan.pipeline.operation.retrain
    try:
        lines = blocking_gates(plan)
        if retrain and promotion_due(plan):
            lines.append(f"{_model(plan, retrain)} waits for alias {retrain.alias}: a run promotes it")
        elif retrain and not plan.stale and not refusals(plan) and _promoted_model(plan) != _model(plan, retrain):
            lines.append(f"{_model(plan, retrain)}: {_why_not(plan, retrain)}")
    except ArtifactError as error:  # a verdict was modified: a run fails with the same message
        return [str(error)]
    return lines


def _promote(plan: Plan, retrain: Retrain) -> str:
    """Promotes the model if allowed; returns why not, or an empty string."""
    why_not = _why_not(plan, retrain)
    if why_not:
        return why_not
    gates = ", ".join(each.gate for each in judgements(plan))
    try:
        promote(plan.pipeline, _model(plan, retrain), retrain.alias, why=f"retrain: passed {gates}", force=False)
    except GateError as error:  # its licence forbids it, or the alias has moved meanwhile
        return str(error)
    mirror_alias(plan.pipeline, retrain.alias)
    return ""


def _why_not(plan: Plan, retrain: Retrain) -> str:
    """Why the model does not get the alias; empty: it does."""
    if _promoted_model(plan) == _model(plan, retrain):
        return "it holds the alias already"
    if refused := refusals(plan):
        return "; ".join(refusal.partition(":\n")[0] for refusal in refused)  # the verdict lists the rules
    if _was_rolled_back(plan, retrain):
        return (
            f"it held alias {retrain.alias} before, and a person rolled it back: posttrain promote "
            f"{_model(plan, retrain)} --alias {retrain.alias} sets it again"
        )
    events, identity = read_events(plan.pipeline.store), plan.stage(retrain.promote).fingerprint
    others = (
        other_champion(each.verdict, node_key(each.gate, each.manifest.fingerprint), retrain.alias, events)
        for each in judgements(plan) if each.verdict.candidate.fingerprint == identity
    )  # fmt: skip
    return next(filter(None, others), "")


def _was_rolled_back(plan: Plan, retrain: Retrain) -> bool:
    model = (retrain.promote, plan.stage(retrain.promote).fingerprint)
    return model in rolled_back(read_events(plan.pipeline.store), retrain.alias)


def _promoted_model(plan: Plan) -> str | None:
    """The model of the alias of ``retrain``, as ``stage@digits``."""
    retrain = plan.pipeline.operation.retrain
    held = stacks(read_events(plan.pipeline.store)).get(retrain.alias, []) if retrain else []
    return node_key(held[-1].stage or "", held[-1].fingerprint) if held else None


def _model(plan: Plan, retrain: Retrain) -> str:
    """The model to be promoted, as ``stage@digits``."""
    return node_key(retrain.promote, plan.stage(retrain.promote).fingerprint)


def _notify(name: str, subject: str, body: str) -> None:
    if configured_api_url() is None:  # Prefect would start a server that outlives us
        print(f"posttrain: notify={name}: not sent: no Prefect API is running", file=sys.stderr)
        return
    from flows.promotion.notify import notify  # imports prefect

    notify(name, subject, body)
