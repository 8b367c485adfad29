"""The run record, ``<store>/runs/<id>.json``: the state of a run, for any process, also after the run was killed."""

import contextlib
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

import psutil

from lineage.errors import StoppedError
from lineage.filesystem.files import atomic_write
from lineage.filesystem.owner import EXPIRY_SECONDS, SKEW_SECONDS, Owner

Outcome = Literal["done", "failed", "stopped", "refused"]
StageState = Literal["pending", "waiting", "running", "done", "reused", "failed", "pruned"]

End = Literal["COMPLETED", "FAILED", "CANCELLED", "CRASHED"]  # Prefect's types of final states

RUN_VARIABLE = "POSTTRAIN_RUN"  # the id of the run, in the environment of every process that it starts
_FOLDER = "runs"
_RENAMED = {"cli_args": "words", "message": "said"}  # field -> its name in records of earlier versions
_KILL_SECONDS = 10.0  # for a killed process to end
_CHECKED = 50  # records that are read beside those that were written just now
_CHECKED_OPEN = 200  # the same where one may still have to be reported: to a Prefect that is used now and then


@dataclass(frozen=True, kw_only=True)
class StageRecord:
    """The state of one stage in a run.

    Args:
        reason: what it waits for, or why it failed or was pruned.
        after: names of the stages of this run that come before it.
        since: when this state began, in seconds since the epoch.
        directory: of the stage in the store.
        total: its optimizer steps; None: it counts none.
        seconds: that it took, once it is done.
    """

    state: StageState
    since: float
    directory: str
    reason: str = ""
    after: Sequence[str] = ()
    total: int | None = None
    workers: int = 1
    cpus: int = 0
    gpus: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Links:
    """Where a run is also shown.

    Args:
        flow_run: its id in Prefect.
        flow_page: its page there; None: no server has one.
        prefect_api: the API that the flow run is known to.
        deployed: whether Prefect started it, so that Prefect must end it.
        mlflow: address of MLflow, without secrets.
        mlflow_run: of the execution.
    """

    flow_run: str | None = None
    flow_page: str | None = None
    prefect_api: str | None = None
    deployed: bool = False
    mlflow: str | None = None
    mlflow_run: str | None = None


@dataclass(frozen=True, kw_only=True)
class OpenFlow:
    """A flow run of Prefect, until Prefect knows how it ended.

    Args:
        api: of Prefect; None: a server that we started, on the user's own database.
        end: type of its final state; CRASHED while it is under way, since that is what a kill makes of it.
        message: the reason.
    """

    flow_run: str
    api: str | None
    end: End = "CRASHED"
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class SweepRecord:
    """The sweep of a run.

    Args:
        folder: of the sweep.
        own: names of the stages that differ from trial to trial; those of trial 3 go by ``NAME#3``.
        trials: how many there are to be, with those that ended in earlier runs; None: that shows at the end.
    """

    folder: str
    own: Sequence[str]
    trials: int | None


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run.

    Args:
        cli_args: the options and overrides of its command.
        driver: the process that runs it.
        stages: title -> its state.
        waits_for: the run that must end before it makes its plan; empty: it has one.
        outcome: None: it has not ended, or was killed before it could write one.
        cause: of a failure, or of a gate's refusal.
        sweep: None: it is none.
        in_flow: whether a flow run of Prefect is to order its stages.
        message: its last message: what it waits for, a trial that failed.
        reads: ``stage@fingerprint`` of all artifacts that it makes, that it reuses, and that its sources lie in.
        command: of ``posttrain``; those other than ``run`` restart after a kill.
        open_flow: what Prefect has yet to know; None: nothing.
        open_mlflow: whether MLflow lacks a part of it.
        origins: key of a value of its stages -> the file that sets it, or the command line.
    """

    id: str
    pipeline: str
    cli_args: list[str]
    driver: Owner
    started: float
    stages: Mapping[str, StageRecord]
    waits_for: str = ""
    links: Links = field(default_factory=Links)
    ended: float | None = None
    outcome: Outcome | None = None
    cause: str = ""
    sweep: SweepRecord | None = None
    in_flow: bool = True
    message: str = ""
    reads: Sequence[str] = field(default_factory=list)
    command: str = "run"
    open_flow: OpenFlow | None = None
    open_mlflow: bool = False
    origins: Mapping[str, str] = field(default_factory=dict)

    def write(self, store: Path) -> None:
        atomic_write(run_record_path(store, self.id), json.dumps(asdict(self), indent=1) + "\n")

    def is_dead(self, store: Path) -> bool:
        """Whether its driver is gone, however the run ended."""
        return self.driver.is_dead(_silent_seconds(run_record_path(store, self.id)))

    def is_live(self, store: Path) -> bool:
        """Whether it is running; for a driver on another machine, known up to five minutes late."""
        return self.outcome is None and not self.is_dead(store)

    def reported(self, store: Path, *, to_prefect: bool = False, to_mlflow: bool = False) -> None:
        """Notes that Prefect or MLflow knows the end; the time of the file stays that of the last heartbeat.

        A run of a deployment that had neither to wait nor to run anything leaves no record then.
        """
        path = run_record_path(store, self.id)
        with contextlib.suppress(OSError):  # a full disk: the next command reports it again
            times, now = path.stat(), read_run_record(path) or self
            open_flow, open_mlflow = None if to_prefect else now.open_flow, now.open_mlflow and not to_mlflow
            if open_flow or now.stages or now.reads or now.waits_for:
                replace(now, open_flow=open_flow, open_mlflow=open_mlflow).write(store)
                os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            else:
                path.unlink()


def end_of(error: BaseException) -> tuple[Outcome, str]:
    """The outcome of a run that raised an error, and the cause."""
    if not isinstance(error, Exception) or isinstance(error, StoppedError):
        return "stopped", ""
    return "failed", str(error) or type(error).__name__


def new_id() -> str:
    """Sorts by time."""
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime()) + "-" + secrets.token_hex(2)


def run_record_path(store: Path, run_id: str) -> Path:
    """The file of a run's record."""
    return store / _FOLDER / f"{run_id}.json"


def read_run_record(path: Path) -> RunRecord | None:
    """The record in a file; None: there is no file, or it is not a record of this version."""
    try:
        fields = json.loads(path.read_text())
        for name, earlier in _RENAMED.items():
            if earlier in fields:
                fields[name] = fields.pop(earlier)
        stages = {title: StageRecord(**stage) for title, stage in fields.pop("stages").items()}
        driver, links = Owner(**fields.pop("driver")), Links(**fields.pop("links"))
        sweep, open_flow = fields.pop("sweep", None), fields.pop("open_flow", None)
        return RunRecord(
            **fields, stages=stages, driver=driver, links=links, sweep=SweepRecord(**sweep) if sweep else None,
            open_flow=OpenFlow(**open_flow) if open_flow else None,
        )  # fmt: skip
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def run_ids(store: Path) -> list[str]:
    """The records of all runs, newest first."""
    return sorted((path.stem for path in (store / _FOLDER).glob("*.json")), reverse=True)


def latest(store: Path, number: int | None = None) -> Iterator[RunRecord]:
    """The records of runs that may be live, and of the last runs; newest first."""
    for index, run_id in enumerate(run_ids(store)):
        path = run_record_path(store, run_id)
        may_be_live = _silent_seconds(path) < EXPIRY_SECONDS + SKEW_SECONDS
        if (index < (number or _CHECKED) or may_be_live) and (record := read_run_record(path)):
            yield record


def runs_of(store: Path, directory: Path) -> Iterator[tuple[RunRecord, StageRecord]]:
    """The runs that have a stage of this directory, newest first; on another host the store may have another path."""
    for run_id in run_ids(store):
        if record := read_run_record(run_record_path(store, run_id)):
            for stage in record.stages.values():
                if Path(stage.directory).parts[-2:] == directory.parts[-2:]:
                    yield record, stage


def left_open(store: Path) -> list[RunRecord]:
    """Runs whose process ended before MLflow and Prefect knew their end."""
    recorded = latest(store, _CHECKED_OPEN)
    return [each for each in recorded if (each.open_flow or each.open_mlflow) and each.is_dead(store)]


def silent_drivers(store: Path) -> list[Owner]:
    """The drivers on other machines whose heartbeats timed out."""
    elsewhere = [(record.driver, record.is_dead(store)) for record in latest(store) if not record.driver.is_here()]
    live = [driver for driver, is_dead in elsewhere if not is_dead]
    return [each for each, is_dead in elsewhere if is_dead and not any(map(each.is_process, live))]


def processes_of(record: RunRecord) -> list[psutil.Process]:
    """The processes of a run on this host: its driver, those with its id in their environment, and their children."""
    found: dict[int, psutil.Process] = {}
    is_here = record.driver.is_here() and not record.driver.is_gone()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it ended meanwhile, or is not ours to look at
            is_driver = is_here and process.pid == record.driver.pid
            if is_driver or process.environ().get(RUN_VARIABLE) == record.id:
                found |= {each.pid: each for each in (process, *process.children(recursive=True))}
    found.pop(os.getpid(), None)
    return list(found.values())


def kill_left(record: RunRecord) -> list[int]:
    """Kills the processes that a dead driver has left on this host, such as a fork server that still imports.

    Returns:
        Their pids.
    """
    left = processes_of(record) if record.driver.is_here() else []
    for each in left:
        with contextlib.suppress(psutil.Error):  # it ended meanwhile, or belongs to another user
            each.kill()
    psutil.wait_procs(left, timeout=_KILL_SECONDS)
    return [each.pid for each in left]


def dashboard_file(directory: Path) -> Path:
    """The file with the address of Ray's dashboard, while a stage runs on Ray workers and has one."""
    return directory / "work" / "ray-dashboard.txt"


def _silent_seconds(path: Path) -> float:
    """How long ago a record was written or touched, by this machine's clock; infinite: it is gone."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return float("inf")


def is_to_begin(title: str, record: RunRecord) -> bool:
    """Whether a run will still start a stage; in a sweep also as part of a later trial."""
    if title in record.stages:
        return record.stages[title].state == "pending"
    name, _, number = title.partition("#")
    sweep = record.sweep
    if sweep is None or name not in sweep.own or not number.isdecimal():
        return False
    return sweep.trials is None or int(number) < sweep.trials


def waits_for(title: str, record: RunRecord) -> str:
    """What a stage of a live run waits for; empty: nothing, or not known yet."""
    stage = record.stages.get(title)
    if stage is None or stage.state not in ("pending", "waiting"):
        return ""
    if stage.state == "waiting":
        return stage.reason
    before = [name for name in stage.after if not _is_made(name, record)]
    if before:
        return ", ".join(before)
    if record.in_flow and record.links.flow_run is None:
        return "Prefect"
    return "a slot" if record.sweep else "its turn"


def _is_made(name: str, record: RunRecord) -> bool:
    states = (stage.state for title, stage in record.stages.items() if title.partition("#")[0] == name)
    return any(state in ("done", "reused") for state in states)
