"""Output of a sweep: the union of its trials before the run, the results after it."""

import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from flows.reports.wording import empty_table, plain_text
from flows.sweep.files import SweepFiles
from flows.sweep.folder import FOLDER, TrialResult, overrides, trial_results
from flows.sweep.plan import SweepPlan, count_stages, union
from lineage.artifact import MODELS
from lineage.filesystem.files import atomic_write
from lineage.fingerprint import short
from lineage.markup import markdown_table
from lineage.record.metrics_file import is_of_machine
from lineage.store import Store

_MOST_COLUMNS = 4  # of metrics where there are no objectives
_MOST_TRIALS = 100
_MOST_STEPS = 20  # rows of the table by step


def union_text(sweep: SweepPlan) -> str:
    """The stages of all trials together, and how many of each would run."""
    lines = [f"pipeline {sweep.plan.pipeline.name}  store {sweep.plan.pipeline.store}", *sweep.plan.notes]
    if sweep.known is None:
        shared = [planned for planned in sweep.plan.stages if planned.name not in sweep.own]
        todo, names = sum(planned.state != "reuse" for planned in shared), ", ".join(each.name for each in shared)
        sampler = (sweep.sweep.sampler or {}).get("_target_")
        lines += [
            f"{sweep.num_trials} trials, proposed by {sampler}, of" if sampler else "trials of",
            *(f"  {field}={values}" for field, values in sweep.params.items()),
            f"once: {names or 'nothing'}: {todo} of {len(shared)} to run",
            f"in each trial: {', '.join(planned.name for planned in sweep.plan.stages if planned.name in sweep.own)}",
        ]
        return "\n".join(lines)
    table = empty_table("trial", "to run", "parameters", numbers=("trial", "to run"))
    for each in sweep.known[:_MOST_TRIALS]:
        todo_of = f"{len(each.plan.stale)} of {len(each.plan.stages)}"
        table.add_row(str(each.number), todo_of, " ".join(overrides(each.params)))
    more, counts = len(sweep.known) - _MOST_TRIALS, count_stages(sweep.known)
    parts = ", ".join(f"{name} {count}" for name, count in counts.items())
    lines += [plain_text(table), *([f"... and {more} more"] if more > 0 else [])]
    return "\n".join([*lines, f"{parts}: {len(sweep.stale)} of {sum(counts.values())} to run"])


def union_dict(sweep: SweepPlan) -> dict[str, object]:
    """The object that ``plan --multirun --json`` prints."""
    trials = sweep.samples[:1] if sweep.known is None else sweep.known
    stages = [
        {"stage": name, "fingerprint": fingerprint, "state": planned.state}
        for (name, fingerprint), planned in union(trials).items()
    ]
    known = [
        {
            "number": each.number, "params": dict(each.params),
            "stages": {planned.name: planned.fingerprint for planned in each.plan.stages},
        }
        for each in sweep.known or []
    ]  # fmt: skip
    return {
        "pipeline": sweep.plan.pipeline.name, "store": str(sweep.plan.pipeline.store), "stages": stages,
        "trials": known, "counts": count_stages(trials), "num_trials": sweep.num_trials,
    }  # fmt: skip


def trial_model(ref: str, store: Path) -> str | None:
    """The last model of a trial, named as ``SWEEP/NUMBER``; None: there is no such trial, or it made none."""
    name, _, number = ref.rpartition("/")
    folder, made = store / FOLDER / name, dict[str, float]()
    trials = trial_results(folder) if name and (folder / "trials.jsonl").exists() else []
    for stage, digits in next((each.fingerprints for each in trials if str(each.number) == number), {}).items():
        manifest = Store(store).entry(stage, digits).manifest()
        if manifest and manifest.produces in MODELS:
            made[f"{stage}@{short(digits)}"] = manifest.provenance.end
    return max(made, key=lambda each: made[each], default=None)


def write_pages(sweep: SweepPlan, files: SweepFiles) -> None:
    """Writes the page of the model of each best trial beside its overrides: ``best.html``."""
    from flows.reports.model import model_page, model_report
    from lineage.graph.index import Index

    store = sweep.plan.pipeline.store
    for path, held in files.best().items():
        model = trial_model(f"{files.folder.name}/{held['trial']}", store)
        if model:
            with Index(store) as index:
                atomic_write(path.with_suffix(".html"), model_page([model_report(model, index)]))


def sweep_dict(sweep: SweepPlan, files: SweepFiles, seconds: float, mlflow_run_id: str | None) -> dict[str, object]:
    """The object that ``run --multirun --json`` prints."""
    trials = [
        {name: value for name, value in vars(row).items() if name != "fingerprints"} | {"stages": row.fingerprints}
        for row in trial_results(files.folder)
    ]
    return {
        "sweep": str(files.folder), "pipeline": sweep.plan.pipeline.name, "store": str(sweep.plan.pipeline.store),
        "trials": trials, "best": [{**held, "file": str(path)} for path, held in files.best().items()],
        "seconds": seconds, "mlflow_run_id": mlflow_run_id,
    }  # fmt: skip


def sweep_summary(sweep: SweepPlan, files: SweepFiles, seconds: float) -> str:
    """The final report of a sweep: its trials, the table by step, the best trials, the files, the next command."""
    rows, best = trial_results(files.folder), files.best()
    columns = list(sweep.sweep.objectives) or _differing_metrics(rows, sweep)
    table = empty_table("trial", *columns, "state", "seconds", "parameters", numbers=("trial", *columns, "seconds"))
    lines = []
    for row in rows:
        numbers, params = {**row.metrics, **row.values}, " ".join(overrides(row.params))
        found = [f"{numbers[name]:.6g}" if name in numbers else "" for name in columns]
        table.add_row(str(row.number), *found, row.state, f"{row.seconds:.1f}", params)
        if row.number in [held["trial"] for held in best.values()]:
            values = " ".join(f"{name}={value:.6g}" for name, value in row.values.items())
            lines.append(f"{'best' if len(row.values) == 1 else 'front'}: trial {row.number}: {values}  {params}")
    why = "no trial was complete" if sweep.sweep.objectives else "set sweep.objectives to define the best trial"
    pages = [page.name for path in best if (page := path.with_suffix(".html")).exists()]
    names = ", ".join(["plots.html", *(path.name for path in best), *pages])
    lines.append(f"{files.folder}: trials.csv{f', {names}' if best else f' (no best.yaml: {why})'}")
    if sweep.sweep.by_step:
        header, *steps = files.by_step(rows)
        shown = steps[::-1][:: -(-len(steps) // _MOST_STEPS) or 1][::-1]  # the last step among them
        lines.insert(0, markdown_table(header, shown, align="right"))
    counts = ", ".join(f"{count} {state}" for state, count in Counter(row.state for row in rows).items())
    parts = [plain_text(table), "\n".join(lines), f"{files.folder.name}: {counts} ({seconds:.1f} s)"]
    if best:
        parts.append(f"next: posttrain run --overrides-from {shlex.quote(str(next(iter(best))))}")
    return "\n\n".join(parts)


def _differing_metrics(rows: Sequence[TrialResult], sweep: SweepPlan) -> list[str]:
    """Metrics that differ between trials, of the last stage that varies, without durations."""
    for stage in reversed([planned.name for planned in sweep.plan.stages if planned.name in sweep.own]):
        found = [(name, value) for row in rows for name, value in row.metrics.items() if name.startswith(f"{stage}/")]
        different = Counter(name for name, _ in set(found) if not is_of_machine(name))
        if telling := [name for name in dict(found) if different[name] > 1]:
            return telling[:_MOST_COLUMNS]
    return []
