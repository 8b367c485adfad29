"""Output of ``posttrain status``: waiting and running runs, and the last ones."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from flows.progress.run_record import RunRecord
from flows.reports.run import RunView, StageView
from flows.reports.wording import clock, counted, on_screen
from lineage.diagnosis.rules import as_line
from lineage.record.attempts import describe_last_attempt

_MOST_ROWS = 20


def status_dict(store: Path, live: Sequence[RunView], last: Sequence[RunView]) -> dict[str, object]:
    """The object that ``status --json`` prints."""
    return {"store": str(store), "running": [_run_dict(run) for run in live], "last": [_run_dict(run) for run in last]}


def _run_dict(run: RunView) -> dict[str, object]:
    record, sweep = run.record, run.record.sweep
    return {
        "id": record.id, "pipeline": record.pipeline, "state": run.state, "cause": record.cause, "said": record.message,
        "waits_for": "" if run.ended else record.waits_for,
        "started": record.started, "ended": run.ended, "seconds": run.seconds, "command": run.command,
        "driver": {"host": record.driver.host, "pid": record.driver.pid},
        "sweep": sweep
        and {"folder": sweep.folder, "stages": sweep.own, "trials": sweep.trials, "ended": dict(run.trials)},
        "links": dict(_links(run)), "prefect_flow_run": record.links.flow_run, "mlflow_run_id": record.links.mlflow_run,
        "stages": [_stage_dict(stage) for stage in run.stages],
    }  # fmt: skip


def _stage_dict(stage: StageView) -> dict[str, object]:
    record, progress = stage.record, stage.progress
    metrics = progress.metrics if progress else {}
    return {
        "stage": stage.title, "state": record.state, "since": record.since, "seconds": record.seconds,
        "waits_for": stage.waits_for, "cause": record.reason if record.state in ("failed", "pruned") else "",
        "step": progress.step if progress else None, "total": record.total,
        "loss": metrics.get("loss"), "reward": metrics.get("reward"),
        "tokens_per_second": metrics.get("tokens_per_second"),
        "tokens_per_second_per_worker": metrics.get("tokens_per_second_per_worker"), "mfu": metrics.get("mfu"),
        "eta_seconds": progress.seconds_left() if progress else None,
        "attempts": len(stage.attempts), "resumed_from": stage.attempts[-1].step if stage.attempts else 0,
        "restart_cause": stage.attempts[-1].cause if stage.attempts else "",
        "workers": record.workers, "cpus": record.cpus, "gpus": record.gpus, "directory": record.directory,
        "findings": [{"rule": each.rule, "evidence": each.evidence} for each in stage.findings],
    }  # fmt: skip


def status_text(store: Path, live: Sequence[RunView], last: Sequence[RunView]) -> str:
    """The status as text."""
    if not (live or last):
        return on_screen(f"no run is recorded in {store} yet; start one with: posttrain run")
    blocks = ["\n".join(_live_lines(run)) for run in live] or [f"nothing runs in {store}"]
    if last:
        blocks.append("\n".join(["last runs", *(line for run in last for line in _last_lines(run))]))
    return on_screen("\n\n".join(blocks))


def _live_lines(run: RunView) -> Iterator[str]:
    record = run.record
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.started))
    driver = f"{record.driver.host}:{record.driver.pid}"
    does = "waits" if record.waits_for else "runs"
    yield f"{record.id}  {_what(record)}  {does} since {since} ({clock(run.seconds)})  on {driver}"
    waits = [("waits for", record.waits_for)] if record.waits_for else []
    rows = [*waits, *_trial_rows(run), *_stage_rows(run.stages), *_links(run)]
    width = max((len(name) for name, _ in rows), default=0)
    yield from (f"  {name:<{width}}  {text}".rstrip() for name, text in rows)
    yield from (f"  | {line}" for line in record.message.splitlines())


def _what(record: RunRecord) -> str:
    if record.sweep:
        return f"{record.pipeline}  sweep {Path(record.sweep.folder).name}"
    return record.pipeline if record.command == "run" else f"{record.pipeline}  {record.command}"


def _trial_rows(run: RunView) -> Iterator[tuple[str, str]]:
    """Number of ended trials of a sweep, and the stages that each trial has of its own."""
    if run.record.sweep:
        ended, own = sum(run.trials.values()), ", ".join(run.record.sweep.own)
        counts = ", ".join(f"{count} {state}" for state, count in run.trials.items())
        of = f" of {run.record.sweep.trials}" if run.record.sweep.trials else ""
        yield "trials", f"{ended}{of} ended{f' ({counts})' if counts else ''}; each runs {own}"


def _stage_rows(stages: Sequence[StageView]) -> Iterator[tuple[str, str]]:
    """A row per stage; for many stages, idle ones are only counted."""
    quiet = [stage for stage in stages if stage.record.state in ("done", "reused", "pending", "pruned")]
    shown = [stage for stage in stages if stage not in quiet] if len(stages) > _MOST_ROWS else stages
    for stage in shown:
        yield stage.title, _state_text(stage)
        yield from (("", f"! {as_line(each)}; see posttrain diagnose {stage.title}") for each in stage.findings)
    if len(shown) < len(stages):
        counts = Counter(stage.record.state for stage in quiet)
        yield "others", ", ".join(f"{count} {state}" for state, count in counts.items())


def _state_text(stage: StageView) -> str:
    record = stage.record
    if stage.progress:
        capacity = [counted(record.workers, "worker"), counted(record.cpus, "CPU")]
        gpus = [counted(record.gpus, "GPU")] if record.gpus else []
        return "  ".join([stage.progress.describe(), *capacity, *gpus, describe_last_attempt(stage.attempts)]).rstrip()
    if record.state in ("pending", "waiting"):
        return f"waits for {stage.waits_for}"
    if record.state in ("failed", "pruned"):
        return ("FAILED: " if record.state == "failed" else "") + record.reason.partition("\n")[0]
    return f"done in {record.seconds:.1f} s" if record.state == "done" else "reused: another run made it"


def _links(run: RunView) -> Iterator[tuple[str, str]]:
    links = run.record.links
    if links.flow_page or links.flow_run:
        yield "prefect", links.flow_page or f"flow run {links.flow_run}"
    if links.mlflow and links.mlflow_run:
        is_server = links.mlflow.startswith("http")
        place = f"{links.mlflow.rstrip('/')}/#/runs/{links.mlflow_run}"
        yield "mlflow", place if is_server else f"run {links.mlflow_run} in {links.mlflow}"
    for address in sorted({stage.dashboard for stage in run.stages if stage.dashboard}):
        yield "ray", address if "://" in address else f"http://{address}"


def _last_lines(run: RunView) -> Iterator[str]:
    record = run.record
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.started))
    yield f"  {record.id}  {_what(record)}  {when}  {run.state} after {clock(run.seconds)}"
    reached = run.reached()
    again = "resume" if record.command == "run" else "start again"
    resumed = "resumed it" if record.command == "run" else "restarted it"
    by = f"{run.successor.id} {resumed}" if run.successor else None
    if run.state == "died":
        killed = f"its driver on {record.driver.host} was killed{f' {reached}' if reached else ''}"
        yield f"      {killed}; {by or f'run the same command again to {again}:'}"
        if not by:
            yield f"      {run.command}"
    elif run.state == "stopped":
        yield f"      {f'{reached}; ' if reached else ''}{by or f'{again} with: {run.command}'}"
    elif record.cause:
        yield from (f"      {line}" for line in record.cause.splitlines()[:3])
