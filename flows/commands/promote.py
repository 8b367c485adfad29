"""``posttrain promote``, ``rollback`` and ``gate-check``."""

import argparse
import json
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from flows.commands.arguments import add_json, add_overrides
from flows.reports.wording import relative
from lineage.errors import ConfigError
from lineage.fingerprint import short

if TYPE_CHECKING:
    from flows.declare.pipeline import Pipeline
    from flows.planning.plan import Plan, PlannedStage
    from flows.planning.staleness import PlannedInput
    from flows.promotion.promote import Moved
    from lineage.promotions import Event
    from tasks.evaluate.stubs import Stubs
    from tasks.recipe import Input


def add_promote(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ref", metavar="REF", help="a model: fingerprint, PIPELINE/STAGE, its path, alias:NAME")
    parser.add_argument("--alias", required=True, metavar="NAME", help="champion, production ...")
    parser.add_argument("--why", default="", metavar="TEXT", help="kept with the promotion")
    parser.add_argument("--force", action="store_true", help="without a passing verdict; that is recorded")


def run_promote(options: argparse.Namespace) -> int:
    from flows.declare.config import load_pipeline
    from flows.promotion.promote import promote
    from lineage.store import require_store

    pipeline = load_pipeline(options.overrides, options.config_dir)
    require_store(pipeline.store)
    moved = promote(pipeline, options.ref, options.alias, why=options.why, force=options.force)
    _report(pipeline, moved, as_json=options.json)
    return 0


def add_rollback(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--alias", required=True, metavar="NAME", help="champion, production ...")
    parser.add_argument("--why", default="", metavar="TEXT", help="kept with the rollback")


def run_rollback(options: argparse.Namespace) -> int:
    from flows.declare.config import load_pipeline
    from flows.promotion.promote import roll_back
    from lineage.store import require_store

    pipeline = load_pipeline(options.overrides, options.config_dir)
    require_store(pipeline.store)
    _report(pipeline, roll_back(pipeline, options.alias, why=options.why), as_json=options.json)
    return 0


def add_gate_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="PIPELINE", nargs="?", default="", help="default: that of the project")
    add_overrides(parser)
    add_json(parser)


def run_gate_check(options: argparse.Namespace) -> int:
    """Returns 0 if every rule passes the right answers and refuses the wrong ones.

    Raises:
        ConfigError: a rule does not, or the pipeline has no gate.
    """
    from flows.declare.config import load_pipeline
    from flows.reports.wording import empty_table, plain_text

    chosen = [f"pipeline={options.name}"] if options.name else []
    pipeline = load_pipeline([*chosen, *options.overrides], options.config_dir)
    with redirect_stdout(sys.stderr):  # stdout is the command's own, and metrics may print
        found = _check_gates(pipeline)
    if options.json:
        print(json.dumps({"pipeline": pipeline.name, "rules": [asdict(each) for each in found]}, indent=2), flush=True)
    else:
        table = empty_table("gate", "rule", "metric", "known answers", "result")
        for each in found:
            values = ", ".join(f"{stub} {value:.4g}" for stub, value in each.values.items())
            table.add_row(each.gate, each.rule, each.metric, values, each.error or each.untested or "tested")
        print(plain_text(table), flush=True)
    wrong = [each for each in found if each.error]
    if wrong:
        raise ConfigError("; ".join(f"stages.{each.gate}.method.{each.error}" for each in wrong))
    return 0


_ROWS = ("text", "conversations", "pairs", "unpaired", "prompts")


@dataclass(frozen=True, kw_only=True)
class Checked:
    """One rule of a gate.

    Args:
        values: stub -> what the metric gives it.
        untested: why no known answers can be put through its metric; empty: they were.
        error: the fault that they showed; empty: none.
    """

    gate: str
    rule: str
    metric: str
    values: Mapping[str, float] = field(default_factory=dict)
    untested: str = ""
    error: str = ""


def _check_gates(pipeline: "Pipeline") -> list[Checked]:
    """Puts the stubs through the metrics and rules of each gate.

    The stubs are those of the finished evaluation; else they answer the held-out rows, and where their data stages have
    not run, rows that are made up.

    Raises:
        ConfigError: the pipeline has no gate.
    """
    from flows.planning.plan import make_plan
    from tasks.evaluate.stubs import Stubs
    from tasks.gate import Gate

    plan = make_plan(pipeline)
    gates = [each for each in plan.stages if isinstance(each.stage.method, Gate)]
    if not gates:
        raise ConfigError(
            f"{pipeline.name} has no gate; a pipeline with one, as cpt-sft-dpo-gated, is accepted; name it"
        )
    found = []
    for gate in gates:
        method = gate.stage.method
        assert isinstance(method, Gate)
        stubs = _stubs_of(plan, gate.inputs["report"])
        rules = [
            pair for name, rule in method.rules.items()
            for pair in (rule.of_each(name, stubs.scores if stubs else ()) or {name: rule}).items()
        ]  # fmt: skip
        for name, rule in rules:
            scores = stubs.scores.get(rule.metric) if stubs else None
            why = stubs.untested.get(rule.metric, "no stub is known for it") if stubs else "its report is unknown"
            values, error = {stub: scores.value(stub) for stub in scores.scores} if scores else {}, ""
            known = Stubs(scores={rule.metric: scores} if scores else {}, untested=stubs.untested if stubs else {})
            try:
                method.require_tested(known, only=name.partition("/")[0])
            except ConfigError as refused:
                error = str(refused)
            untested = "" if scores else why
            found.append(
                Checked(gate=gate.name, rule=name, metric=rule.metric, values=values, untested=untested, error=error)
            )
    return found


def _stubs_of(plan: "Plan", report: "PlannedInput") -> "Stubs | None":
    """The stubs of an evaluation; None: the report is of another method, or of another pipeline."""
    from tasks.evaluate import Evaluate
    from tasks.evaluate.stubs import Stubs

    if report.source is not None:
        return Stubs.read(plan.path_of(report))
    planned = plan.stage(report.name)
    if planned.state == "reuse" and (stubs := Stubs.read(plan.path_of(report))):
        return stubs
    return _made(plan, planned) if isinstance(planned.stage.method, Evaluate) else None


def _made(plan: "Plan", planned: "PlannedStage") -> "Stubs":
    from tasks.evaluate import Evaluate
    from tasks.evaluate.rows import words_of_rows
    from tasks.reward_functions import scorers
    from tasks.reward_functions.metric import rewards_of

    method = planned.stage.method
    assert isinstance(method, Evaluate)
    rows = words_of_rows(
        {slot: _finished(plan, slot, planned.inputs[slot]) for slot in _ROWS if slot in planned.inputs},
        num_rows=method.num_rows, num_prompts=method.num_prompts,
        num_questions=method.num_questions or method.num_prompts, seed=method.seed,
    )  # fmt: skip
    own = {each.name: each for each in scorers(rewards_of(method.own_metrics), _Words(), "metrics")}
    functions = scorers(method.rewards or {}, _Words())
    benchmarks = method.benchmarks(local=True)
    return method.stubs(rows, None, own, functions, frozenset(planned.inputs), benchmarks)


class _Words:
    """Counts words, where there is no tokenizer yet."""

    def __call__(self, text: str, **_options: object) -> dict[str, list[str]]:
        return {"input_ids": text.split()}


def _finished(plan: "Plan", slot: str, rows: "PlannedInput") -> "Input | None":
    """Rows that are prepared; None: their stage has not run."""
    from tasks.data.kinds import HELD_OUT
    from tasks.evaluate import Evaluate
    from tasks.recipe import Input

    path = plan.path_of(rows)
    is_there = (rows.entry is not None or rows.source is None) and (path / HELD_OUT).is_file()
    if not is_there or (rows.source is None and plan.stage(rows.name).state != "reuse"):
        return None
    return Input(name=rows.name, kind=Evaluate.consumes[slot], fingerprint=rows.fingerprint, path=path)


def _report(pipeline: "Pipeline", moved: "Moved", *, as_json: bool) -> None:
    """Mirrors the alias in MLflow's registry and prints what was done; MLflow's errors do not undo the move."""
    from flows.progress.tracking import mirror_alias

    model = f"{moved.manifest.stage}@{short(moved.manifest.fingerprint)}"
    mirror_alias(pipeline, moved.alias)
    if as_json:
        print(json.dumps(_moved_dict(moved, model), indent=2))
        return
    before = _name(moved.before)
    if moved.event is None:
        print(f"alias {moved.alias} names {model} already: {relative(moved.entry.output)}")
        return
    forced = " (forced: no passing verdict)" if moved.event.forced else ""
    print(f"alias {moved.alias}: {before or 'nothing'} -> {model}{forced}: {relative(moved.entry.output)}")
    if moved.event.action == "promote":
        print("\n".join([*(f"  passed {each}" for each in moved.event.rules), *map(_eased, moved.event.eased)]))


def _moved_dict(moved: "Moved", model: str) -> dict[str, object]:
    event = moved.event
    return {
        "alias": moved.alias,
        "action": event.action if event else None,
        "model": model,
        "fingerprint": moved.manifest.fingerprint,
        "output": str(moved.entry.output),
        "before": _name(moved.before),
        "verdict": event.verdict if event else None,
        "forced": event.forced if event else False,
        "rules": event.rules if event else [],
        "eased": event.eased if event else [],
        "labels": event.labels if event else [],
        "who": event.who if event else None,
        "why": event.why if event else None,
    }


def _eased(rule: str) -> str:
    return f"  refused before by a rule that is gone or less strict now, as the pipeline's file declares: {rule}"


def _name(event: "Event | None") -> str | None:
    return f"{event.stage}@{short(event.fingerprint)}" if event else None
