"""What the page of a deployed run shows in Prefect's UI: the plan, tables, links to MLflow, how far each stage is."""

import contextlib
import logging
import re
import threading
from collections.abc import Iterator
from contextvars import copy_context
from pathlib import Path
from uuid import UUID

import httpx
from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact
from prefect.exceptions import PrefectException
from prefect.logging import get_run_logger

from flows.planning.plan import Plan
from flows.progress.stage_progress import Progress
from lineage.artifact import Kind
from lineage.fingerprint import short
from lineage.mlflow.address import is_server, shown, tracking_uri
from lineage.tracker import Tracker
from lineage.verdict import VERDICT_TABLE
from tasks.context import Metrics
from tasks.evaluate.report import TABLE_FILE

_TABLES = {Kind.REPORT: TABLE_FILE, Kind.VERDICT: VERDICT_TABLE}
_INTERVAL_SECONDS = 3.0
_END_SECONDS = 30.0  # for an answer of Prefect's server, which may be gone

logger = logging.getLogger(__name__)


def show_plan(plan: Plan) -> None:
    """What will run, what is reused, and why."""
    rows = [
        f"| {planned.name} | {planned.state} | `{short(planned.fingerprint)}` | {_cell(planned.reason)} |"
        for planned in plan.stages
    ]
    lines = ["| stage | state | fingerprint | reason |", "| --- | --- | --- | --- |", *rows, "", *plan.notes]
    head = f"{len(plan.stale)} of {len(plan.stages)} stages to run; store {plan.pipeline.store}"
    _show(f"{plan.pipeline.name}-plan", "\n".join(lines), head)


def show_tables(plan: Plan) -> None:
    """What the stages that measure and judge have written for people."""
    for planned in plan.stages:
        name = _TABLES.get(planned.stage.method.produces)
        table = plan.entry(planned).output / name if name else None
        if table and table.exists():
            of = f"{planned.name}@{short(planned.fingerprint)}"
            _show(f"{plan.pipeline.name}-{planned.name}", table.read_text(encoding="utf-8"), f"output/{name} of {of}")


def show_record(plan: Plan, execution_id: str) -> None:
    """Where MLflow has this run and those of its stages."""
    uri = tracking_uri(plan.pipeline.tracking.uri)
    found = {planned.name: plan.entry(planned).manifest() for planned in plan.stages}
    runs = {"this run": execution_id}
    runs |= {name: each.mlflow_run_id for name, each in found.items() if each and each.mlflow_run_id}
    rows = [f"| {name} | {_link(uri, run_id)} |" for name, run_id in runs.items()]
    opened = "" if is_server(uri) else f"\n`mlflow ui --backend-store-uri {uri}` shows them.\n"
    table = "\n".join(["| run | MLflow |", "| --- | --- |", *rows, opened])
    _show(f"{plan.pipeline.name}-mlflow", table, f"recorded in {shown(uri)}")


class RunPage:
    """An observer that logs what becomes of each stage, and moves a progress bar for each that trains.

    It also links the run in MLflow as soon as there is one, since of a run under way one asks for its curves; at the
    end it shows the tables that the stages have written, and the runs of all of them.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._pipeline = plan.pipeline.name
        self._tracker: Tracker = Tracker()
        self._is_linked = False
        self._bars: dict[str, tuple[UUID, Progress]] = {}
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._waits: dict[str, str] = {}

    def __enter__(self) -> "RunPage":
        # In the context of the flow run: what is shown is then its own.
        self._thread = threading.Thread(target=copy_context().run, args=(self._follow,), daemon=True, name="page")
        self._thread.start()
        return self

    def link(self, tracker: Tracker) -> None:
        """Who records the run; no stage waits until that is under way."""
        self._tracker = tracker

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(_END_SECONDS)  # what it shows last is older than what follows
        show_tables(self._plan)
        if execution_id := self._tracker.execution_id():
            show_record(self._plan, execution_id)

    def waiting(self, title: str, reason: str) -> None:
        if self._waits.get(title) != reason:
            self._waits[title] = reason
            _say(f"{title}: waits for {reason}")

    def running(self, title: str, metrics: Path, total: int | None) -> None:
        progress = Progress(path=metrics, total=total)
        begun = f"{title}: {progress.begun()}"
        _say(begun)
        with _told():
            key = _key(f"{self._pipeline}-{title}-progress")
            bar = create_progress_artifact(_percent(progress), key=key, description=begun)
            with self._lock:
                self._bars[title] = bar, progress

    def reused(self, title: str) -> None:
        self._end(title, "reused: another run made it", 100.0)

    def done(self, title: str, seconds: float, metrics: Metrics) -> None:
        figures = [f"{name} {metrics[name]:.3f}" for name in ("loss",) if name in metrics]
        self._end(title, "  ".join([f"done in {seconds:.1f} s", *figures]), 100.0)

    def failed(self, title: str, cause: str) -> None:
        self._end(title, f"FAILED: {cause}", None)

    def pruned(self, title: str, cause: str) -> None:
        self._end(title, cause, None)

    def announce(self, text: str) -> None:
        _say(text)

    def _end(self, title: str, text: str, percent: float | None) -> None:
        _say(f"{title}: {text}")
        with self._lock:
            bar = self._bars.pop(title, None)
        if bar:
            with _told():
                update_progress_artifact(bar[0], _percent(bar[1]) if percent is None else percent, f"{title}: {text}")

    def _follow(self) -> None:
        """Tells Prefect of the steps, seldom enough to be no load on it."""
        while not self._done.wait(_INTERVAL_SECONDS):
            execution_id = self._tracker.execution_id()
            if execution_id and not self._is_linked:
                show_record(self._plan, execution_id)
                self._is_linked = True
            with self._lock:
                bars = dict(self._bars)
            for title, (bar, progress) in bars.items():
                progress.refresh()
                with self._lock, _told():
                    if title in self._bars:  # else its end is written already
                        update_progress_artifact(bar, _percent(progress), f"{title}: {progress.describe()}")


def _percent(progress: Progress) -> float:
    progress.refresh()
    return min(100.0, 100.0 * progress.step / progress.total) if progress.total else 0.0


def _link(uri: str, run_id: str) -> str:
    """MLflow finds the experiment of a run by itself."""
    return f"[{run_id}]({shown(uri).rstrip('/')}/#/runs/{run_id})" if is_server(uri) else f"`{run_id}`"


def _show(key: str, markdown: str, description: str) -> None:
    with _told():
        create_markdown_artifact(markdown, key=_key(key), description=description)


def _say(text: str) -> None:
    get_run_logger().info(text)


def _key(text: str) -> str:
    """As Prefect takes it: lower-case letters, digits and dashes."""
    return re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("\n", " ")


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """A page that lacks something ends no training."""
    try:
        yield
    except (PrefectException, httpx.HTTPError) as error:
        logger.warning("page: Prefect did not take it: %s", error)
