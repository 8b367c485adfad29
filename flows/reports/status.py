"""What ``posttrain status`` says: the runs that are under way, and the last ones, by their notes."""

import shlex
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from flows.progress import Progress, clock
from flows.run_notes import RunNote, StageNote, dashboard_file, latest, note_path
from lineage.lease import HEARTBEAT_SECONDS

_LAST = 5
_MOST_ROWS = 20


@dataclass(frozen=True, kw_only=True)
class StageView:
    """One stage of a run, and how far it is.

    Args:
        progress: of one that runs, or ran when its run ended.
        dashboard: address of Ray's, where it has one.
    """

    title: str
    note: StageNote
    progress: Progress | None
    dashboard: str | None


@dataclass(frozen=True, kw_only=True)
class RunView:
    """One run.

    Args:
        state: ``running``, how it ended, or ``died``: its driver was killed.
        ended: None: it runs. Of one that died: when it was last heard.
    """

    note: RunNote
    state: str
    ended: float | None
    stages: Sequence[StageView]

    @property
    def command(self) -> str:
        return shlex.join(["posttrain", "run", *self.note.words])

    @property
    def seconds(self) -> float:
        return (self.ended or time.time()) - self.note.started

    def reached(self) -> str:
        """How far its stages were that were cut off."""
        cut = [(each.title, each.progress) for each in self.stages if each.progress]
        return ", ".join(f"at step {at.step} of {title}" if at.step else f"in {title}" for title, at in cut)


def views(store: Path) -> tuple[list[RunView], list[RunView]]:
    """The runs that are under way, oldest first; and the last ones that ended, newest first."""
    notes = list(latest(store))
    live = [note for note in notes if note.is_live(store)]
    over = [note for note in notes if note not in live]
    return [_view(note, store, "running") for note in reversed(live)], [
        _view(note, store, note.outcome or "died") for note in islice(over, _LAST)
    ]


def _view(note: RunNote, store: Path, state: str) -> RunView:
    ended = note.ended
    if state == "died":
        path = note_path(store, note.id)
        ended = path.stat().st_mtime if path.exists() else note.started
    return RunView(
        note=note, state=state, ended=ended,
        stages=[_stage_view(title, stage, ended) for title, stage in note.stages.items()],
    )  # fmt: skip


def _stage_view(title: str, note: StageNote, ended: float | None) -> StageView:
    if note.state != "running":
        return StageView(title=title, note=note, progress=None, dashboard=None)
    directory = Path(note.directory)
    progress = Progress(path=directory / "metrics.jsonl", total=note.total, started=note.since)
    progress.refresh()
    if ended and progress.last_time > ended + 2 * HEARTBEAT_SECONDS:  # of a later run, which began the stage again
        progress = Progress(path=progress.path, total=note.total, started=note.since)
    try:
        dashboard = dashboard_file(directory).read_text().strip() or None
    except OSError:
        dashboard = None
    return StageView(title=title, note=note, progress=progress, dashboard=dashboard)


def status_dict(store: Path, live: Sequence[RunView], last: Sequence[RunView]) -> dict[str, object]:
    """The object that ``status --json`` prints."""
    return {"store": str(store), "running": [_run_dict(run) for run in live], "last": [_run_dict(run) for run in last]}


def _run_dict(run: RunView) -> dict[str, object]:
    note = run.note
    return {
        "id": note.id, "pipeline": note.pipeline, "state": run.state, "cause": note.cause, "said": note.said,
        "started": note.started, "ended": run.ended, "seconds": run.seconds, "command": run.command,
        "driver": {"host": note.driver.host, "pid": note.driver.pid},
        "links": dict(_links(run)), "prefect_flow_run": note.links.flow_run, "mlflow_run_id": note.links.mlflow_run,
        "stages": [_stage_dict(stage) for stage in run.stages],
    }  # fmt: skip


def _stage_dict(stage: StageView) -> dict[str, object]:
    note, progress = stage.note, stage.progress
    metrics = progress.metrics if progress else {}
    return {
        "stage": stage.title, "state": note.state, "since": note.since, "seconds": note.seconds,
        "waits_for": note.reason if note.state in ("pending", "waiting") else "",
        "cause": note.reason if note.state == "failed" else "",
        "step": progress.step if progress else None, "total": note.total,
        "loss": metrics.get("loss"), "tokens_per_second": metrics.get("tokens_per_second"),
        "eta_seconds": progress.seconds_left() if progress else None,
        "workers": note.workers, "cpus": note.cpus, "gpus": note.gpus, "directory": note.directory,
    }  # fmt: skip


def status_text(store: Path, live: Sequence[RunView], last: Sequence[RunView]) -> str:
    """The same for people."""
    if not (live or last):
        return f"no run has left a note in {store} yet; start one with: posttrain run"
    blocks = ["\n".join(_live_lines(run)) for run in live] or [f"nothing runs in {store}"]
    if last:
        blocks.append("\n".join(["last runs", *(line for run in last for line in _last_lines(run))]))
    return "\n\n".join(blocks)


def _live_lines(run: RunView) -> Iterator[str]:
    note = run.note
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(note.started))
    driver = f"{note.driver.host}:{note.driver.pid}"
    yield f"{note.id}  {note.pipeline}  runs since {since} ({clock(run.seconds)})  on {driver}"
    rows = [*_stage_rows(run.stages), *_links(run)]
    width = max((len(name) for name, _ in rows), default=0)
    yield from (f"  {name:<{width}}  {text}".rstrip() for name, text in rows)
    yield from (f"  | {line}" for line in note.said.splitlines())


def _stage_rows(stages: Sequence[StageView]) -> Iterator[tuple[str, str]]:
    """Each stage; of a sweep, which has many, those that rest only by number."""
    quiet = [stage for stage in stages if stage.note.state in ("done", "reused", "pending")]
    shown = [stage for stage in stages if stage not in quiet] if len(stages) > _MOST_ROWS else stages
    yield from ((stage.title, _doing(stage)) for stage in shown)
    if len(shown) < len(stages):
        counts = Counter(stage.note.state for stage in quiet)
        yield "others", ", ".join(f"{count} {state}" for state, count in counts.items())


def _doing(stage: StageView) -> str:
    note = stage.note
    if stage.progress:
        room = [_count(note.workers, "worker"), _count(note.cpus, "CPU")]
        return "  ".join([stage.progress.describe(), *room, *([_count(note.gpus, "GPU")] if note.gpus else [])])
    if note.state in ("pending", "waiting"):
        return f"waits for {note.reason}" if note.reason else "not begun"
    if note.state == "failed":
        return f"FAILED: {note.reason.partition(chr(10))[0]}"
    return f"done in {note.seconds:.1f} s" if note.state == "done" else "reused: another run made it"


def _links(run: RunView) -> Iterator[tuple[str, str]]:
    links = run.note.links
    if links.flow_page or links.flow_run:
        yield "prefect", links.flow_page or f"flow run {links.flow_run}"
    if links.mlflow and links.mlflow_run:
        is_server = links.mlflow.startswith("http")
        place = f"{links.mlflow.rstrip('/')}/#/runs/{links.mlflow_run}"
        yield "mlflow", place if is_server else f"run {links.mlflow_run} in {links.mlflow}"
    for address in sorted({stage.dashboard for stage in run.stages if stage.dashboard}):
        yield "ray", address if "://" in address else f"http://{address}"


def _last_lines(run: RunView) -> Iterator[str]:
    note = run.note
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(note.started))
    yield f"  {note.id}  {note.pipeline}  {when}  {run.state} after {clock(run.seconds)}"
    reached = run.reached()
    if run.state == "died":
        yield f"      its process was killed{f' {reached}' if reached else ''}; run the same command again to go on:"
        yield f"      {run.command}"
    elif run.state == "stopped" and reached:
        yield f"      {reached}; go on with: {run.command}"
    elif note.cause:
        yield from (f"      {line}" for line in note.cause.splitlines()[:3])


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
