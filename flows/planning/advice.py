"""Values of a plan outside the ranges of ``tasks.judgement.advice``, which ``advice=strict`` refuses.

Only values that the user has set are compared: what we ship has its own reasons.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import yaml

from flows.declare.pipeline import Pipeline
from flows.declare.project import project_files
from flows.planning.model_checks import root_of
from flows.planning.staleness import Hyperparameters
from lineage.artifact import MODELS
from lineage.errors import ConfigError
from tasks.judgement.advice import RATIO, TRAIN_SHARE, VALIDATION_BATCH, WARMUP, Finding, findings_of

COMMAND_LINE = "command line"
# Field of the ranges -> the ends of keys that set it, unless that is the end of its own name.
_SET_BY: Mapping[str, tuple[str, ...]] = {
    RATIO: ("alpha", "rank"), TRAIN_SHARE: ("held_out",), VALIDATION_BATCH: ("micro_batch_size",),
    WARMUP: ("warmup", "warmup_ratio"), "method.schedule.name": ("schedule", "schedule.name", "lr_schedule"),
    "method.optimizer.name": ("optimizer", "optimizer.name"), "method.num_epochs": ("num_epochs", "num_steps"),
    "method.quantization.format": ("quantization", "format"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Values outside their ranges, in stages that would run.

    Args:
        found: stage and finding; those outside a permissible range first.
    """

    found: tuple[tuple[str, Finding], ...] = ()

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
    """One line for the plan: the worst finding, and how many more there are; empty: there is none."""
    if not advice.found:
        return []
    (stage, worst), *others = advice.found
    of_stage = f" {stage}" if {name for name, _ in advice.found} == {stage} else ""
    more = f"; and {len(others)} more: posttrain advise{of_stage}" if others else ""
    return [f"advice: {stage}: {worst}{more}"]


def advice_of(pipeline: Pipeline, stages: Mapping[str, Hyperparameters | None]) -> Advice:
    """Compares the stages that would run with the ranges.

    Args:
        stages: name -> hyperparameters; None: it does not train.

    Raises:
        ConfigError: ``advice=strict``, and a value is outside its range.
    """
    if pipeline.advice == "off":
        return Advice()
    found, is_set = list[tuple[str, Finding]](), set_fields(pipeline)
    for name, length in stages.items():
        if is_from_scratch(pipeline, name):  # the ranges are for pretrained models
            continue
        rows, steps, epochs = (length.num_rows, length.num_steps, length.num_epochs) if length else (None, None, None)
        stage = pipeline.stages[name]
        outside = findings_of(stage.method, stage.resources, rows, steps, epochs)
        found += [(name, each) for each in outside if is_set(name, each.field) and not _is_memorys(each)]
    found.sort(key=lambda each: (each[1].bound != "permissible", each[1].field.startswith("resources.")))
    if found and pipeline.advice == "strict":
        lines = "\n".join(f"  {stage}: {finding}" for stage, finding in found)
        raise ConfigError(
            f"advice=strict, and these values are outside their ranges:\n{lines}\nset values inside them (posttrain "
            "advise prints some), or advice=warn"
        )
    return Advice(found=tuple(found))


def _is_memorys(finding: Finding) -> bool:
    """Whether the value changes no model, and the memory of the machine decides it better than a range does."""
    return finding.field == "resources.micro_batch_size" and finding.bound == "recommended"


def set_fields(pipeline: Pipeline) -> Callable[[str, str], bool]:
    """Whether the user has set a field of a stage: by an override, or in a file of their own."""
    if pipeline.overrides is None:
        return lambda stage, field: True
    keys = origins(pipeline, own=True).keys()

    def is_set(stage: str, field: str) -> bool:
        ends = _SET_BY.get(field, (field.rpartition(".")[2],))
        of_stage = (key for key in keys if not key.startswith("stages.") or key.startswith(f"stages.{stage}."))
        return any(f".{key}".endswith(tuple(f".{end}" for end in ends)) for key in of_stage)

    return is_set


def origins(pipeline: Pipeline, *, own: bool = False) -> dict[str, str]:
    """Key of a value -> what set it: ``command line``, or the name of a file.

    Args:
        own: leave the shipped files out.
    """
    from flows.declare.config import CONF, composed_files, field_of, parsed  # not for `status`: it imports hydra

    found, folder = dict[str, str](), pipeline.config_dir.resolve() if pipeline.config_dir else None
    files = composed_files(pipeline.overrides or (), pipeline.config_dir) if folder or not own else ()
    for path, package in files:
        is_own = folder is not None and path.is_relative_to(folder)
        if is_own or not own:
            name = str(path.relative_to(folder.parent if folder and is_own else CONF.parent))
            found |= dict.fromkeys(_leaves(package, yaml.safe_load(path.read_text(encoding="utf-8"))), name)
    for word in pipeline.overrides or ():
        found |= dict.fromkeys(_leaves(field_of(word), parsed(word).value()), project_files.get(word, COMMAND_LINE))
    return found


def _leaves(key: str, value: object) -> Iterator[str]:
    """The keys of values below a key."""
    if not isinstance(value, Mapping):
        yield key
        return
    for name, each in value.items():
        yield from _leaves(f"{key}.{name}".removeprefix("."), each)


def is_from_scratch(pipeline: Pipeline, name: str) -> bool:
    """Whether a stage reads models, all of which start from random weights."""
    stage = pipeline.stages[name]
    consumes = stage.method.consumes
    models = [ref for slot, ref in stage.inputs.items() if consumes.get(slot, consumes.get("*")) in MODELS]
    return bool(models) and not any(pipeline.is_source(root_of(pipeline, each)) for each in models)
