"""Values of a plan outside the ranges of ``tasks.judgement.advice``, which ``advice=strict`` refuses."""

from collections.abc import Mapping
from dataclasses import dataclass

from flows.declare.pipeline import Pipeline
from flows.planning.model_checks import root_of
from flows.planning.staleness import Hyperparameters
from lineage.artifact import MODELS
from lineage.errors import ConfigError
from tasks.judgement.advice import Finding, case_of, findings
from tasks.method import Method

_MOST = 6  # findings that a plan prints
_MOST_STAGES = 12


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Values outside their ranges, in stages that would run.

    Args:
        found: stage and finding; those outside a permissible range first.
        scratch: stages that train a model from random weights; the ranges are for pretrained ones.
    """

    found: tuple[tuple[str, Finding], ...] = ()
    scratch: tuple[str, ...] = ()

    def to_dict(self) -> list[dict[str, object]]:
        """The value of ``advice`` in ``plan --json``."""
        return [
            {
                "stage": stage, "field": finding.field, "value": finding.value, "bound": finding.bound,
                "accepted": finding.accepted, "source": finding.source,
            }
            for stage, finding in self.found
        ]  # fmt: skip


def advice_lines(advice: Advice) -> list[str]:
    """Lines for the plan: one per stage and field, up to ``_MOST``."""
    lines = [f"advice: {stage}: {finding}" for stage, finding in advice.found[:_MOST]]
    more = [stage for stage, _ in advice.found[_MOST:]]
    if more:
        of_stage = f" {more[0]}" if len({*more}) == 1 else ""
        lines.append(f"advice: and {len(more)} more: posttrain advise{of_stage}")
    if advice.scratch:
        num_more = len(advice.scratch) - _MOST_STAGES
        names = ", ".join(advice.scratch[:_MOST_STAGES]) + (f" and {num_more} more stages" if num_more > 0 else "")
        lines.append(f"advice: the ranges are for pretrained models; not compared, since made from scratch: {names}")
    return lines


def advice_of(pipeline: Pipeline, stages: Mapping[str, Hyperparameters | None]) -> Advice:
    """Compares the stages that would run with the ranges.

    Args:
        stages: name -> hyperparameters; None: it does not train.

    Raises:
        ConfigError: ``advice=strict``, and a value is outside its range.
    """
    if pipeline.advice == "off":
        return Advice()
    found, scratch = [], []
    for name, length in stages.items():
        if is_from_scratch(pipeline, name):
            scratch += [name] if length else []
            continue
        rows, steps, epochs = (length.num_rows, length.num_steps, length.num_epochs) if length else (None, None, None)
        stage = pipeline.stages[name]
        found += [(name, each) for each in findings(case_of(stage.method, stage.resources, rows, steps, epochs))]
    found.sort(key=lambda each: (each[1].bound != "permissible", each[1].field.startswith("resources.")))
    if found and pipeline.advice == "strict":
        lines = "\n".join(f"  {stage}: {finding}" for stage, finding in found)
        raise ConfigError(
            f"advice=strict, and these values are outside their ranges:\n{lines}\nset values inside them (posttrain "
            "advise prints some), or advice=warn"
        )
    return Advice(found=tuple(found), scratch=tuple(scratch))


def is_from_scratch(pipeline: Pipeline, name: str) -> bool:
    """Whether a stage reads models, all of which start from random weights."""
    stage = pipeline.stages[name]
    models = [stage.inputs[slot] for slot in stage.inputs if _kind(stage.method, slot) in MODELS]
    return bool(models) and not any(pipeline.is_source(root_of(pipeline, each)) for each in models)


def _kind(method: Method, slot: str) -> object:
    return method.consumes.get(slot, method.consumes.get("*"))
