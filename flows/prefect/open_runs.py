"""Flow runs whose end Prefect may not know: a file of the store for each, which the next command settles.

Imports prefect only where there is one to settle.
"""

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal
from uuid import UUID

from flows.prefect.address import configured_api_url, own_auth, use_own_auth
from flows.progress.run_record import latest
from lineage.files import atomic_write
from lineage.owner import Owner
from lineage.remote_files import why_unreachable

End = Literal["COMPLETED", "FAILED", "CANCELLED", "CRASHED"]  # Prefect's types of final states

_FOLDER = Path("logs") / "prefect-open"
_UNFINISHED = ["SCHEDULED", "PENDING", "RUNNING", "CANCELLING", "PAUSED"]
_ANSWER_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class OpenFlow:
    """One flow run: written when it begins, removed when Prefect knows how it ended.

    Args:
        api: of Prefect; None: a server that we started, on the user's own database.
        end: the exit; CRASHED while it is under way, which is what a kill makes of it.
        message: the reason.
        finished: names of its task runs whose stages are committed.
        pipeline: of a deployed run, whose end may not have been notified.
    """

    flow_run: str
    driver: Owner
    api: str | None
    end: End = "CRASHED"
    message: str = ""
    finished: Sequence[str] = ()
    pipeline: str = ""

    def write(self, store: Path) -> None:
        with contextlib.suppress(OSError):  # a full store is reported by the stages
            atomic_write(self._path(store), json.dumps(asdict(self)))

    def remove(self, store: Path) -> None:
        with contextlib.suppress(OSError):
            self._path(store).unlink(missing_ok=True)

    def _path(self, store: Path) -> Path:
        return store / _FOLDER / f"{self.flow_run}.json"


def left_open(store: Path) -> Iterator[OpenFlow]:
    """Those whose process is gone: of this machine, or without a heartbeat for long."""
    dead = {note.links.flow_run for note in latest(store) if note.is_dead(store)}
    for path in sorted((store / _FOLDER).glob("*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # another command settles it too
            fields = json.loads(path.read_text())
            flow = OpenFlow(**fields | {"driver": Owner(**fields["driver"])})
            if flow.flow_run in dead or flow.driver.is_dead(silent_seconds=0.0):
                died = f"its process {flow.driver.pid} on {flow.driver.host} was killed"
                yield flow if flow.message else replace(flow, message=f"{died}; run the same command again to resume")


def api_here() -> str | None:
    """The API that this process calls, as an open run names it."""
    url = configured_api_url()
    return None if url and own_auth(url) else url


def settle_left(store: Path) -> list[OpenFlow]:
    """Reports to the Prefect that is set the runs whose process is gone, and returns them; without any it is cheap."""
    url = configured_api_url()
    found = [flow for flow in left_open(store) if flow.api == api_here()] if url else []
    if url and found:
        use_own_auth(url)
    return [flow for flow in found if settle(flow, store)]


def settle(flow: OpenFlow, store: Path) -> bool:
    """Gives a flow run and its task runs the states that they ended in, and whether Prefect took them."""
    import httpx
    from prefect import states
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
    from prefect.exceptions import ObjectNotFound, PrefectException

    url = configured_api_url()
    if url and why_unreachable(url, _ANSWER_SECONDS):  # asked first, because Prefect's client retries for minutes
        report_unknown(flow)
        return False
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
                    end = "COMPLETED" if each.name in flow.finished else flow.end
                    client.set_task_run_state(each.id, make[end](message=message), force=True)
            if not state.is_final() or (flow.end == "COMPLETED" and not state.is_completed()):
                client.set_flow_run_state(UUID(flow.flow_run), make[flow.end](message=message), force=True)
    except (PrefectException, httpx.HTTPError):
        report_unknown(flow)
        return False
    flow.remove(store)
    return True


def report_unknown(flow: OpenFlow) -> None:
    """Says that Prefect shows a run as running; the file stays for the next command."""
    with contextlib.suppress(OSError):  # stderr is closed
        print(
            f"posttrain: Prefect at {configured_api_url()} does not answer, and shows the flow run {flow.flow_run} as "
            "running; the next command reports how it ended",
            file=sys.stderr, flush=True,
        )  # fmt: skip
