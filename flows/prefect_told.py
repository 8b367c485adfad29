"""Tells Prefect how flow runs ended that it does not know to be over."""

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.states import Cancelled, Completed, Crashed, Failed, State

from flows.open_flows import End, OpenFlow, left_open
from flows.prefect_address import configured_api_url
from lineage.remote_files import why_silent

_STATES: dict[End, Callable[..., State[None]]] = {
    "COMPLETED": Completed, "FAILED": Failed, "CANCELLED": Cancelled, "CRASHED": Crashed,
}  # fmt: skip
_OPEN = ["SCHEDULED", "PENDING", "RUNNING", "CANCELLING", "PAUSED"]
_ANSWER_SECONDS = 5.0


def tell_left(store: Path, api: str | None) -> None:
    """Tells Prefect of the runs of drivers that are gone, where it is the Prefect that knows them."""
    for flow in left_open(store):
        if flow.api == api:
            tell(flow, store)


def tell(flow: OpenFlow, store: Path) -> None:
    """Settles a flow run, or says that Prefect does not answer: asked first, since its client is very patient."""
    url = configured_api_url()
    try:
        if url and why_silent(url, _ANSWER_SECONDS):
            raise httpx.ConnectTimeout("no answer")
        settle(flow)
    except (PrefectException, httpx.HTTPError):
        unheard(flow)
    else:
        flow.remove(store)


def unheard(flow: OpenFlow) -> None:
    """Says so; the note stays, and with it what is to be told."""
    with contextlib.suppress(OSError):  # nobody reads stderr
        print(
            f"posttrain: Prefect at {configured_api_url()} does not answer, and shows the flow run {flow.flow_run} as "
            "one that runs; the next command tells it how that ended",
            file=sys.stderr, flush=True,
        )  # fmt: skip


def settle(flow: OpenFlow) -> None:
    """Gives a flow run and its task runs the states that they ended in, where Prefect has others.

    Raises:
        PrefectException, httpx.HTTPError: Prefect cannot be told.
    """
    flow_run = UUID(flow.flow_run)
    with get_client(sync_client=True) as client:
        try:
            state = client.read_flow_run(flow_run).state
        except ObjectNotFound:  # it was deleted
            return
        _settle_tasks(client, flow)
        if not state.is_final() or (flow.end == "COMPLETED" and not state.is_completed()):
            client.set_flow_run_state(flow_run, _STATES[flow.end](message=flow.message or None), force=True)


def _settle_tasks(client: SyncPrefectClient, flow: OpenFlow) -> None:
    of_flow = FlowRunFilter.model_validate({"id": {"any_": [flow.flow_run]}})
    still_open = TaskRunFilter.model_validate({"state": {"type": {"any_": _OPEN}}})
    while found := client.read_task_runs(flow_run_filter=of_flow, task_run_filter=still_open):  # by the page
        for each in found:
            end: End = "COMPLETED" if each.name in flow.finished else flow.end
            client.set_task_run_state(each.id, _STATES[end](message=flow.message or None), force=True)
