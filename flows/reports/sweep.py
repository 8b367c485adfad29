"""What a sweep prints: the union of its trials before, the trials after."""

import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from flows.reports.tables import empty_table, plain_text
from flows.sweep.files import SweepFiles
from flows.sweep.folder import Row
from flows.sweep.planner import PlannedTrial, count_stages, key_of
from flows.sweep.stated import Stated

_MOST_COLUMNS = 4  # of metrics that no setting names
_MOST_TRIALS = 100


def union_text(stated: Stated) -> str:
    """What would run of all trials together, and how often each stage."""
    plan = stated.sample.plan
    head = [f"pipeline {plan.pipeline.name}  store {plan.pipeline.store}", *plan.notes]
    return "\n".join([*head, *(_proposed(stated) if stated.known is None else _union(stated.known, stated))])


def _union(trials: Sequence[PlannedTrial], stated: Stated) -> list[str]:
    table = empty_table("trial", "to run", "parameters", numbers=("trial", "to run"))
    for each in trials[:_MOST_TRIALS]:
        todo = f"{len(each.plan.stale)} of {len(each.plan.stages)}"
        table.add_row(str(each.trial.number), todo, Text(" ".join(each.trial.overrides)))
    more = [f"... and {len(trials) - _MOST_TRIALS} more"] if len(trials) > _MOST_TRIALS else []
    counts = count_stages(trials)
    told = ", ".join(f"{name} {count}" for name, count in counts.items())
    return [plain_text(table), *more, f"{told}: {len(stated.stale)} of {sum(counts.values())} to run"]


def _proposed(stated: Stated) -> list[str]:
    """A sampler has not said yet what it will try."""
    plan, sweep = stated.sample.plan, stated.sweep
    shared = [planned for planned in plan.stages if planned.name not in stated.own]
    todo = sum(planned.state != "reuse" for planned in shared)
    own = ", ".join(planned.name for planned in plan.stages if planned.name in stated.own)
    return [
        f"{sweep.num_trials} trials, proposed by {(sweep.sampler or {})['_target_']}, of",
        *(f"  {field}={values}" for field, values in stated.params.items()),
        f"once: {', '.join(planned.name for planned in shared) or 'nothing'}: {todo} of {len(shared)} to run",
        f"in each trial: {own}",
    ]


def union_dict(stated: Stated) -> dict[str, object]:
    """The object that ``plan --multirun --json`` prints."""
    plan = stated.sample.plan
    keys = {key_of(planned): planned for each in stated.trials for planned in each.plan.stages}
    return {
        "pipeline": plan.pipeline.name,
        "store": str(plan.pipeline.store),
        "stages": [
            {"stage": name, "fingerprint": fingerprint, "state": planned.state}
            for (name, fingerprint), planned in keys.items()
        ],
        "trials": [
            {
                "number": each.trial.number,
                "params": dict(each.trial.params),
                "stages": {planned.name: planned.fingerprint for planned in each.plan.stages},
            }
            for each in stated.known or []
        ],
        "counts": dict(count_stages(stated.trials)),
        "num_trials": stated.num_trials,
    }


def sweep_dict(
    stated: Stated, folder: Path, files: SweepFiles, seconds: float, mlflow_run_id: str | None
) -> dict[str, object]:
    """The object that ``run --multirun --json`` prints."""
    plan = stated.sample.plan
    return {
        "sweep": str(folder),
        "pipeline": plan.pipeline.name,
        "store": str(plan.pipeline.store),
        "trials": [
            {
                "number": row.number, "params": dict(row.params), "state": row.state, "cause": row.cause,
                "seconds": row.seconds, "values": dict(row.values), "metrics": dict(row.metrics),
                "stages": dict(row.fingerprints),
            }
            for row in files.rows()
        ],
        "best": [{**told, "file": str(path)} for path, told in files.best().items()],
        "seconds": seconds,
        "mlflow_run_id": mlflow_run_id,
    }  # fmt: skip


def sweep_summary(stated: Stated, folder: Path, files: SweepFiles, seconds: float) -> str:
    """The end of a sweep for people: a line per trial, what is best, where it is written, what to do next."""
    rows = files.rows()
    columns = list(stated.sweep.objectives) or _telling_metrics(rows, stated)
    table = empty_table("trial", *columns, "state", "seconds", "parameters", numbers=("trial", *columns, "seconds"))
    for row in rows:
        numbers = {**row.metrics, **row.values}
        found = [f"{numbers[name]:.6g}" if name in numbers else "" for name in columns]
        words = Text(" ".join(f"{field}={value}" for field, value in row.params.items()))
        table.add_row(str(row.number), *found, row.state, f"{row.seconds:.1f}", words)
    states = Counter(row.state for row in rows)
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    best = next(iter(files.best()), None)
    lines = [plain_text(table), "\n".join(files.lines()), f"{folder.name}: {counts} ({seconds:.1f} s)"]
    if best:
        lines.append(f"next: posttrain run --overrides-from {shlex.quote(str(best))}")
    return "\n\n".join(line for line in lines if line)


def _telling_metrics(rows: Sequence[Row], stated: Stated) -> list[str]:
    """Metrics of the last stage of its own that differ between the trials, none of them a time."""
    names = [planned.name for planned in stated.sample.plan.stages if planned.name in stated.own]
    for stage in reversed(names):
        values: dict[str, set[float]] = {}
        for row in rows:
            for name, value in row.metrics.items():
                if name.startswith(f"{stage}/") and not name.endswith(("seconds", "per_second")):
                    values.setdefault(name, set()).add(value)
        telling = [name for name, different in values.items() if len(different) > 1]
        if telling:
            return telling[:_MOST_COLUMNS]
    return []
