"""Shows a deployed run in Prefect's UI: plan, tables, links to MLflow and progress as artifacts, and its log."""

import contextlib
import logging
import re
import threading
from collections.abc import Iterator
from contextvars import copy_context
from dataclasses import dataclass, replace
from uuid import UUID

import httpx
from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact
from prefect.exceptions import PrefectException
from prefect.logging import get_run_logger

from flows.planning.plan import Plan
from flows.progress.recorder import RunRecorder
from flows.progress.stage_progress import Progress, line_of, progress_of
from lineage.artifact import Kind
from lineage.fingerprint import short
from lineage.markup import markdown_table
from lineage.mlflow.address import is_server, shown, tracking_uri
from lineage.record.tracker import Event
from lineage.record.verdict import VERDICT_TABLE
from tasks.evaluate.report import TABLE_FILE

_TABLES = {Kind.REPORT: TABLE_FILE, Kind.VERDICT: VERDICT_TABLE}
_INTERVAL_SECONDS = 3.0
_JOIN_SECONDS = 30.0  # for an answer of Prefect's server, which may be gone

logger = logging.getLogger(__name__)


def show_plan(plan: Plan) -> None:
    """Shows which stages will run, which are reused, and why."""
    rows = [(each.name, each.state, f"`{short(each.fingerprint)}`", each.reason) for each in plan.stages]
    head = f"{len(plan.stale)} of {len(plan.stages)} stages to run; store {plan.pipeline.store}"
    text = "\n".join([markdown_table(["stage", "state", "fingerprint", "reason"], rows), "", *plan.notes])
    _show(f"{plan.pipeline.name}-plan", text, head)


@dataclass(kw_only=True)
class _Bar:
    """The progress of one stage.

    Args:
        exit: how the stage ended; None: it is running.
        percent: at its end; None: that of its last report.
        artifact: None: not created yet.
    """

    progress: Progress
    exit: str | None = None
    percent: float | None = None
    artifact: UUID | None = None


class RunPage:
    """A listener that logs each change of a stage, and shows artifacts: progress and MLflow's run live, tables last.

    Only its thread calls Prefect, so that no stage waits for an unreachable server.
    """

    def __init__(self, plan: Plan, recorder: RunRecorder) -> None:
        self._plan, self._recorder = plan, recorder
        self._bars: dict[str, _Bar] = {}
        self._closed = threading.Event()

    def __enter__(self) -> "RunPage":
        # In the context of the flow run, to which the artifacts belong.
        self._thread = threading.Thread(target=copy_context().run, args=(self._follow,), daemon=True, name="page")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join(_JOIN_SECONDS)

    def on(self, event: Event) -> None:
        """Listens to the run."""
        title, text = event.title, line_of(event)
        if event.start:
            progress = progress_of(event, event.start)
            self._bars[title], text = _Bar(progress=progress), progress.begun()
        elif event.state == "stopped":
            return
        elif title in self._bars and event.state != "waiting":
            percent = 100.0 if event.state in ("reused", "done") else None
            self._bars[title] = replace(self._bars[title], exit=text, percent=percent)
        get_run_logger().info(f"{title}: {text}" if title else text)

    def _follow(self) -> None:
        """Updates the page at intervals that are no load for the server."""
        is_linked = False
        while not self._closed.wait(_INTERVAL_SECONDS):
            self._update_bars()
            is_linked = is_linked or self._show_record()
        self._update_bars()
        self._show_tables()
        self._show_record()

    def _update_bars(self) -> None:
        for title, bar in list(self._bars.items()):
            text = f"{title}: {bar.exit or bar.progress.describe()}"
            percent = _percent(bar.progress) if bar.percent is None else bar.percent
            with _reported():
                if bar.artifact is None:
                    key = _key(f"{self._plan.pipeline.name}-{title}-progress")
                    artifact = create_progress_artifact(percent, key=key, description=text)
                    self._bars[title] = replace(self._bars[title], artifact=artifact)
                else:
                    update_progress_artifact(bar.artifact, percent, text)
                if bar.exit is not None:
                    self._bars.pop(title)

    def _show_tables(self) -> None:
        """Shows the tables of evaluations and gates."""
        for planned in self._plan.stages:
            name = _TABLES.get(planned.stage.method.produces)
            table = self._plan.entry(planned).output / name if name else None
            if table and table.exists():
                of = f"output/{name} of {planned.name}@{short(planned.fingerprint)}"
                _show(f"{self._plan.pipeline.name}-{planned.name}", table.read_text(encoding="utf-8"), of)

    def _show_record(self) -> bool:
        """Shows links to the run in MLflow and those of its stages; returns whether MLflow has them yet."""
        execution_id = self._recorder.record.links.mlflow_run
        if execution_id is None:
            return False
        uri = tracking_uri(self._plan.pipeline.tracking.uri)
        found = {planned.name: self._plan.entry(planned).manifest() for planned in self._plan.stages}
        runs = {"this run": execution_id}
        runs |= {name: each.mlflow_run_id for name, each in found.items() if each and each.mlflow_run_id}
        links = {name: f"`{run}`" for name, run in runs.items()}
        after = f"`mlflow ui --backend-store-uri {shown(uri)}` shows them."
        if is_server(uri):
            page = f"{shown(uri).rstrip('/')}/#/runs"  # MLflow finds the experiment of a run by itself
            links, after = {name: f"[{run}]({page}/{run})" for name, run in runs.items()}, ""
        text = "\n".join([markdown_table(["run", "MLflow"], list(links.items())), "", after])
        _show(f"{self._plan.pipeline.name}-mlflow", text, f"recorded in {shown(uri)}")
        return True


def _percent(progress: Progress) -> float:
    progress.refresh()
    return min(100.0, 100.0 * progress.step / progress.total) if progress.total else 0.0


def _show(key: str, markdown: str, description: str) -> None:
    with _reported():
        create_markdown_artifact(markdown, key=_key(key), description=description)


def _key(text: str) -> str:
    """A key of the characters that Prefect accepts: lower-case letters, digits and dashes."""
    return re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """Logs errors of Prefect: an incomplete page must not end a training."""
    try:
        yield
    except (PrefectException, httpx.HTTPError) as error:
        logger.warning("page: Prefect did not take it: %s", error)
