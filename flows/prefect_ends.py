"""Sees to it that Prefect hears how a flow run ended: at once, when its server is back, or from the next command."""

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.events.utilities import emit_event
from prefect.events.worker import EventsWorker
from prefect.exceptions import CancelledRun, FailedRun, ObjectNotFound, PrefectException
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelled, Completed, Crashed, Failed, State

from flows.open_flows import End, OpenFlow, left_open
from flows.prefect_server import answers, configured_api_url
from lineage.holder import Holder

_STATES: dict[End, Callable[..., State[None]]] = {
    "COMPLETED": Completed, "FAILED": Failed, "CANCELLED": Cancelled, "CRASHED": Crashed,
}  # fmt: skip
_OPEN = ["SCHEDULED", "PENDING", "RUNNING", "CANCELLING", "PAUSED"]
_PATIENCE_SECONDS = 150.0
_STOP_SECONDS = 3.0  # of the 30 that whoever stops us gives; stages that save have had most of them
_LOOK_SECONDS = 1.0
_ANSWER_SECONDS = 5.0

_without_retries = contextlib.ExitStack()  # of this process, which is about to end


def await_prefect() -> bool:
    """Waits until Prefect's server answers, before a flow run's end is told: its client would wait ever longer.

    Where it does not, that end is told once, in vain.

    Returns:
        Whether the server was away and is back.
    """
    url = configured_api_url()
    deadline = time.monotonic() + _PATIENCE_SECONDS
    was_away = False
    while url and not answers(url, _ANSWER_SECONDS):
        was_away = True
        if time.monotonic() > deadline:
            _without_retries.enter_context(temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}))
            return False
        time.sleep(_LOOK_SECONDS)
    return was_away


class Ending:
    """The end of one flow run of a command, kept in a note of the store until Prefect knows of it.

    Args:
        is_ours: whether the server was started for this run alone.
        finished: names of the task runs whose stages are committed, as they come to be.
    """

    def __init__(self, store: Path, *, is_ours: bool, finished: Collection[str]) -> None:
        self._store, self._finished = store, finished
        self._api = None if is_ours else configured_api_url()
        self._flow_run: FlowRun | None = None
        self._note: OpenFlow | None = None
        self._error: BaseException | None = None
        self._was_away = False

    def follow(self, body: Callable[[], State[None] | None]) -> State[None] | None:
        """What a flow run does: writes down how that ends, then waits for a Prefect that can be told."""
        context = FlowRunContext.get()
        assert context is not None and context.flow_run is not None
        self._flow_run = context.flow_run
        self._write(OpenFlow(flow_run=str(context.flow_run.id), driver=Holder.here(), api=self._api))
        try:
            state = body()
        except Exception as error:
            self._end("FAILED", str(error), error)
            self._was_away = await_prefect()
            raise
        except BaseException:
            self._end("CRASHED", "stopped; run the same command again to go on", KeyboardInterrupt())
            signal.signal(signal.SIGALRM, _interrupt)
            signal.setitimer(signal.ITIMER_REAL, _STOP_SECONDS)  # Prefect may be away, or take a call and say nothing
            raise
        self._end(state.type.value if state else "COMPLETED", (state and state.message) or "", None)
        self._was_away = await_prefect()
        return state

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Around the flow run.

        Raises:
            BaseException: what ended it, also where Prefect could not be told.
        """
        try:
            yield
        except (CancelledRun, FailedRun):
            pass  # a refusal is recorded; whoever reads the verdicts finds it
        except BaseException as error:
            if self._note is None or self._has_heard() or not (self._error or isinstance(error, Exception)):
                raise
            if self._error:
                raise self._error from None
            # Else all is done, and Prefect alone does not know.
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._close()

    def _end(self, end: End, message: str, error: BaseException | None) -> None:
        assert self._note is not None
        self._error = error
        self._write(replace(self._note, end=end, message=message, finished=list(self._finished)))

    def _write(self, note: OpenFlow) -> None:
        self._note = note
        with contextlib.suppress(OSError):  # a store that cannot be written is told by whoever needs it
            note.write(self._store)

    def _has_heard(self) -> bool:
        state = self._flow_run.state if self._flow_run else None
        return bool(state and state.is_final())

    def _close(self) -> None:
        """Prefect's task runs are told by events, of which an outage may have lost some."""
        if self._note is None:
            return
        if self._has_heard() and not self._was_away:
            self._note.remove(self._store)
        elif self._has_heard():
            emit_event("posttrain.told-again", {"prefect.resource.id": f"prefect.flow-run.{self._note.flow_run}"})
            EventsWorker.instance().wait_until_empty()  # with it goes what was held back
            tell(self._note, self._store)
        else:
            unheard(self._note)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def tell_left(store: Path, api: str | None) -> None:
    """Tells Prefect of the runs of drivers that are gone, where it is the Prefect that knows them."""
    for flow in left_open(store):
        if flow.api == api:
            tell(flow, store)


def tell(flow: OpenFlow, store: Path) -> None:
    """Settles a flow run, or says that Prefect does not answer."""
    try:
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
