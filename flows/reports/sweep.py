"""Output of a sweep: the union of its trials before the run, the results after it."""

import shlex
from collections import Counter
from collections.abc import Sequence

from flows.reports.tables import empty_table, plain_text
from flows.sweep.folder import SweepFiles, TrialResult, overrides, trial_results
from flows.sweep.plan import SweepPlan, Trial, count_stages, key_of

_MOST_COLUMNS = 4  # of metrics where there are no objectives
_MOST_TRIALS = 100


def union_text(sweep: SweepPlan) -> str:
    """The stages of all trials together, and how many of each would run."""
    plan = sweep.plan
    head = [f"pipeline {plan.pipeline.name}  store {plan.pipeline.store}", *plan.notes]
    return "\n".join([*head, *(_proposed(sweep) if sweep.known is None else _union(sweep.known, sweep))])


def _union(trials: Sequence[Trial], sweep: SweepPlan) -> list[str]:
    table = empty_table("trial", "to run", "parameters", numbers=("trial", "to run"))
    for each in trials[:_MOST_TRIALS]:
        todo = f"{len(each.plan.stale)} of {len(each.plan.stages)}"
        table.add_row(str(each.number), todo, " ".join(overrides(each.params)))
    more = [f"... and {len(trials) - _MOST_TRIALS} more"] if len(trials) > _MOST_TRIALS else []
    counts = count_stages(trials)
    parts = ", ".join(f"{name} {count}" for name, count in counts.items())
    return [plain_text(table), *more, f"{parts}: {len(sweep.stale)} of {sum(counts.values())} to run"]


def _proposed(sweep: SweepPlan) -> list[str]:
    """For a sampler, whose trials are not known yet."""
    plan, settings = sweep.plan, sweep.sweep
    shared = [planned for planned in plan.stages if planned.name not in sweep.own]
    todo = sum(planned.state != "reuse" for planned in shared)
    own = ", ".join(planned.name for planned in plan.stages if planned.name in sweep.own)
    who = f"{settings.num_trials} trials, proposed by {settings.sampler['_target_']}," if settings.sampler else "trials"
    return [
        f"{who} of",
        *(f"  {field}={values}" for field, values in sweep.params.items()),
        f"once: {', '.join(planned.name for planned in shared) or 'nothing'}: {todo} of {len(shared)} to run",
        f"in each trial: {own}",
    ]


def union_dict(sweep: SweepPlan) -> dict[str, object]:
    """The object that ``plan --multirun --json`` prints."""
    plan = sweep.plan
    keys = {key_of(planned): planned for each in sweep.trials for planned in each.plan.stages}
    return {
        "pipeline": plan.pipeline.name,
        "store": str(plan.pipeline.store),
        "stages": [
            {"stage": name, "fingerprint": fingerprint, "state": planned.state}
            for (name, fingerprint), planned in keys.items()
        ],
        "trials": [
            {
                "number": each.number,
                "params": dict(each.params),
                "stages": {planned.name: planned.fingerprint for planned in each.plan.stages},
            }
            for each in sweep.known or []
        ],
        "counts": dict(count_stages(sweep.trials)),
        "num_trials": sweep.num_trials,
    }


def sweep_dict(sweep: SweepPlan, files: SweepFiles, seconds: float, mlflow_run_id: str | None) -> dict[str, object]:
    """The object that ``run --multirun --json`` prints."""
    plan = sweep.plan
    return {
        "sweep": str(files.folder),
        "pipeline": plan.pipeline.name,
        "store": str(plan.pipeline.store),
        "trials": [
            {
                "number": row.number, "params": dict(row.params), "state": row.state, "cause": row.cause,
                "seconds": row.seconds, "values": dict(row.values), "metrics": dict(row.metrics),
                "stages": dict(row.fingerprints),
            }
            for row in trial_results(files.folder)
        ],
        "best": [{**held, "file": str(path)} for path, held in files.best().items()],
        "seconds": seconds,
        "mlflow_run_id": mlflow_run_id,
    }  # fmt: skip


def sweep_summary(sweep: SweepPlan, files: SweepFiles, seconds: float) -> str:
    """The final report of a sweep: a line per trial, the best trial, the files, the next command."""
    rows = trial_results(files.folder)
    columns = list(sweep.sweep.objectives) or _differing_metrics(rows, sweep)
    table = empty_table("trial", *columns, "state", "seconds", "parameters", numbers=("trial", *columns, "seconds"))
    for row in rows:
        numbers = {**row.metrics, **row.values}
        found = [f"{numbers[name]:.6g}" if name in numbers else "" for name in columns]
        words = " ".join(overrides(row.params))
        table.add_row(str(row.number), *found, row.state, f"{row.seconds:.1f}", words)
    states = Counter(row.state for row in rows)
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    best = next(iter(files.best()), None)
    lines = [plain_text(table), "\n".join(files.lines()), f"{files.folder.name}: {counts} ({seconds:.1f} s)"]
    if best:
        lines.append(f"next: posttrain run --overrides-from {shlex.quote(str(best))}")
    return "\n\n".join(line for line in lines if line)


def _differing_metrics(rows: Sequence[TrialResult], sweep: SweepPlan) -> list[str]:
    """Metrics that differ between trials, of the last stage that varies, without durations."""
    names = [planned.name for planned in sweep.plan.stages if planned.name in sweep.own]
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
