"""Asks a person, through Prefect, whether a model that passed its gate may be promoted: the flow run pauses."""

import time
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.context import FlowRunContext
from prefect.exceptions import TerminationSignal
from prefect.input import RunInput, keyset_from_paused_state
from prefect.states import Crashed, Paused, State
from prefect.utilities.urls import url_for

from flows.planning.verdicts import Judgement
from flows.prefect_address import prefix_of_command
from flows.progress.observer import Observer

TIMEOUT_SECONDS = 7 * 24 * 3600
_POLL_SECONDS = 1.0


class Approval(RunInput):
    """The form that Prefect's UI shows; both may stay empty."""

    who: str = ""
    why: str = ""


def ask(judged: Judgement, observer: Observer) -> tuple[bool, str, str]:
    """Pauses this flow run until it is resumed or cancelled.

    Prefect's own ``pause_flow_run`` would wait on after a cancellation.

    Returns:
        Whether it was approved; who did, as far as is known; and why.
    """
    context = FlowRunContext.get()
    assert context is not None and context.flow_run is not None
    flow_run = context.flow_run
    paused = Paused(timeout_seconds=TIMEOUT_SECONDS, pause_key=judged.gate)
    keyset = keyset_from_paused_state(paused)
    paused.state_details.run_input_keyset = keyset
    form = Approval.with_initial_data(description=judged.table())
    form.save(keyset, flow_run.id)
    with get_client(sync_client=True) as client:
        url = str(client.api_url).rstrip("/")
        try:
            client.set_flow_run_state(flow_run.id, paused)
            observer.announce(_question(judged, flow_run.id, url))
            state = _decision(client, flow_run.id)
        except TerminationSignal:  # a deployed run that is cancelled is ended at once: that is an answer too
            state = client.read_flow_run(flow_run.id).state
            if not state.is_cancelling():
                said = "its process was ended while it waited for approval; run it again to be asked again"
                client.set_flow_run_state(flow_run.id, Crashed(message=said), force=True)  # an answer would be lost
                raise
    nobody = f"Prefect, flow run {flow_run.id}"
    if state.is_running():
        answer = form.load(keyset, flow_run.id)
        return True, answer.who or nobody, answer.why or f"resumed at {url}"
    if state.is_paused():
        return False, "nobody", f"no answer in {TIMEOUT_SECONDS // 86400} days"
    return False, nobody, state.message or f"cancelled at {url}"


def _decision(client: SyncPrefectClient, flow_run_id: UUID) -> State[None]:
    """The first state after the pause, or the pause itself when its time is over."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
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
