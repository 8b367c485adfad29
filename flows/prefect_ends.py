"""Sees to it that Prefect hears how a flow run ended: at once, when its server is back, or from the next command."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType

from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.events.utilities import emit_event
from prefect.events.worker import EventsWorker
from prefect.exceptions import CancelledRun, FailedRun
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelled, State

from flows.open_flows import End, OpenFlow
from flows.prefect_address import configured_api_url
from flows.prefect_server import EmbeddedServer
from flows.prefect_told import tell, unheard
from flows.progress.run_record import end_of
from flows.stops import hearing_sigterm
from lineage.errors import StoppedError
from lineage.owner import Owner
from lineage.remote_files import why_silent

_PATIENCE_SECONDS = 150.0
_STOP_SECONDS = 3.0  # of the 30 that whoever stops us gives; stages that save have had most of them
_EVENTS_SECONDS = 30.0
_AGAIN_SECONDS = 1.0  # where Prefect, once interrupted, makes another call to tell of that
_LOOK_SECONDS = 1.0
_ANSWER_SECONDS = 5.0
_STOPPED = "stopped; run the same command again to go on"

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
    while url and why_silent(url, _ANSWER_SECONDS):
        was_away = True
        if time.monotonic() > deadline:
            _without_retries.enter_context(temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}))
            return False
        time.sleep(_LOOK_SECONDS)
    return was_away


class Ending:
    """The end of one flow run of a command, kept in a note of the store until Prefect knows of it.

    Args:
        server: that was started for this run alone; None: it is the user's.
        finished: names of the task runs whose stages are committed, as they come to be.
    """

    def __init__(self, store: Path, server: EmbeddedServer | None, finished: Collection[str]) -> None:
        self._store, self._server, self._finished = store, server, finished
        self._api = None if server else configured_api_url()
        self._flow_run: FlowRun | None = None
        self._note: OpenFlow | None = None
        self._error: BaseException | None = None
        self._was_away = False

    def follow(self, body: Callable[[], State[None] | None]) -> State[None] | None:
        """What a flow run does: writes down how that ends, then waits for a Prefect that can be told."""
        context = FlowRunContext.get()
        assert context is not None and context.flow_run is not None
        self._flow_run = context.flow_run
        self._write(OpenFlow(flow_run=str(context.flow_run.id), driver=Owner.here(), api=self._api))
        try:
            with hearing_sigterm():
                state = body()
        except BaseException as error:
            if end_of(error)[0] == "stopped":  # somebody asked for it, and what is asked for is no crash
                self._end("CANCELLED", _STOPPED, error if isinstance(error, StoppedError) else KeyboardInterrupt())
                _bound()
                return Cancelled(message=_STOPPED)
            self._end("FAILED", str(error), error)
            self._was_away = self._awaited()
            raise
        self._end(state.type.value if state else "COMPLETED", (state and state.message) or "", None)
        self._was_away = self._awaited()
        return state

    def _awaited(self) -> bool:
        try:
            return await_prefect()
        except BaseException:  # whoever waits does not wish to
            _bound()
            raise

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Around the flow run.

        Raises:
            BaseException: what ended it, also where Prefect could not be told.
        """
        try:
            yield
        except (CancelledRun, FailedRun):
            if self._error:
                raise self._error from None
            # Else a refusal, which is recorded: whoever reads the verdicts finds it.
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
        was_away = self._was_away or (self._server is not None and self._server.was_replaced)
        if self._has_heard() and not was_away:
            self._note.remove(self._store)
        elif self._has_heard() and self._are_events_sent(self._note):
            tell(self._note, self._store)
        else:
            unheard(self._note)

    def _are_events_sent(self, note: OpenFlow) -> bool:
        """Those that were held back go with the next one. Their client tries for minutes, and its wait has no end."""
        emit_event("posttrain.told-again", {"prefect.resource.id": f"prefect.flow-run.{note.flow_run}"})
        wait = threading.Thread(target=EventsWorker.instance().wait_until_empty, daemon=True)
        wait.start()
        is_stop = self._error is not None and end_of(self._error)[0] == "stopped"
        wait.join(_STOP_SECONDS if is_stop else _EVENTS_SECONDS)
        return not wait.is_alive()


def _bound() -> None:
    """Prefect may be away, or take a call and say nothing: what is left to tell it must take no longer."""
    signal.signal(signal.SIGALRM, _interrupt)
    signal.setitimer(signal.ITIMER_REAL, _STOP_SECONDS, _AGAIN_SECONDS)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
