"""A pipeline: stages, sources and settings, and the order of execution."""

import graphlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Literal

from flows.declare.operation import Alias, Operation, Retrain, Schedule, Tracking, Trigger, strict
from flows.declare.sweep import Sweep
from lineage.artifact import ALIAS, DATA, SOURCE, Kind, Source
from lineage.errors import ConfigError
from lineage.record.verdict import Approval
from lineage.source.sources import never_changes
from lineage.store import RESERVED
from tasks.context import Precision, Resources
from tasks.gate.rule import CANDIDATE
from tasks.method import Adapter, Method, Optimizer, Quantization
from tasks.method import Schedule as LearningRate
from tasks.recipe import without_verdict
from tasks.train.compatibility import check_compatible

Upstream = Mapping[str, Sequence[str]]  # stage -> the stages that it reads


def execution_order(upstream: Upstream, data: Collection[str], training: Collection[str]) -> list[str]:
    """Stage names in execution order.

    Args:
        data, training: the stages that produce rows, and those that train.

    Raises:
        ConfigError: the stages form a cycle.
    """
    try:
        graphlib.TopologicalSorter(upstream).prepare()
    except graphlib.CycleError as error:
        cycle = " -> ".join(reversed(error.args[1]))
        raise ConfigError(
            f"the stages form a cycle: {cycle} (each needs the next); "
            "change one of their inputs so that every chain ends at a source"
        ) from error
    first, trained = roots(upstream), set(training)
    needs = {name: before(name, upstream, first, data, trained) for name in upstream}
    return list(graphlib.TopologicalSorter({name: sorted(needs[name]) for name in upstream}).static_order())


def roots(upstream: Upstream) -> set[str]:
    """The stages that read only sources."""
    return {name for name, read in upstream.items() if not read}


def before(
    name: str, upstream: Upstream, first: Collection[str], data: Collection[str], training: Collection[str]
) -> set[str]:
    """The stages that a stage waits for: those that it reads, and all that read only sources, to find bad rows first.

    A training stage also waits for all other data, unless that data depends on the stage.

    Args:
        first: the roots.
    """
    if not upstream[name]:
        return set()
    rows = (
        {other for other in data if name not in ancestors_of(other, upstream)} - {name} if name in training else set()
    )
    return {*upstream[name], *first, *rows}


def ancestors_of(name: str, upstream: Upstream) -> set[str]:
    """All ancestors of a stage."""
    return {other for parent in upstream[name] for other in (parent, *ancestors_of(parent, upstream))}


CodeDrift = Literal["warn", "rerun", "refuse"]
Advise = Literal["warn", "strict", "off"]

_NO_PAIRS = {
    (Kind.PREFERENCES, Kind.UNPAIRED): (
        "; a stage with conf/stage/unpair.yaml splits pairs into single answers: "
        "+stage@stages.unpaired.method=unpair stages.unpaired.inputs.pairs=<preferences>"
    ),
    (Kind.UNPAIRED, Kind.PREFERENCES): "; single answers have no pairs, so that kto alone trains on them",
}
_MODELS = "model=DIRECTORY, model=owner/name, or model=tiny, a small one made from scratch"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A method placed in a pipeline.

    Args:
        inputs: slot -> name of a stage, or of a source if no stage has that name; ``source:NAME`` always names a
            source.
        notes: messages on how ``auto`` values were resolved.
        choices: alternatives of ``adapter=auto`` by name, in order of preference; the plan takes the first that fits.
        given: fields of the method that a file or an override sets, the default or another value.
    """

    method: Method
    inputs: Mapping[str, str]
    resources: Resources
    notes: tuple[str, ...] = ()
    given: frozenset[str] = field(default=frozenset(), compare=False)
    choices: "Mapping[str, Stage]" = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A checked graph of stages; creating an invalid one raises ``ConfigError``.

    Args:
        aliases: settings of aliases; an alias that is not listed is not commercial.
        non_commercial_labels: glob patterns of labels.
        accept_label_drop: stages that may train less than half the share of tokens of the last time.
        restart: stages that start from step 0 although they have checkpoints.
        because: stage -> the finding that its settings follow: ``RULE:STAGE@FINGERPRINT`` of ``diagnose``.
        operation: schedule, triggers and retraining.
        advice: whether values outside the ranges of ``tasks.judgement.advice`` are reported or refused.
        overrides, config_dir: that it was composed with; None: it was not composed.
    """

    name: str
    store: Path
    code_drift: CodeDrift
    tracking: Tracking
    sources: Mapping[str, Source]
    stages: Mapping[str, Stage]
    aliases: Mapping[str, Alias] = field(default_factory=dict)
    non_commercial_labels: tuple[str, ...] = ()
    accept_label_drop: tuple[str, ...] = ()
    restart: tuple[str, ...] = ()
    because: Mapping[str, str] = field(default_factory=dict)
    operation: Operation = field(default_factory=Operation)
    advice: Advise = "warn"
    overrides: tuple[str, ...] | None = None
    config_dir: Path | None = None

    def __post_init__(self) -> None:
        for name in (self.name, *self.stages):
            if not _NAME.fullmatch(name) or name in RESERVED:
                raise ConfigError(
                    f"{name!r} is not a name for a pipeline or a stage: it names directories; "
                    f"letters, digits, '_', '-' and '.' are accepted, and not {' or '.join(RESERVED)}"
                )
        if not self.stages:
            raise ConfigError("the pipeline has no stages; declare at least one")
        for name, stage in self.stages.items():
            self._check_slots(name, stage)
            check_compatible(f"stages.{name}", stage.method, stage.resources)
        self._check_operation()
        self.order()

    def is_source(self, reference: str) -> bool:
        return reference.startswith(SOURCE) or reference not in self.stages

    def key(self, reference: str) -> str:
        """The canonical form of a reference: a stage's name, or ``source:NAME``."""
        return SOURCE + reference.removeprefix(SOURCE) if self.is_source(reference) else reference

    def used_sources(self) -> list[str]:
        """Names of the sources that stages read."""
        keys = {self.key(ref) for stage in self.stages.values() for ref in stage.inputs.values()}
        return sorted(key.removeprefix(SOURCE) for key in keys if key.startswith(SOURCE))

    def read_sources(self) -> list[str]:
        """Names of the sources that stages read, also in place of an alias that is unset."""
        named = [source.fallback for source in self.sources.values() if source.fallback]
        fallbacks = {each.removeprefix(SOURCE) for each in named if self.is_source(each)}  # others are stages
        return sorted({*self.used_sources(), *fallbacks & self.sources.keys()})

    def order(self) -> list[str]:
        """Stage names, each after the stages it waits for (ConfigError: the stages form a cycle)."""
        return list(self._order)

    def before(self, name: str) -> set[str]:
        """The stages that a stage waits for."""
        return before(name, self._upstream, self._roots, self._data, self._training)

    @cached_property
    def _order(self) -> list[str]:
        return execution_order(self._upstream, self._data, self._training)

    @cached_property
    def model_roots(self) -> dict[str, str]:
        """Stage -> the source (``source:NAME``) or stage that its model's config and tokenizer come from."""
        found: dict[str, str] = {}
        for name in self.order():
            policy = self.stages[name].inputs.get("policy", name)
            found[name] = found.get(policy) or self.key(policy)
        return found

    @cached_property
    def _upstream(self) -> dict[str, list[str]]:
        return {name: self.upstream(name) for name in self.stages}

    @cached_property
    def _roots(self) -> set[str]:
        return roots(self._upstream)

    @cached_property
    def _data(self) -> list[str]:
        return [name for name, stage in self.stages.items() if stage.method.produces in DATA]

    @cached_property
    def _training(self) -> list[str]:
        return [name for name, stage in self.stages.items() if stage.method.trains]

    def upstream(self, name: str) -> list[str]:
        """The stages whose outputs a stage reads."""
        return [ref for ref in self.stages[name].inputs.values() if not self.is_source(ref)]

    def _kind(self, reference: str) -> Kind:
        if self.is_source(reference):
            return self.sources[reference.removeprefix(SOURCE)].kind
        return self.stages[reference].method.produces

    def _references(self) -> Iterator[str]:
        yield from self.stages
        yield from (name if name not in self.stages else SOURCE + name for name in self.sources)

    def _check_operation(self) -> None:
        trigger, retrain = self.operation.trigger, self.operation.retrain
        read = self.read_sources()
        for name in trigger.sources if trigger else ():
            if name not in read:
                raise ConfigError(f"trigger.sources: no stage reads a source {name}; read are: {listed(name, read)}")
            if never_changes(self.sources[name]) or self.sources[name].path.startswith(ALIAS):
                raise ConfigError(
                    f"trigger.sources: {name} is {self.sources[name].path}, which never changes; name a "
                    "source that is a file, a directory, a glob, a URL, or a branch of the hub"
                )
        if retrain and retrain.promote not in self.stages:
            there = listed(retrain.promote, self.stages)
            raise ConfigError(f"retrain.promote={retrain.promote}: no such stage; there are: {there}")
        verdicts = [stage for stage in self.stages.values() if stage.method.produces == Kind.VERDICT]
        if retrain and not any(stage.inputs.get(CANDIDATE) == retrain.promote for stage in verdicts):
            raise ConfigError(
                f"retrain.promote={retrain.promote}: no gate has it as candidate, and nothing is promoted without a "
                f"verdict; add a gate with inputs.{CANDIDATE}={retrain.promote}, or name the candidate of a gate"
            )

    def _check_slots(self, name: str, stage: Stage) -> None:
        slots = stage.method.consumes
        where = f"stages.{name}.inputs"
        optional = stage.method.optional
        missing = [slot for slot in slots if slot != "*" and slot not in optional and slot not in stage.inputs]
        if missing:
            raise ConfigError(
                f"{where}: nothing fills {', '.join(missing)}; set {where}.{missing[0]}=<stage or source>"
            )
        if "*" in slots and "*" not in optional and not stage.inputs.keys() - slots.keys():
            raise ConfigError(f"{where}: no {slots['*']} is compared; add one by any name, such as {where}.sft=sft")
        try:
            stage.method.check_slots(frozenset(without_verdict(stage.inputs)))
        except ConfigError as error:
            raise ConfigError(f"stages.{name}: {error}") from error
        for slot, reference in stage.inputs.items():
            if slot not in slots and "*" not in slots:
                raise ConfigError(f"{where}.{slot}: unknown slot; accepted: {listed(slot, slots)}")
            if reference.removeprefix(SOURCE) not in self.sources and reference not in self.stages:
                there = listed(reference, self._references())
                base = f"; base is the model of model=: {_MODELS}" if reference == "base" else ""
                if name == "base" and reference == "corpus":  # model=tiny, whose model replaced the pipeline's
                    base = (
                        "; model=tiny is made from scratch on a corpus, and this pipeline has none: choose another "
                        "model by sources.base.path=MODEL, without model="
                    )
                raise ConfigError(f"{where}.{slot}={reference}: no such stage or source; there are: {there}{base}")
            expected = slots[slot] if slot in slots else slots["*"]
            self._check_kind(f"{where}.{slot}={reference}", reference, expected)

    def _check_kind(self, where: str, reference: str, expected: Kind) -> None:
        found = self._kind(reference)
        if found != expected:
            fitting = [name for name in self._references() if self._kind(name) == expected]
            raise ConfigError(
                f"{where}: {reference} gives {found}, this slot takes {expected}; "
                f"that is what {', '.join(fitting) or 'nothing here'} gives{_NO_PAIRS.get((found, expected), '')}"
            )


_MOST_LISTED = 12


def listed(word: object, names: Iterable[str]) -> str:
    """``a, b, c; did you mean b?``: the names that there are, and the one that is similar to a word, if any.

    Of many names those that are most similar, where one is.
    """
    there = list(names)
    lower = {name.lower(): name for name in there}
    close = get_close_matches(str(word).lower(), lower, n=1, cutoff=0.5)
    if close and len(there) > _MOST_LISTED:
        near = get_close_matches(str(word).lower(), lower, n=_MOST_LISTED // 2, cutoff=0.0)
        there = [*map(lower.__getitem__, near), f"and {len(there) - len(near)} more"]
    return f"{', '.join(there)}; did you mean {lower[close[0]]}?" if close else ", ".join(there)


def require_stage(pipeline: Pipeline, name: str) -> None:
    """Refuses a name that is no stage of a pipeline."""
    if name not in pipeline.stages:
        raise ConfigError(f"{name}: no such stage; there are: {listed(name, pipeline.stages)}")


@strict
class StageNode:
    """A stage as in YAML, before its method's class is known."""

    method: dict[str, object]
    inputs: dict[str, str]
    resources: dict[str, object]
    evaluation: dict[str, object] | None = None  # short for the method's


@strict
class GateDefaults:
    """Defaults of all gates of a pipeline."""

    approval: Approval


@strict
class TrainingDefaults:
    """Default fields of trainings, selected by ``preset=``.

    Args:
        every, sft: for all methods, and for SFT only.
        sft_adapter: for SFT with an adapter; replace those of ``sft``.
        adapter: fields of the LoRA of every training that has one; of a quantized base the dropout alone, whose rank
            and alpha the reference documents name apart.
    """

    every: dict[str, object]
    sft: dict[str, object]
    sft_adapter: dict[str, object]
    adapter: dict[str, object]


@strict
class ModelDefaults:
    """What a model is for every training: ``vlm`` sets ``images`` where a method has it."""

    kind: Literal["llm", "vlm"] | None = None


@strict
class Root:
    """The keys of ``conf/config.yaml`` with everything it composes.

    Args:
        adapter, quantization, optimizer, lr_schedule, save, precision, gate: defaults for every method with such a
            field.
    """

    name: str
    store: str
    code_drift: CodeDrift
    advice: Advise
    tracking: Tracking
    sources: dict[str, dict[str, object]]
    stages: dict[str, dict[str, object]]
    resources: Resources
    adapter: Adapter | None
    quantization: Quantization | None
    optimizer: Optimizer | None
    lr_schedule: LearningRate | None
    save: Literal["adapter"] | None
    precision: Precision | None
    model: ModelDefaults | None = None
    gate: GateDefaults
    training: TrainingDefaults
    aliases: dict[str, Alias]
    non_commercial_labels: tuple[str, ...]
    accept_label_drop: tuple[str, ...]
    restart: tuple[str, ...]
    because: dict[str, str]
    tags: tuple[str, ...]
    schedule: Schedule | None = None
    trigger: Trigger | None
    retrain: Retrain | None
    notify: str | None
    sweep: Sweep
