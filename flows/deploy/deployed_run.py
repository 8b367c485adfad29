"""One run of a deployment: what `posttrain run` does, inside a flow run that Prefect has made."""

import logging
import os
import signal
import threading
import time
from collections.abc import Sequence

from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.states import Cancelled, Completed, Failed, State

from flows.declare.config import load_pipeline
from flows.declare.pipeline import Pipeline
from flows.declared import adopt_view, show_declared, split_words
from flows.deploy.code import deployed_code
from flows.deploy.owner import sign
from flows.deploy.page import RunPage, show_plan
from flows.deploy.preset import Preset
from flows.deploy.telling import tell
from flows.deploy.turn import turn
from flows.open_run import note_before, open_run
from flows.planning.plan import Plan, make_plan
from flows.planning.verdicts import may_ask, require_passed
from flows.prefect_flow import approved, run_stages
from flows.promotion.notify import require_block
from flows.promotion.retrain import follow_up, promotion_due
from lineage.errors import ConfigError, GateError, PipelineError
from lineage.secrets import redacted
from lineage.store import create_store

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0  # between two looks whether the process that started this one still lives
_END_SECONDS = 30.0


def run_deployed(option: str, preset: Preset, overrides: Sequence[str], *, any_code: bool) -> State[None]:
    """Runs what is not finished of a pipeline; every end that is ours to tell is a state with one paragraph."""
    _live_with_parent()
    context = FlowRunContext.get()
    assert context is not None and context.flow_run is not None
    try:
        pipeline = load_pipeline(*split_words(preset.words(option, overrides)))
    except ConfigError as error:
        return Failed(message=str(error))
    try:
        sign(context.flow_run.id)
        if not any_code:
            _require_planned_code(context.flow_run.deployment_version, deployed_code(option, preset))
        words = list(map(redacted, preset.words(option, overrides)))
        return _run_in_turn(pipeline, context.flow_run, words, may_leave=not overrides)
    except GateError as refusal:
        return Failed(name="Refused", message=str(refusal))
    except PipelineError as error:
        tell(pipeline, context.flow_run.name, "failed", str(error))
        return Failed(message=str(error))
    except Exception as error:  # of the store, full or gone; of Prefect's server; of what nobody foresaw
        logger.exception("run=%s state=failed", context.flow_run.name)
        cause = f"{type(error).__name__}: {error}"
        tell(pipeline, context.flow_run.name, "failed", cause)
        return Failed(message=cause)


def _run_in_turn(pipeline: Pipeline, flow_run: FlowRun, words: Sequence[str], *, may_leave: bool) -> State[None]:
    with turn(pipeline, words, flow_run.name, may_leave=may_leave) as other:
        if other:
            return Completed(message=f"left to the run {other}, which waits for its turn and is stated alike")
        create_store(pipeline.store)
        adopt_view(pipeline)
        return _run(make_plan(pipeline), words)


def _run(plan: Plan, words: Sequence[str]) -> State[None]:
    """The end of a run whose plan is made.

    Raises:
        GateError: a gate, or a person, refused.
        PipelineError: the run failed, and nobody was told.
    """
    start = time.perf_counter()
    show_plan(plan)
    note_before(plan)
    said, rejected = None, False
    if plan.stale or may_ask(plan) or promotion_due(plan):
        try:
            rejected = not _execute(plan, words)
        except PipelineError as error:
            if follow_up(plan, words, error) is None:
                raise
            return Failed(message=str(error))
        said = follow_up(plan, words)
    show_declared(plan, words)
    if rejected:
        return Cancelled(message="rejected")
    try:
        require_passed(plan)
    except GateError:
        if plan.pipeline.operation.retrain is None:
            raise
        return Completed(name="ChampionKept", message=said or "nothing to do: the gate has refused this model before")
    return Completed(message=said or _summary(plan, time.perf_counter() - start))


def _execute(plan: Plan, words: Sequence[str]) -> bool:
    """Runs what is stale and shows what came of it; whether every approval that was asked for was given."""
    if plan.pipeline.operation.notify:
        require_block(plan.pipeline.operation.notify)
    with RunPage(plan) as page, open_run(plan, words, page, plan.stale) as run:
        page.link(run.tracker)
        run_stages(run, {})
        return approved(run)


def _summary(plan: Plan, seconds: float) -> str:
    count = len(plan.stages)
    if not plan.stale:
        return f"nothing to do: all {count} stages are finished"
    return f"{len(plan.stale)} of {count} stages run in {seconds:.1f} s"


def _require_planned_code(planned: str | None, found: str) -> None:
    """Compares the code for which this run was made with that which would run it.

    Raises:
        ConfigError: it is another.
    """
    if planned and planned != found:
        raise ConfigError(
            f"this run was planned with the code {planned}, and the code here is {found}; deploy the new code "
            "(start `posttrain serve` again, or `prefect deploy --all`) and make a new run, "
            "or give this one any_code=true"
        )


def _live_with_parent() -> None:
    """Ends this run as stopped when the server or worker that started it dies: nobody else could cancel it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the server, which passes it on as a cancellation
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_END_SECONDS)  # to end the stages and to tell Prefect, which may be gone too
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent").start()
