"""Ends a run from outside, in the way in which it was started, and waits until nothing of it is left."""

import contextlib
import ipaddress
import os
import signal
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from flows.open_flows import tell_of_killed
from flows.prefect_address import use_own_auth
from flows.progress.run_record import RUN_VARIABLE, RunRecord, latest, read_run_record, run_ids, run_record_path
from lineage.errors import ConfigError, PipelineError

LATEST = "latest"
_WAIT_SECONDS = 120.0
_POLL_SECONDS = 0.1


def find_run(word: str, store: Path) -> RunRecord:
    """A run by its id, the beginning or the end of it, or ``latest``: the last that runs, else that waits, else of all.

    Raises:
        ConfigError: no run or several have that id.
    """
    ids = run_ids(store)
    if word == LATEST:
        notes = list(latest(store))
        live = [note for note in notes if note.is_live(store)]
        under_way = [note for note in live if not note.waits_for]
        if notes:
            return (under_way or live or notes)[0]
    found = [each for each in ids if each.startswith(word) or each.endswith(f"-{word}")]
    note = read_run_record(run_record_path(store, found[0])) if len(found) == 1 else None
    if note:
        return note
    what = f"names {len(found)} runs: {', '.join(found[:5])}" if len(found) > 1 else "no such run"
    there = f"the last are: {', '.join(ids[:5])}" if ids else "no run has left a note there"
    raise ConfigError(f"{word}: {what} in {store}; {there}; see posttrain status")


def cancel(note: RunRecord, store: Path) -> str:
    """Ends a run, and says what became of it.

    Raises:
        PipelineError: it cannot be ended from here, or did not end in time.
    """
    if note.outcome:
        return f"{note.id} is over: {note.outcome}"
    if note.is_dead(store):
        tell_of_killed(store)
        return f"{note.id} died before: its process {note.driver.pid} on {note.driver.host} is gone; {_clear(note)}"
    is_here = note.driver.is_here()
    family = _family(note)
    if note.links.deployed and note.links.flow_run:
        _cancel_flow_run(note)
    elif is_here:
        with contextlib.suppress(ProcessLookupError):
            os.kill(note.driver.pid, signal.SIGTERM)
    else:
        raise PipelineError(
            f"{note.id} runs on {note.driver.host} (process {note.driver.pid}) and was started there by hand; "
            f"call posttrain cancel {note.id} on that machine"
        )
    _wait(note, store, family)
    after = read_run_record(run_record_path(store, note.id))
    if after and after.outcome not in (None, "stopped"):  # it ended by itself meanwhile
        return f"{note.id} is over: {after.outcome}"
    kept = "what was finished is kept, run the same command again to go on"
    return f"{note.id} is stopped; {kept if note.command == 'run' else 'the same command begins again'}"


def _family(note: RunRecord) -> list[psutil.Process]:
    """The processes of a run on this host: its driver, whatever bears its mark, and what these have started."""
    found: dict[int, psutil.Process] = {}
    is_here = note.driver.is_here() and not note.driver.is_gone()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it ended meanwhile, or is not ours to look at
            is_driver = is_here and process.pid == note.driver.pid
            if is_driver or process.environ().get(RUN_VARIABLE) == note.id:
                found |= {each.pid: each for each in (process, *process.children(recursive=True))}
    found.pop(os.getpid(), None)
    return list(found.values())


def _clear(note: RunRecord) -> str:
    """Ends what a driver that died has left, such as a fork server that still imports; says what that was."""
    if not note.driver.is_here():  # another machine, or this one before it was started again
        return f"call posttrain cancel {note.id} there to end what it may have left"
    left = [each for each in _family(note) if _is_alive(each)]
    for each in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(left, timeout=_WAIT_SECONDS)
    pids = ", ".join(str(each.pid) for each in left)
    return f"what it left is ended (processes {pids})" if left else "nothing is left"


def _cancel_flow_run(note: RunRecord) -> None:
    """Prefect started it, so Prefect ends it: the runner kills the process, and the state is right."""
    url = _api_of(note)
    if url:
        os.environ["PREFECT_API_URL"] = url
        use_own_auth(url)
    from httpx import HTTPError
    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectException
    from prefect.states import Cancelling

    try:
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(note.links.flow_run, Cancelling(message="posttrain cancel"))
    except (PrefectException, HTTPError) as error:
        raise PipelineError(
            f"{note.id} was started by Prefect, which does not take its cancellation ({error}); is "
            f"{url} up? Else: kill -TERM {note.driver.pid} on {note.driver.host}"
        ) from error


def _api_of(note: RunRecord) -> str | None:
    """Where the flow run is known, as it is reached from here; None: as this machine is set up.

    Raises:
        PipelineError: its driver reaches it at an address that means another machine here, and none is set here.
    """
    url = note.links.prefect_api
    if not url or note.driver.host == socket.gethostname() or not _is_loopback(url):
        return url
    if os.environ.get("PREFECT_API_URL"):
        return os.environ["PREFECT_API_URL"]
    raise PipelineError(
        f"{note.id} was started by Prefect, whose server is {url} as {note.driver.host} sees it; "
        f"set PREFECT_API_URL to that server as it is reached from here, or call posttrain cancel {note.id} there"
    )


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def _wait(note: RunRecord, store: Path, family: list[psutil.Process]) -> None:
    deadline = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < deadline:
        now = read_run_record(run_record_path(store, note.id)) or note
        if (now.outcome or now.is_dead(store)) and not any(map(_is_alive, family)):
            return
        time.sleep(_POLL_SECONDS)
    left = ", ".join(str(each.pid) for each in family if _is_alive(each))
    raise PipelineError(
        f"{note.id} was asked to end and has not within {_WAIT_SECONDS:.0f} s"
        f"{f' (processes {left})' if left else ''}; wait and ask again, or kill -9 {note.driver.pid} "
        f"on {note.driver.host}: the next run goes on from what is finished"
    )


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
