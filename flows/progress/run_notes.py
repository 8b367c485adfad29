"""The notes of runs, ``<store>/runs/<id>.json``: what a run is doing, readable by any process and after its death."""

import json
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from lineage.errors import StoppedError
from lineage.files import atomic_write
from lineage.owner import EXPIRY_SECONDS, SKEW_SECONDS, Owner

Outcome = Literal["done", "failed", "stopped", "refused"]
StageState = Literal["pending", "waiting", "running", "done", "reused", "failed", "pruned"]

RUN_VARIABLE = "POSTTRAIN_RUN"  # the id of the run, in the environment of every process that it starts
_FOLDER = "runs"
_LOOKED_AT = 50  # notes that are read beside those that were touched just now


@dataclass(frozen=True, kw_only=True)
class StageNote:
    """What a run says of one of its stages.

    Args:
        reason: for what it waits, or why it failed or was pruned.
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
    """Where else a run is shown.

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
class SweepNote:
    """What makes a run a sweep.

    Args:
        folder: of the sweep.
        own: names of the stages that differ from trial to trial; those of trial 3 go by ``NAME#3``.
        trials: how many there are to be, with those that ended in earlier runs; None: that shows at the end.
    """

    folder: str
    own: Sequence[str]
    trials: int | None


@dataclass(frozen=True, kw_only=True)
class RunNote:
    """One run.

    Args:
        words: the options and overrides of its command.
        driver: the process that runs it.
        stages: title -> what it is doing.
        waits_for: what has to be over before it makes its plan; empty: it has one.
        outcome: None: it has not ended, or died before it could say so.
        cause: of a failure, or of a gate's refusal.
        sweep: None: it is none.
        in_flow: whether a flow run of Prefect is to order its stages.
        said: what it last told whoever looks on: whom it waits for, a trial that failed.
        reads: ``stage@fingerprint`` of all artifacts that it makes, that it reuses, and that its sources lie in.
        command: of ``posttrain``; those other than ``run`` begin again where they were cut off.
    """

    id: str
    pipeline: str
    words: list[str]
    driver: Owner
    started: float
    stages: Mapping[str, StageNote]
    waits_for: str = ""
    links: Links = field(default_factory=Links)
    ended: float | None = None
    outcome: Outcome | None = None
    cause: str = ""
    sweep: SweepNote | None = None
    in_flow: bool = True
    said: str = ""
    reads: Sequence[str] = field(default_factory=list)
    command: str = "run"

    def write(self, store: Path) -> None:
        atomic_write(note_path(store, self.id), json.dumps(asdict(self), indent=1) + "\n")

    def is_dead(self, store: Path) -> bool:
        """Whether its driver is gone, which says nothing of how it ended."""
        try:
            silent = time.time() - note_path(store, self.id).stat().st_mtime
        except OSError:
            silent = float("inf")
        return self.driver.is_dead(silent)

    def is_live(self, store: Path) -> bool:
        """Whether it is under way, as far as is heard: of a driver of another machine, up to five minutes late."""
        return self.outcome is None and not self.is_dead(store)


def end_of(error: BaseException) -> tuple[Outcome, str]:
    """How a run ended that an error has left, and the cause."""
    if not isinstance(error, Exception) or isinstance(error, StoppedError):
        return "stopped", ""
    return "failed", str(error) or type(error).__name__


def new_id() -> str:
    """Sorts by time."""
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime()) + "-" + secrets.token_hex(2)


def note_path(store: Path, run_id: str) -> Path:
    """Where the note of a run lies."""
    return store / _FOLDER / f"{run_id}.json"


def read_note(path: Path) -> RunNote | None:
    """None: it is gone, or no note of this version."""
    try:
        fields = json.loads(path.read_text())
        stages = {title: StageNote(**stage) for title, stage in fields.pop("stages").items()}
        driver, links = Owner(**fields.pop("driver")), Links(**fields.pop("links"))
        sweep = fields.pop("sweep", None)
        return RunNote(**fields, stages=stages, driver=driver, links=links, sweep=SweepNote(**sweep) if sweep else None)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def run_ids(store: Path) -> list[str]:
    """Of every run that left a note, newest first."""
    return sorted((path.stem for path in (store / _FOLDER).glob("*.json")), reverse=True)


def latest(store: Path) -> Iterator[RunNote]:
    """The notes of what may still run, and of the last runs; newest first."""
    now = time.time()
    for index, run_id in enumerate(run_ids(store)):
        path = note_path(store, run_id)
        if index < _LOOKED_AT or _age(path, now) < EXPIRY_SECONDS + SKEW_SECONDS:
            note = read_note(path)
            if note:
                yield note


def silent_drivers(store: Path) -> list[Owner]:
    """The processes of other machines that run nothing any more, as far as is heard."""
    elsewhere = [note for note in latest(store) if not note.driver.is_here()]
    heard = [note.driver for note in elsewhere if not note.is_dead(store)]
    silent = [note.driver for note in elsewhere if note.is_dead(store)]
    return [each for each in silent if not any(each.is_process(other) for other in heard)]


def dashboard_file(directory: Path) -> Path:
    """Where a stage on Ray workers writes the address of Ray's dashboard, if it has one, while it runs."""
    return directory / "work" / "ray-dashboard.txt"


def _age(path: Path, now: float) -> float:
    try:
        return now - path.stat().st_mtime
    except OSError:
        return float("inf")


def is_to_begin(title: str, note: RunNote) -> bool:
    """Whether a run has yet to begin a stage, of a sweep also one of a trial that is yet to come."""
    if title in note.stages:
        return note.stages[title].state == "pending"
    name, _, number = title.partition("#")
    sweep = note.sweep
    if sweep is None or name not in sweep.own or not number.isdecimal():
        return False
    return sweep.trials is None or int(number) < sweep.trials


def waits_for(title: str, note: RunNote) -> str:
    """For what a stage of a run under way waits; empty: for nothing, or that is not known yet."""
    stage = note.stages.get(title)
    if stage is None or stage.state not in ("pending", "waiting"):
        return ""
    if stage.state == "waiting":
        return stage.reason
    before = [name for name in stage.after if not _is_made(name, note)]
    if before:
        return ", ".join(before)
    if note.in_flow and note.links.flow_run is None:
        return "Prefect"
    return "a slot" if note.sweep else "its turn"


def _is_made(name: str, note: RunNote) -> bool:
    states = (stage.state for title, stage in note.stages.items() if title.partition("#")[0] == name)
    return any(state in ("done", "reused") for state in states)


def with_flow_run(links: Links, *, is_ours: bool) -> Links:
    """Names the flow run: a process in a flow run has imported Prefect, and no other one has to.

    Args:
        is_ours: whether its server was started for this run alone, and has no pages.
    """
    if links.flow_run or "prefect.context" not in sys.modules:
        return links
    from prefect.context import FlowRunContext
    from prefect.settings import PREFECT_API_URL
    from prefect.utilities.urls import url_for

    from lineage.mlflow.address import shown

    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return links
    run = context.flow_run
    return replace(
        links, flow_run=str(run.id), deployed=run.deployment_id is not None,
        flow_page=None if is_ours else url_for("flow-run", run.id),
        prefect_api=None if is_ours else shown(str(PREFECT_API_URL.value())),
    )  # fmt: skip
