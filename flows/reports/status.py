"""What ``posttrain status`` says: the runs that wait or are under way, and the last ones."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from flows.progress.run_record import RunRecord
from flows.reports.run import RunView, StageView
from flows.wording import clock, counted, printable_text
from lineage.attempts import describe_last_attempt
from lineage.diagnosis.rules import as_line

_MOST_ROWS = 20


def status_dict(store: Path, live: Sequence[RunView], last: Sequence[RunView]) -> dict[str, object]:
    """The object that ``status --json`` prints."""
    return {"store": str(store), "running": [_run_dict(run) for run in live], "last": [_run_dict(run) for run in last]}


def _run_dict(run: RunView) -> dict[str, object]:
    note = run.note
    return {
        "id": note.id, "pipeline": note.pipeline, "state": run.state, "cause": note.cause, "said": note.said,
        "waits_for": "" if run.ended else note.waits_for,
        "started": note.started, "ended": run.ended, "seconds": run.seconds, "command": run.command,
        "driver": {"host": note.driver.host, "pid": note.driver.pid}, "sweep": _sweep_dict(run),
        "links": dict(_links(run)), "prefect_flow_run": note.links.flow_run, "mlflow_run_id": note.links.mlflow_run,
        "stages": [_stage_dict(stage) for stage in run.stages],
    }  # fmt: skip


def _stage_dict(stage: StageView) -> dict[str, object]:
    note, progress = stage.note, stage.progress
    metrics = progress.metrics if progress else {}
    return {
        "stage": stage.title, "state": note.state, "since": note.since, "seconds": note.seconds,
        "waits_for": stage.waits_for, "cause": note.reason if note.state in ("failed", "pruned") else "",
        "step": progress.step if progress else None, "total": note.total,
        "loss": metrics.get("loss"), "tokens_per_second": metrics.get("tokens_per_second"),
        "tokens_per_second_per_worker": metrics.get("tokens_per_second_per_worker"), "mfu": metrics.get("mfu"),
        "eta_seconds": progress.seconds_left() if progress else None,
        "attempts": len(stage.attempts), "resumed_from": stage.attempts[-1].step if stage.attempts else 0,
        "restart_cause": stage.attempts[-1].cause if stage.attempts else "",
        "workers": note.workers, "cpus": note.cpus, "gpus": note.gpus, "directory": note.directory,
        "findings": [{"rule": each.rule, "evidence": each.evidence} for each in stage.findings],
    }  # fmt: skip


def status_text(store: Path, live: Sequence[RunView], last: Sequence[RunView]) -> str:
    """The same for people."""
    if not (live or last):
        return f"no run has left a note in {store} yet; start one with: posttrain run"
    blocks = ["\n".join(_live_lines(run)) for run in live] or [f"nothing runs in {store}"]
    if last:
        blocks.append("\n".join(["last runs", *(line for run in last for line in _last_lines(run))]))
    return printable_text("\n\n".join(blocks))


def _live_lines(run: RunView) -> Iterator[str]:
    note = run.note
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(note.started))
    driver = f"{note.driver.host}:{note.driver.pid}"
    does = "waits" if note.waits_for else "runs"
    yield f"{note.id}  {_what(note)}  {does} since {since} ({clock(run.seconds)})  on {driver}"
    waits = [("waits for", note.waits_for)] if note.waits_for else []
    rows = [*waits, *_trial_rows(run), *_stage_rows(run.stages), *_links(run)]
    width = max((len(name) for name, _ in rows), default=0)
    yield from (f"  {name:<{width}}  {text}".rstrip() for name, text in rows)
    yield from (f"  | {line}" for line in note.said.splitlines())


def _what(note: RunRecord) -> str:
    if note.sweep:
        return f"{note.pipeline}  sweep {Path(note.sweep.folder).name}"
    return note.pipeline if note.command == "run" else f"{note.pipeline}  {note.command}"


def _trial_rows(run: RunView) -> Iterator[tuple[str, str]]:
    """How many trials of a sweep ended, and which stages each has of its own: they are listed as they begin."""
    if run.note.sweep:
        ended, own = sum(run.trials.values()), ", ".join(run.note.sweep.own)
        counts = ", ".join(f"{count} {state}" for state, count in run.trials.items())
        of = f" of {run.note.sweep.trials}" if run.note.sweep.trials else ""
        yield "trials", f"{ended}{of} ended{f' ({counts})' if counts else ''}; each makes {own}"


def _sweep_dict(run: RunView) -> dict[str, object] | None:
    sweep = run.note.sweep
    if sweep is None:
        return None
    return {"folder": sweep.folder, "stages": sweep.own, "trials": sweep.trials, "ended": dict(run.trials)}


def _stage_rows(stages: Sequence[StageView]) -> Iterator[tuple[str, str]]:
    """Each stage; of a sweep, which has many, those that rest only by number."""
    quiet = [stage for stage in stages if stage.note.state in ("done", "reused", "pending", "pruned")]
    shown = [stage for stage in stages if stage not in quiet] if len(stages) > _MOST_ROWS else stages
    for stage in shown:
        yield stage.title, _doing(stage)
        yield from (("", f"! {as_line(each)}; see posttrain diagnose {stage.title}") for each in stage.findings)
    if len(shown) < len(stages):
        counts = Counter(stage.note.state for stage in quiet)
        yield "others", ", ".join(f"{count} {state}" for state, count in counts.items())


def _doing(stage: StageView) -> str:
    note = stage.note
    if stage.progress:
        room = [counted(note.workers, "worker"), counted(note.cpus, "CPU")]
        gpus = [counted(note.gpus, "GPU")] if note.gpus else []
        return "  ".join([stage.progress.describe(), *room, *gpus, describe_last_attempt(stage.attempts)]).rstrip()
    if note.state in ("pending", "waiting"):
        return f"waits for {stage.waits_for}"
    if note.state in ("failed", "pruned"):
        return ("FAILED: " if note.state == "failed" else "") + note.reason.partition("\n")[0]
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
    yield f"  {note.id}  {_what(note)}  {when}  {run.state} after {clock(run.seconds)}"
    reached = run.reached()
    again = "go on" if note.command == "run" else "begin again"
    took_up = "went on" if note.command == "run" else "began again"
    by = f"{run.went_on.id} {took_up}" if run.went_on else None
    if run.state == "died":
        killed = f"its driver on {note.driver.host} was killed{f' {reached}' if reached else ''}"
        yield f"      {killed}; {by or f'run the same command again to {again}:'}"
        if not by:
            yield f"      {run.command}"
    elif run.state == "stopped":
        yield f"      {f'{reached}; ' if reached else ''}{by or f'{again} with: {run.command}'}"
    elif note.cause:
        yield from (f"      {line}" for line in note.cause.splitlines()[:3])
