"""The runs of a store as seen by other processes, and the terminal reports of plans and runs."""

import json
import re
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from flows.declare.project import without_project
from flows.planning.adapter_choice import capacity
from flows.planning.advice import advice_lines
from flows.planning.estimates import Estimate, Scoring, Totals, in_all
from flows.planning.plan import Plan, PlannedStage
from flows.progress.run_record import RunRecord, StageRecord, dashboard_file, latest, run_record_path, waits_for
from flows.progress.stage_progress import Progress
from flows.reports.page import render
from flows.reports.wording import clock, empty_table, on_screen, plain_text, relative
from flows.sweep.folder import trial_results
from lineage.artifact import MODELS, Kind
from lineage.diagnosis.finding import Finding
from lineage.diagnosis.rules import as_line, live_findings
from lineage.dvc import View
from lineage.filesystem.files import atomic_write, read_jsonl
from lineage.filesystem.owner import HEARTBEAT_SECONDS
from lineage.fingerprint import short
from lineage.graph.ancestry import ancestry
from lineage.graph.index import Index
from lineage.graph.places import node_key
from lineage.record.attempts import Attempt, attempts
from lineage.record.verdict import VERDICT_TABLE
from lineage.secrets import redacted
from lineage.store import Entry, Manifest
from tasks.data.images import named_images
from tasks.evaluate.report import ANSWERS_FILE, METRICS_FILE, OWN_TITLE, RIGHT, TABLE_FILE, own_rows, shown_columns
from tasks.evaluate.row_scores import SCORES_FILE, read_failed, read_scores
from tasks.method import Training

_LAST = 5  # runs
_MOST_COLUMNS, _MOST_ANSWERS, _MOST_SHOWN = 4, 3, 100  # of the report on a run: the last is letters of a text


@dataclass(frozen=True, kw_only=True)
class StageView:
    """One stage of a run with its progress.

    Args:
        waits_for: what it waits for, while its run is active.
        progress: of a stage that runs, or ran when its run ended.
        dashboard: address of Ray's dashboard; None: there is none.
        attempts: all attempts so far, of a stage that runs, or ran when its run ended.
        findings: of ``diagnose``, for a running stage.
    """

    title: str
    record: StageRecord
    waits_for: str
    progress: Progress | None
    dashboard: str | None
    attempts: Sequence[Attempt] = ()
    findings: Sequence[Finding] = ()


@dataclass(frozen=True, kw_only=True)
class RunView:
    """One run.

    Args:
        state: ``waiting`` (as a whole), ``running``, its outcome, or ``died``: its driver was killed.
        ended: time of its end, or of the last heartbeat if it was killed; None: it is active.
        trials: for a sweep: state -> number of ended trials, of all its runs.
        successor: the later run that resumed its unfinished stages, if any.
    """

    record: RunRecord
    state: str
    ended: float | None
    stages: Sequence[StageView]
    trials: Mapping[str, int]
    successor: RunRecord | None = None

    @property
    def command(self) -> str:
        return shlex.join(["posttrain", self.record.command, *map(redacted, self.record.cli_args)])

    @property
    def seconds(self) -> float:
        return (self.ended or time.time()) - self.record.started

    def reached(self) -> str:
        """The progress of its stages when it was interrupted."""
        if self.record.waits_for:
            return f"while it waited for {self.record.waits_for}"
        cut = [(each.title, each.progress) for each in self.stages if each.progress]
        return ", ".join(f"at step {at.step} of {title}" if at.step else f"in {title}" for title, at in cut)


def views(store: Path) -> tuple[list[RunView], list[RunView]]:
    """The waiting and running runs, oldest first; and the last ended runs, newest first."""
    records = list(latest(store))
    live = [record for record in records if record.is_live(store)]
    over = [record for record in records if record not in live]
    return [_view(record, store, "waiting" if record.waits_for else "running") for record in reversed(live)], [
        _view(record, store, record.outcome or "died", _successor(record, records)) for record in islice(over, _LAST)
    ]


def _successor(record: RunRecord, records: Sequence[RunRecord]) -> RunRecord | None:
    """The later run that resumes a run; ``records`` are sorted newest first."""
    later = (each for each in reversed(records) if each.started > record.started)
    return next((each for each in later if _resumes(each, record)), None)


def _resumes(later: RunRecord, record: RunRecord) -> bool:
    """Whether a later run has all unfinished stages of a run, or repeats its command."""
    left = {each.directory for each in record.stages.values() if each.state not in ("done", "reused")} - {""}
    if left and record.command == "run" and not record.sweep:
        return left <= {each.directory for each in later.stages.values()}
    return (later.pipeline, later.command, later.cli_args) == (record.pipeline, record.command, record.cli_args)


def _view(record: RunRecord, store: Path, state: str, successor: RunRecord | None = None) -> RunView:
    ended = record.ended
    if state == "died":
        path = run_record_path(store, record.id)
        ended = path.stat().st_mtime if path.exists() else record.started
    return RunView(
        record=record, state=state, ended=ended,
        stages=[_stage_view(title, record, ended) for title in record.stages],
        trials=Counter(row.state for row in trial_results(Path(record.sweep.folder))) if record.sweep else {},
        successor=successor,
    )  # fmt: skip


def _stage_view(title: str, run: RunRecord, ended: float | None) -> StageView:
    record = run.stages[title]
    if record.state != "running":
        waits = "" if ended else waits_for(title, run)
        return StageView(title=title, record=record, waits_for=waits, progress=None, dashboard=None)
    directory = Path(record.directory)
    progress = Progress(path=Entry(directory).metrics, total=record.total, started=record.since)
    progress.refresh()
    made = attempts(directory)
    later = next((each for each in made if ended and each.time > ended), None)
    # Written by a run that restarted the stage.
    if later or (ended and progress.last_time > ended + 2 * HEARTBEAT_SECONDS):
        reached = later.reached if later else 0
        progress = Progress(path=progress.path, total=record.total, started=record.since, step=reached)
    try:
        dashboard = dashboard_file(directory).read_text().strip() or None
    except OSError:
        dashboard = None
    return StageView(
        title=title, record=record, waits_for="", progress=progress, dashboard=dashboard, attempts=made,
        findings=() if ended else live_findings(directory),
    )  # fmt: skip


def plan_dict(
    plan: Plan, estimates: Mapping[str, Estimate], scorings: Mapping[str, Scoring] | None = None
) -> dict[str, object]:
    """The object that ``plan --json`` prints; ``estimate`` beside the stages is of the trainings together."""
    document = plan.to_dict()
    rows = document["stages"]
    assert isinstance(rows, list)
    for row in rows:
        if found := estimates.get(row["stage"]) or (scorings or {}).get(row["stage"]):
            row["estimate"] = found.to_dict()
    return document | ({"estimate": in_all(list(estimates.values()))} if estimates else {})


def _estimate_table(plan: Plan, estimates: Mapping[str, Estimate], scorings: Mapping[str, Scoring]) -> list[str]:
    """Table of the estimates with totals of the trainings; empty without estimates. What does not fit has its limit."""
    if not estimates and not scorings:
        return []
    rows = [
        (name, f"{memory}{_limit(plan.stage(name), each.memory)}", *rest, each.basis)
        for name, each in estimates.items()
        for memory, *rest in [_cells(in_all([each]))]
    ]
    if len(rows) > 1:
        rows.append(("all trainings", *_cells(in_all(list(estimates.values()))), ""))
    for name, each in scorings.items():
        time = "" if each.seconds is None else clock(each.seconds)
        memory = f"{each.memory / 2**30:.2f}{_limit(plan.stage(name), each.memory)}"
        rows.append((name, memory, "", time, "", "", "", each.basis))
    columns = ("stage", "GiB/worker", "GiB disk", "time (m:ss)", "GPU-hours", "price", "kWh", "basis")
    shown = [index for index in range(len(columns)) if any(row[index] for row in rows)]
    table = empty_table(*(columns[index] for index in shown), numbers=columns[1:-1])
    for row in rows:
        table.add_row(*(row[index] for index in shown))
    return [plain_text(table)]


def _limit(planned: PlannedStage, need: int) -> str:
    """What a worker has, where it is less than this need."""
    held = 0 if planned.runs_elsewhere else capacity(planned.stage.resources)
    return f" > {held / 2**30:.2f}" if held and need > held else ""


def _cells(total: Totals) -> tuple[str, ...]:
    """Memory, disk, time, GPU-hours, price and energy; empty cells if unknown."""
    seconds, hours, cost, kwh = (total["seconds"], total["gpu_hours"], total["cost"], total["kwh"])
    return (
        f"{total['memory_gib']:.2f}", f"{total['output_gib']:.2f}", "" if seconds is None else clock(seconds),
        f"{hours:.2f}" if hours else "",
        "" if cost is None else f"{cost:.2f} {total['currency']}", "" if kwh is None else f"{kwh:.3f}",
    )  # fmt: skip


def _without_digests(reason: str, stale: Sequence[str]) -> str:
    """A reason in which inputs that this plan makes anew are named once: ``because sft changes``."""
    parts, made = list[str](), dict[str, None]()
    for part in reason.split("; "):
        found = re.fullmatch(r"input \w+: ([^@ ]+)@\w+ -> \1@\w+", part)
        if found and found[1] in stale:
            made[found[1]] = None
        else:
            parts.append(part)
    changed = f"because {' and '.join(made)} change{'s' * (len(made) == 1)}"
    return "; ".join([*parts, *([changed] if made else [])])


def plan_table(
    plan: Plan, estimates: Mapping[str, Estimate] | None = None, scorings: Mapping[str, Scoring] | None = None
) -> str:
    """A line per stage with state and reason, then the estimates of the trainings and evaluations."""
    table = empty_table("stage", "state", "fingerprint", "reason")
    for planned in plan.stages:
        reason = _without_digests(planned.reason, [each.name for each in plan.stale])
        table.add_row(planned.name, planned.state, short(planned.fingerprint), reason)
    count = len(plan.stale)
    verdict = (
        f"{count} of {len(plan.stages)} stages to run"
        if count
        else f"nothing to do: all {len(plan.stages)} stages are finished"
    )
    head = f"pipeline {plan.pipeline.name}  store {relative(plan.pipeline.store)}"
    settings = empty_table("stage", "learning rate", "origin", "length", numbers=("learning rate",))
    for planned in plan.stale:
        if found := planned.hyperparameters:
            origin = re.sub(r"default of \w+", "default", found.learning_rate_reason)
            settings.add_row(planned.name, f"{found.learning_rate:g}", origin, found.length)
    kernels = [
        f"{planned.name}: {'; '.join(f'{name} by {choice}' for name, choice in planned.kernels.items())}"
        for planned in plan.stale if planned.kernels
    ]  # fmt: skip
    trained = plain_text(settings) if settings.rows else ""
    needed = [*_estimate_table(plan, estimates or {}, scorings or {}), *advice_lines(plan.advice)]
    parts = [head, plain_text(table), trained, "\n".join(kernels), *needed, "\n".join(plan.notes), verdict]
    return on_screen("\n\n".join(filter(None, parts)))


def run_dict(plan: Plan, seconds: dict[str, float], wall: float, mlflow_run_id: str | None) -> dict[str, object]:
    """The object that ``run --json`` prints: the plan with durations and metrics."""
    document = plan.to_dict()
    rows = document["stages"]
    assert isinstance(rows, list)
    for row, planned in zip(rows, plan.stages, strict=True):
        metrics = _manifest(plan, planned).metrics
        row["seconds"] = seconds.get(planned.name, 0.0)
        row["train_seconds"] = metrics.get("train_seconds", 0.0) if planned.name in seconds else 0.0
        row["metrics"] = metrics
    return {**document, "seconds": wall, "mlflow_run_id": mlflow_run_id}


def summary(
    plan: Plan, seconds: dict[str, float], wall: float, cli_args: Sequence[str], page: Path | None = None
) -> str:
    """The final report of a run: durations, findings, verdicts, what was measured, answers, and what to do next.

    Args:
        page: of the pipeline's model; None: there is none.
    """
    table = empty_table("stage", "time", "tokens/s", "output", numbers=("time", "tokens/s"))
    store = plan.pipeline.store
    is_far = relative(store) == str(store.absolute())
    for planned in plan.stages:
        speed = _manifest(plan, planned).metrics.get("tokens_per_second")
        took = clock(seconds[planned.name]) if seconds.get(planned.name) else "reused"  # 0: another run made it
        output = plan.entry(planned).output
        shown = str(output.relative_to(store)) if is_far and output.is_relative_to(store) else relative(output)
        table.add_row(planned.name, took, f"{speed:,.0f}" if speed else "", shown)
    parts = [*([f"store {store}"] if is_far else []), plain_text(table)]
    if not plan.stale:
        parts.append(f"nothing to do: all {len(plan.stages)} stages are finished ({wall:.1f} s)")
    else:
        ran = sum(1 for took in seconds.values() if took)
        others = f", {len(plan.stale) - ran} made by another run meanwhile" if ran < len(plan.stale) else ""
        parts.append(f"{plan.pipeline.name}: {ran} of {len(plan.stages)} stages run in {wall:.1f} s{others}")
    parts += ["\n".join(lines)] if (lines := list(_findings(plan, seconds))) else []
    for planned in plan.stages:
        output, kind = plan.entry(planned).output, planned.stage.method.produces
        if kind == Kind.VERDICT and (output / VERDICT_TABLE).exists():
            parts.append((output / VERDICT_TABLE).read_text())
        elif kind == Kind.REPORT and (output / METRICS_FILE).exists():
            slots = [slot for slot in planned.stage.inputs if slot not in planned.stage.method.consumes]
            parts += _measured(output, slots)
    pages = {"page": f"{relative(page)}{_beside_others(plan)}" if page else "", "lineage": _lineage_page(plan)}
    parts += ["\n".join(found)] if (found := [f"{name:<7}  {place}" for name, place in pages.items() if place]) else []
    parts.append(_next(plan, seconds, cli_args))
    return on_screen("\n\n".join(part.rstrip() for part in parts))


def _beside_others(plan: Plan) -> str:
    """Whose page it is, where the outputs beside it are of another run: of the pipeline as it is declared."""
    for planned in plan.stages:
        if planned.stage.method.produces in MODELS:
            viewed = _viewed(plan, planned)
            if viewed and viewed.fingerprint != planned.fingerprint:
                return f" (of this run; {planned.name} beside it is the declared pipeline's)"
    return ""


def _viewed(plan: Plan, planned: PlannedStage) -> Manifest | None:
    """What a stage of the declared pipeline has made; None: nothing yet."""
    return Entry(View(plan.pipeline.store, plan.pipeline.name).place(planned.name)).readable_manifest()


def _findings(plan: Plan, seconds: Mapping[str, float]) -> Iterator[str]:
    """A line per finding of ``diagnose`` on a training that this run made."""
    for planned in plan.stages:
        if isinstance(planned.stage.method, Training) and seconds.get(planned.name):
            for finding in live_findings(plan.entry(planned).path):
                yield f"diagnose {planned.name}: {as_line(finding)}"


def _measured(output: Path, slots: Sequence[str]) -> Iterator[str]:
    """The measures of a report that matter most, and a few questions with answers before and after."""
    metrics = json.loads((output / METRICS_FILE).read_text(encoding="utf-8"))
    names = [slot for slot in slots if any(key.startswith(f"{slot}/") for key in metrics)]
    columns = list(shown_columns(metrics, names[0]).items())[:_MOST_COLUMNS]
    titles = [re.sub(r" \(.*\)|, .* (?=[↑↓])", "", title) for _, (title, _) in columns]
    table = empty_table("model", *titles, numbers=tuple(titles))
    for name in names:
        values = (f"{metrics[f'{name}/{key}']:.{digits}f}" for key, (_, digits) in columns)
        table.add_row(name, *values)
    yield plain_text(table)
    if compared := _compared(output, dict(zip([key for key, _ in columns], titles, strict=True)), names[0], names[-1]):
        yield compared
    if further := own_rows(metrics, names):
        table = empty_table(OWN_TITLE, *names, numbers=tuple(names))
        for row in further:
            table.add_row(*row)
        yield plain_text(table)
    if failed := read_failed(output):
        yield "\n".join(f"failed {name}: {_one_line(why)}" for name, why in failed.items())
    if (output / ANSWERS_FILE).exists() and len(names) > 1:
        rows = read_jsonl(output / ANSWERS_FILE, _asked)
        ended = [name for name in names[:-1] if metrics.get(f"{name}/unfinished_share", 0) < 1]
        before, after = (ended or names)[0], names[-1]
        known = [row for row in rows if RIGHT in row[1]] or rows
        yield "\n".join(line for row in known[:_MOST_ANSWERS] for line in _answers(*row, before, after))
    yield f"all measures and samples: {relative(output / TABLE_FILE)}"


def _compared(output: Path, titles: Mapping[str, str], before: str, after: str) -> str:
    """In which measures a model is better than another, by their 95 % intervals; empty: there is nothing to compare."""
    from tasks.gate import Gate
    from tasks.gate.bootstrap import Bootstrap

    if before == after or not (output / SCORES_FILE).exists():
        return ""
    by_row, bootstrap = read_scores(output), Bootstrap(confidence=0.95, num_resamples=1000, seed=0)
    found: dict[str, list[str]] = {"better": [], "worse": [], "no clear difference": [], "too few rows to tell": []}
    for key, title in titles.items():
        if (scores := by_row.get(key)) and {before, after} <= scores.scores.keys():
            gain = bootstrap.estimate([scores], after, before)
            unclear = "no clear difference" if gain.num_groups >= Gate.min_rows else "too few rows to tell"
            outcome = "better" if gain.low > 0 else "worse" if gain.high < 0 else unclear
            found[outcome].append(f"{title[:-2]} ({len(scores.row_ids):,} rows)")
    parts = [f"{outcome}: {', '.join(names)}" for outcome, names in found.items() if names]
    return f"{after} beside {before}: {'; '.join(parts)}" if parts else ""


def _asked(prompt: Sequence[Mapping[str, str]], **answers: str) -> tuple[str, Mapping[str, str]]:
    return named_images(prompt[-1]["content"]), answers


def _answers(question: str, answers: Mapping[str, str], before: str, after: str) -> Iterator[str]:
    right = answers.get(RIGHT)
    shown = [before, after, *([RIGHT] if right is not None and answers[after].strip() != right.strip() else [])]
    yield _one_line(question)
    for name in shown:
        mark = "  (right)" if right is not None and answers[name].strip() == right.strip() and name != RIGHT else ""
        yield f"  {name:<{max(map(len, shown))}}  {_one_line(answers[name]) or '(nothing)'}{mark}"


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MOST_SHOWN else line[: _MOST_SHOWN - 1] + "…"


def _lineage_page(plan: Plan) -> str:
    """Writes the page that draws what the last stage was made from; empty where the store cannot be written."""
    last = next((each for each in plan.stages if each.stage.method.produces == Kind.REPORT), plan.stages[-1])
    path = View(plan.pipeline.store, plan.pipeline.name).root / "lineage.html"
    try:
        with Index(plan.pipeline.store) as index:
            graph = ancestry(index, node_key(last.name, last.fingerprint))
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, render(graph.to_dict(last.name)))
    except OSError:
        return ""
    return relative(path)


def _next(plan: Plan, seconds: Mapping[str, float], cli_args: Sequence[str]) -> str:
    """Three commands to try: talk with the last model, plan its last training with half the learning rate, look."""
    cli_args = without_project(cli_args)
    store = [word for word in cli_args if word.startswith("store=")]
    models = [planned for planned in plan.stages if planned.stage.method.produces == Kind.CHECKPOINT]
    trained = [planned for planned in plan.stages if isinstance(planned.stage.method, Training)]
    commands = []
    if models:
        last = models[-1]
        viewed = _viewed(plan, last)
        is_named = viewed.fingerprint == last.fingerprint if viewed else seconds.get(last.name)
        digits = "" if is_named else f"@{short(last.fingerprint)[:8]}"  # the stage's name means another
        commands.append(["chat", last.name + digits, *store])
    change = []
    if trained:
        rate = trained[-1].stage.method.recipe()["learning_rate"]
        change = [f"stages.{trained[-1].name}.method.learning_rate={float(str(rate)) / 2:g}"]
    commands += [["plan", *cli_args, *change], ["ui", *store]]
    return "\n".join(["next:", *(f"  posttrain {shlex.join(arguments)}" for arguments in commands)])


def _manifest(plan: Plan, planned: PlannedStage) -> Manifest:
    manifest = plan.entry(planned).manifest()
    assert manifest is not None
    return manifest
