"""Stops a run from another process, through Prefect or by a signal, and waits until its processes have ended."""

import contextlib
import os
import signal
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from flows.prefect.address import is_loopback, use_own_auth
from flows.prefect.open_runs import settle_left
from flows.progress.run_record import (
    RunRecord,
    kill_left,
    latest,
    processes_of,
    read_run_record,
    run_ids,
    run_record_path,
)
from lineage.errors import ConfigError, PipelineError

LATEST = "latest"
_WAIT_SECONDS = 120.0
_POLL_SECONDS = 0.1


def find_run(word: str, store: Path) -> RunRecord:
    """Finds a run by its id, a prefix or suffix of it, or ``latest``: the last running, else waiting, else any run.

    Raises:
        ConfigError: no or several runs match.
    """
    ids = run_ids(store)
    if word == LATEST:
        runs = list(latest(store))
        live = [run for run in runs if run.is_live(store)]
        under_way = [run for run in live if not run.waits_for]
        if runs:
            return (under_way or live or runs)[0]
    found = [each for each in ids if each.startswith(word) or each.endswith(f"-{word}")]
    run = read_run_record(run_record_path(store, found[0])) if len(found) == 1 else None
    if run:
        return run
    what = f"names {len(found)} runs: {', '.join(found[:5])}" if len(found) > 1 else "no such run"
    there = f"the last are: {', '.join(ids[:5])}" if ids else "no run is recorded there"
    raise ConfigError(f"{word}: {what} in {store}; {there}; see posttrain status")


def cancel(run: RunRecord, store: Path) -> str:
    """Stops a run, and returns a message on its outcome.

    Raises:
        PipelineError: it cannot be stopped from here, or did not stop in time.
    """
    if run.outcome:
        return f"{run.id} has ended: {run.outcome}"
    if run.is_dead(store):
        settle_left(store)
        pids = ", ".join(map(str, kill_left(run)))
        left = f"what it left is ended (processes {pids})" if pids else "nothing is left"
        if not run.driver.is_here():  # another machine, or an earlier boot of this one
            left = f"run posttrain cancel {run.id} there to end what it may have left"
        return f"{run.id} died before: its process {run.driver.pid} on {run.driver.host} is gone; {left}"
    processes = processes_of(run)
    if run.links.deployed and run.links.flow_run:
        _cancel_flow_run(run)
    elif run.driver.is_here():
        with contextlib.suppress(ProcessLookupError):
            os.kill(run.driver.pid, signal.SIGTERM)
    else:
        raise PipelineError(
            f"{run.id} runs on {run.driver.host} (process {run.driver.pid}) and was started there by hand; "
            f"run posttrain cancel {run.id} on that machine"
        )
    _wait(run, store, processes)
    after = read_run_record(run_record_path(store, run.id))
    if after and after.outcome not in (None, "stopped"):  # it ended by itself meanwhile
        return f"{run.id} has ended: {after.outcome}"
    kept = "finished stages are kept, run the same command again to resume"
    return f"{run.id} is stopped; {kept if run.command == 'run' else 'the same command starts again'}"


def _cancel_flow_run(run: RunRecord) -> None:
    """Cancels the flow run: Prefect's runner kills the process, and the flow run gets the right state."""
    url = _api_of(run)
    if url:
        os.environ["PREFECT_API_URL"] = url
        use_own_auth(url)
    from httpx import HTTPError
    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectException
    from prefect.states import Cancelling

    try:
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(run.links.flow_run, Cancelling(message="posttrain cancel"))
    except (PrefectException, HTTPError) as error:
        raise PipelineError(
            f"{run.id} was started by Prefect, which does not take its cancellation ({error}); is "
            f"{url} up? Else: kill -TERM {run.driver.pid} on {run.driver.host}"
        ) from error


def _api_of(run: RunRecord) -> str | None:
    """URL of the Prefect server of the flow run, as reached from here; None: this machine's own setting.

    Raises:
        PipelineError: the driver uses a loopback address of another machine, and PREFECT_API_URL is not set here.
    """
    url = run.links.prefect_api
    if not url or run.driver.host == socket.gethostname() or not is_loopback(urlsplit(url).hostname or ""):
        return url
    if os.environ.get("PREFECT_API_URL"):
        return os.environ["PREFECT_API_URL"]
    raise PipelineError(
        f"{run.id} was started by Prefect, whose server is {url} as {run.driver.host} sees it; "
        f"set PREFECT_API_URL to that server as it is reached from here, or call posttrain cancel {run.id} there"
    )


def _wait(run: RunRecord, store: Path, processes: list[psutil.Process]) -> None:
    deadline = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < deadline:
        now = read_run_record(run_record_path(store, run.id)) or run
        if (now.outcome or now.is_dead(store)) and not any(map(_is_alive, processes)):
            return
        time.sleep(_POLL_SECONDS)
    left = ", ".join(str(each.pid) for each in processes if _is_alive(each))
    raise PipelineError(
        f"{run.id} has not ended within {_WAIT_SECONDS:.0f} s"
        f"{f' (processes {left})' if left else ''}; wait and try again, or kill -9 {run.driver.pid} "
        f"on {run.driver.host}: the next run resumes from what is finished"
    )


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
