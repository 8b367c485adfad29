"""The Prefect flow of a run: order, waiting, and a person's approval. The plan decides, `execute` does.

Stages never depend on Prefect. While its server is away they finish and commit; what it has not heard at the end, the
next command reports to it.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from uuid import UUID

import httpx
from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.exceptions import TerminationSignal
from prefect.input import RunInput, keyset_from_paused_state
from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from prefect.states import Cancelled, Crashed, Failed, Paused, State
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.utilities.urls import url_for

from flows.planning.verdicts import Judgement, judgements, record_decision, require_passed
from flows.prefect.address import configured_api_url, prefix_of_command
from flows.prefect.open_runs import api_here, is_away, settle, settle_left
from flows.prefect.server import EmbeddedServer
from flows.progress.recorder import RunRecorder
from flows.progress.run_record import End, OpenFlow, RunRecord, end_of
from flows.stages.run import Run
from flows.stages.stops import handling_sigterm
from lineage.errors import GateError, PipelineError, StoppedError
from lineage.mlflow.address import shown

APPROVAL_SECONDS = 7 * 24 * 3600
_POLL_SECONDS = 1.0
_HEALTH_SECONDS = 5.0
_REPORT_SECONDS = 30.0  # for Prefect to take the end of a run
_STOP_SECONDS = 3.0  # the same of a stop, which gets 30 in all; stages that save have had most of them
_AGAIN_SECONDS = 1.0  # Prefect, once interrupted, makes another call to report that
_STOPPED = "stopped; run the same command again to resume"


def in_flow(
    recorder: RunRecorder, store: Path, body: Callable[[], State[None] | None], server: EmbeddedServer | None, *,
    name: str, flow_run_name: str | None = None,
) -> None:  # fmt: skip
    """Runs the body of a command as one Prefect flow run; until Prefect knows its end, the record of the run keeps it.

    Args:
        body: returns the state that the flow run ends in; None: completed.
        server: that was started for this run alone; None: it is the user's.

    Raises:
        BaseException: what the body raised, whether or not it could be reported to Prefect.
    """
    is_over = False
    errors: list[BaseException] = []
    with contextlib.ExitStack() as reporting:

        @flow(name=name, flow_run_name=flow_run_name, persist_result=False, task_runner=task_runner())
        def pipeline_flow() -> State[None] | None:
            nonlocal is_over
            flow_run = enter_flow_run(recorder, is_ours=server is not None)
            was_away = reporting.enter_context(_closing(recorder, flow_run))
            is_stop = False
            try:
                with handling_sigterm():
                    state = body()
            except BaseException as error:
                is_stop = end_of(error)[0] == "stopped"  # which is no crash
                errors.append(KeyboardInterrupt() if is_stop and not isinstance(error, StoppedError) else error)
                state = Cancelled(message=_STOPPED) if is_stop else Failed(message=str(error))
            is_over = True
            leave_flow_run(recorder, state)
            if not is_stop and is_away():
                was_away.set()
            reporting.enter_context(_at_most(_STOP_SECONDS if is_stop or was_away.is_set() else _REPORT_SECONDS))
            return state

        if server:  # its database has the runs of all such servers
            settle_left(store)
        # Heartbeats tell a server that a run is alive. This one ends with the run, and each flow would wait up to a
        # second for their thread.
        quiet = temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}) if server else contextlib.nullcontext()
        try:
            with quiet:
                pipeline_flow()
        except _TimeIsOver:
            pass  # Prefect did not take the end
        except BaseException as error:
            if recorder.record.open_flow is None and isinstance(error, httpx.HTTPError):
                raise PipelineError(
                    f"Prefect at {configured_api_url()} went away before the first stage ({error}); "
                    "run the same command again"
                ) from error
            if not is_over or isinstance(error, KeyboardInterrupt):  # the second: Ctrl-C, after the body
                raise
            # Else Prefect repeats the state that the body returned.
    if errors:
        raise errors[0]


@contextlib.contextmanager
def _closing(recorder: RunRecorder, flow_run: FlowRun) -> Iterator[threading.Event]:
    """At the end of the context, removes the open flow run from the record if Prefect knows how it ended.

    Yields an event that is set once Prefect was away: the states of task runs, which are events, may be lost.
    """
    was_away, closed = threading.Event(), threading.Event()

    def watch() -> None:
        while not closed.wait(_HEALTH_SECONDS):
            if is_away():
                was_away.set()

    threading.Thread(target=watch, daemon=True, name="prefect health").start()
    try:
        yield was_away
    finally:
        closed.set()
        state, open_flow = flow_run.state, recorder.record.open_flow
        is_known = open_flow and state and state.is_final() and state.type.value == open_flow.end
        if open_flow and ((is_known and not was_away.is_set()) or settle(recorder.record)):
            recorder.change(lambda record: replace(record, open_flow=None))


class _TimeIsOver(KeyboardInterrupt):
    """Interrupts Prefect's client, which retries for minutes; a server may also accept a call and never answer."""


@contextlib.contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Interrupts the context after some seconds."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _TimeIsOver

    handler, timer = signal.signal(signal.SIGALRM, interrupt), signal.getitimer(signal.ITIMER_REAL)
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def enter_flow_run(recorder: RunRecorder, *, is_ours: bool) -> FlowRun:
    """Records the flow run that this code runs in; if this process is killed, the next command reports that.

    Args:
        is_ours: its server was started for this run alone, and has no pages.
    """
    run, api = flow_run_here(), None if is_ours else shown(str(PREFECT_API_URL.value()))
    page = None if is_ours else url_for("flow-run", run.id)
    flow, deployed = OpenFlow(flow_run=str(run.id), api=api_here()), run.deployment_id is not None

    def entered(record: RunRecord) -> RunRecord:
        links = replace(record.links, flow_run=flow.flow_run, deployed=deployed, flow_page=page, prefect_api=api)
        return replace(record, links=links, open_flow=flow)

    recorder.change(entered)
    return run


def leave_flow_run(recorder: RunRecorder, state: State[None] | None) -> None:
    """Records the state that it ends in; None: completed. If Prefect does not take it, the next command reports it."""
    end: End = state.type.value if state else "COMPLETED"
    message = (state and state.message) or ""

    def left(record: RunRecord) -> RunRecord:
        return replace(record, open_flow=record.open_flow and replace(record.open_flow, end=end, message=message))

    recorder.change(left)


def flow_run_here() -> FlowRun:
    """The flow run that this code runs in."""
    context = FlowRunContext.get()
    assert context is not None and context.flow_run is not None
    return context.flow_run


def as_task(title: str, work: Callable[[], None]) -> None:
    """Runs work in the calling thread, inside a flow run, as a task run of this name."""

    def run_stage() -> None:
        work()

    task(run_stage, name="run_stage", task_run_name=title, cache_policy=NO_CACHE, persist_result=False)()


def task_runner() -> ThreadPoolTaskRunner:
    """Threads that wait: what may run at once is admitted by CPUs and GPUs."""
    return ThreadPoolTaskRunner(max_workers=64)


def approved(run: Run) -> bool:
    """Asks for every approval that is missing, until one is denied."""
    for judged in judgements(run.plan):
        if judged.awaits_approval:
            approved, who, why = ask(judged, run.announce)
            record_decision(run.plan.pipeline.store, judged, approved=approved, who=who, why=why)
            if not approved:
                return False
    return True


def verdict_state(run: Run) -> State[None] | None:
    """How a flow run ends that a gate or a person refused; None: they did not."""
    if not approved(run):
        return Cancelled(message="rejected")
    try:
        require_passed(run.plan)
    except GateError as refusal:
        return Failed(name="Refused", message=str(refusal))
    return None


class Approval(RunInput):
    """The form that Prefect's UI shows; both may stay empty."""

    who: str = ""
    why: str = ""


def ask(judged: Judgement, announce: Callable[[str], None]) -> tuple[bool, str, str]:
    """Pauses this flow run until a person resumes or cancels it.

    Prefect's own ``pause_flow_run`` would wait on after a cancellation.

    Returns:
        Whether it was approved; who did, as far as is known; and why.
    """
    flow_run = flow_run_here()
    paused = Paused(timeout_seconds=APPROVAL_SECONDS, pause_key=judged.gate)
    keyset = keyset_from_paused_state(paused)
    paused.state_details.run_input_keyset = keyset
    form = Approval.with_initial_data(description=judged.table())
    with get_client(sync_client=True) as client:
        url = str(client.api_url).rstrip("/")
        try:
            client.set_flow_run_state(flow_run.id, paused)  # it deletes what was stored for an earlier pause
            form.save(keyset, flow_run.id)
            announce(_question(judged, flow_run.id, url))
            state = _decision(client, flow_run.id)
        except TerminationSignal:  # a deployed run that is cancelled is terminated at once: that is an answer too
            state = client.read_flow_run(flow_run.id).state
            if not state.is_cancelling():
                reason = "its process was ended while it waited for approval; run it again to be asked again"
                client.set_flow_run_state(flow_run.id, Crashed(message=reason), force=True)  # an answer would be lost
                raise
    unknown = f"Prefect, flow run {flow_run.id}"
    if state.is_running():
        answer = form.load(keyset, flow_run.id)
        return True, answer.who or unknown, answer.why or f"resumed at {url}"
    if state.is_paused():
        return False, "nobody", f"no answer in {APPROVAL_SECONDS // 86400} days"
    return False, unknown, state.message or f"cancelled at {url}"


def _decision(client: SyncPrefectClient, flow_run_id: UUID) -> State[None]:
    """The first state after the pause, or the pause itself when its time is over."""
    deadline = time.monotonic() + APPROVAL_SECONDS
    while True:
        state = client.read_flow_run(flow_run_id).state
        if not state.is_paused() or time.monotonic() > deadline:
            return state
        time.sleep(_POLL_SECONDS)


def _question(judged: Judgement, flow_run_id: UUID, url: str) -> str:
    page = url_for("flow-run", flow_run_id)
    return "\n".join([
        "",
        judged.table().rstrip(),
        "",
        f"{judged.gate}: may this model be promoted? The flow run {flow_run_id} waits for a person:",
        f"  look     {page}",
        "  approve  Resume on that page, or",
        f"           {prefix_of_command(url)}prefect api POST /flow_runs/{flow_run_id}/resume"
        """ --data '{"run_input": {"who": "...", "why": "..."}}'""",
        f"  reject   Cancel on that page, or {prefix_of_command(url)}prefect flow-run cancel {flow_run_id}",
        "",
    ])  # fmt: skip
