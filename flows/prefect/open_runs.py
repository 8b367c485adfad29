"""Flow runs whose end Prefect may not know, as the records of runs say: the next command reports it.

Imports prefect only where there is one to report.
"""

import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from uuid import UUID

from flows.prefect.address import configured_api_url, own_auth, use_own_auth
from flows.progress.run_record import OpenFlow, RunRecord, left_open
from lineage.filesystem.remote_files import why_unreachable

_UNFINISHED = ["SCHEDULED", "PENDING", "RUNNING", "CANCELLING", "PAUSED"]
_ANSWER_SECONDS = 5.0


def api_here() -> str | None:
    """The API that this process calls, as an open run names it."""
    url = configured_api_url()
    return None if url and own_auth(url) else url


def is_away() -> bool:
    """Whether no Prefect answers; asked before a call, because Prefect's client retries for minutes."""
    url = configured_api_url()
    return url is not None and why_unreachable(url, _ANSWER_SECONDS) is not None


def settle_left(store: Path) -> list[RunRecord]:
    """Reports to the Prefect that is set the runs whose process is gone, and returns them; without any it is cheap."""
    url, settled = configured_api_url(), []
    for record in left_open(store) if url else ():
        if record.open_flow is None or record.open_flow.api != api_here():
            continue
        died = f"its process {record.driver.pid} on {record.driver.host} was killed"
        message = record.open_flow.message or f"{died}; run the same command again to resume"
        record = replace(record, open_flow=replace(record.open_flow, message=message))
        use_own_auth(str(url))
        if settle(record):
            record.reported(store, to_prefect=True)
            settled.append(record)
    return settled


def settle(record: RunRecord) -> bool:
    """Gives a flow run and its task runs the states that they ended in, and whether Prefect took them."""
    import httpx
    from prefect import states
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
    from prefect.exceptions import ObjectNotFound, PrefectException

    flow = record.open_flow
    assert flow is not None
    if is_away():
        return _report_unknown(flow)
    finished = [title for title, stage in record.stages.items() if stage.state in ("done", "reused")]
    make = {
        "COMPLETED": states.Completed, "FAILED": states.Failed, "CANCELLED": states.Cancelled,
        "CRASHED": states.Crashed,
    }  # fmt: skip
    of_flow = FlowRunFilter.model_validate({"id": {"any_": [flow.flow_run]}})
    unfinished = TaskRunFilter.model_validate({"state": {"type": {"any_": _UNFINISHED}}})
    message = flow.message or None
    try:
        with get_client(sync_client=True) as client, contextlib.suppress(ObjectNotFound):  # it was deleted
            state = client.read_flow_run(UUID(flow.flow_run)).state
            while found := client.read_task_runs(flow_run_filter=of_flow, task_run_filter=unfinished):  # a page
                for each in found:
                    end = "COMPLETED" if each.name in finished else flow.end
                    client.set_task_run_state(each.id, make[end](message=message), force=True)
            if not state.is_final() or (flow.end == "COMPLETED" and not state.is_completed()):
                client.set_flow_run_state(UUID(flow.flow_run), make[flow.end](message=message), force=True)
    except (PrefectException, httpx.HTTPError):
        return _report_unknown(flow)
    return True


def _report_unknown(flow: OpenFlow) -> bool:
    """Prints that Prefect shows a run as running; the record of the run keeps it for the next command."""
    with contextlib.suppress(OSError):  # stderr is closed
        print(
            f"posttrain: Prefect at {configured_api_url()} does not answer, and shows the flow run {flow.flow_run} as "
            "running; the next command reports how it ended",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    return False
