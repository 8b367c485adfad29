"""The plan: which stages run, which are reused, and why. Runs nothing, imports no heavy library."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from flows.declare.pipeline import Pipeline, Stage
from flows.planning.adapter_choice import choose_adapters
from flows.planning.advice import Advice, advice_of
from flows.planning.aliases import Champion, check_fallbacks, resolve_champions
from flows.planning.checks import (
    batch_notes,
    check_benchmarks,
    check_data,
    check_evaluations,
    check_frozen_models,
    check_gates,
    check_images,
    check_kernels,
    check_metrics,
    check_positions,
    check_row_kinds,
    left_out_notes,
    text_part_notes,
    token_notes,
)
from flows.planning.model_checks import (
    awaited_weights,
    check_merges,
    check_models,
    check_replay,
    check_same_split,
    check_store,
)
from flows.planning.staleness import (
    Hyperparameters,
    PlannedInput,
    State,
    examples_file,
    hyperparameters,
    restarts,
    state_of,
)
from lineage.artifact import QUICKSTART, SOURCE, Kind, Source
from lineage.errors import PipelineError
from lineage.filesystem.digest import DigestCache
from lineage.fingerprint import fingerprint
from lineage.record.metrics_file import CHECKPOINT_SCORES_FILE
from lineage.source.sources import pin
from lineage.store import DATA_REPORT, Entry, Store, is_store
from tasks.context import Launcher, Resources
from tasks.data.kinds import TRAIN
from tasks.evaluate.evaluate import Evaluate
from tasks.judgement.check_rows import POLICY, rows_slot
from tasks.judgement.estimate import GRAPHS, kernels_in_use
from tasks.method import Method, Training
from tasks.teacher_answers import TeacherAnswers
from tasks.train.evaluation import asked_beside, failed_scores, failure_lines


def used_resources(method: Method, resources: Resources) -> Resources:
    """The resources of a stage as its method uses them."""
    if method.cluster_workers == "all":
        return resources
    moves = method.cluster_workers == "one" and resources.on_cluster and os.environ.get("RAY_ADDRESS")
    here = Launcher.FOREGROUND if resources.launcher == Launcher.FOREGROUND else Launcher.PROCESS
    launcher = Launcher.CLUSTER if moves else here
    return replace(resources, num_workers=1, num_nodes=1, min_workers=None, launcher=launcher)


@dataclass(frozen=True, kw_only=True)
class PlannedStage:
    """One stage with its fingerprint and state."""

    name: str
    stage: Stage
    fingerprint: str
    inputs: Mapping[str, PlannedInput]
    state: State
    reason: str
    code_digest: str
    rerun_drifted: bool  # finished outputs of other code are not accepted
    restart: bool = False  # start from step 0 despite checkpoints
    examples: Path | None = None  # file with the number of examples of its rows; None: it trains on no examples
    hyperparameters: Hyperparameters | None = None  # None: it does not train

    @property
    def kernels(self) -> dict[str, str]:
        """What a training on a GPU computes with, and why; what answers prompts there in other stages."""
        method, resources = self.stage.method, self.stage.resources
        if isinstance(method, Evaluate | TeacherAnswers):
            return {"answers": GRAPHS} if resources.gpus_per_worker else {}
        return kernels_in_use(method, resources) if isinstance(method, Training) else {}

    @property
    def resources(self) -> Resources:
        """Its resources as it uses them: a method that does not divide its work has one worker."""
        return used_resources(self.stage.method, self.stage.resources)

    @property
    def row_processes(self) -> int:
        """Processes of a cluster that convert or tokenize its rows, on all CPUs of its resources."""
        return self.stage.resources.num_workers * self.stage.resources.cpus_per_worker

    @property
    def asks(self) -> tuple[int, int]:
        """CPUs and GPUs of all its workers, and of what scores its checkpoints."""
        resources, beside = self.resources, asked_beside(self.stage.method)
        workers = resources.num_workers
        gpus = workers * resources.gpus_per_worker if self.stage.method.uses_gpu else 0
        return workers * resources.cpus_per_worker + beside[0], gpus + beside[1]

    @property
    def needs(self) -> tuple[int, int]:
        """CPUs and GPUs that it takes on this machine; 0 for work on another cluster."""
        return (0, 0) if self.runs_elsewhere else self.asks

    @property
    def runs_elsewhere(self) -> bool:
        """Whether its workers run on a cluster that is not started here."""
        return self.resources.on_cluster and bool(os.environ.get("RAY_ADDRESS"))

    @property
    def pool(self) -> tuple[str, int] | None:
        """The GPU pool that it uses and the number of slots, at least one."""
        pool = self.stage.resources.gpu_pool
        return (pool, max(1, self.asks[1])) if pool and self.stage.method.uses_gpu else None

    @property
    def upstream(self) -> list[str]:
        return [entry.name for entry in self.inputs.values() if entry.source is None]

    def is_finished(self, entry: Entry) -> bool:
        """Whether the store holds an output that this plan accepts."""
        manifest = entry.manifest() if entry.is_finished() else None
        mine = [self.code_digest]
        return manifest is not None and not (self.rerun_drifted and manifest.provenance.code_digests != mine)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every stage of a pipeline in execution order.

    Args:
        notes: messages on other decisions.
        advice: values outside the recommended ranges.
        home: the store that it reads and that records its runs; a rehearsal writes its outputs to another one.
    """

    pipeline: Pipeline
    stages: list[PlannedStage]
    home: Path
    notes: list[str] = field(default_factory=list)
    advice: Advice = Advice()

    @property
    def stale(self) -> list[PlannedStage]:
        """The stages that have to run."""
        return [planned for planned in self.stages if planned.state != "reuse"]

    def stage(self, name: str) -> PlannedStage:
        return next(planned for planned in self.stages if planned.name == name)

    def waits(self, planned: PlannedStage) -> set[str]:
        """The stages that a stage waits for."""
        return self.pipeline.before(planned.name)

    def path_of(self, input_: PlannedInput) -> Path:
        """Path of an input: a stage's output, or the path or hub id of a source."""
        if input_.entry:
            return input_.entry.output
        if input_.source is None:
            return self.entry(self.stage(input_.name)).output
        return Path(input_.source.path).expanduser()

    def entry(self, planned: PlannedStage) -> Entry:
        return Store(self.pipeline.store).entry(planned.name, planned.fingerprint)

    def to_dict(self) -> dict[str, object]:
        """The object that ``plan --json`` prints."""
        return {
            "pipeline": self.pipeline.name,
            "store": str(self.pipeline.store),
            "stages": [self._row(planned) for planned in self.stages],
            **({"notes": self.notes} if self.notes else {}),
            **({"advice": self.advice.to_dict()} if self.advice.found else {}),
        }

    def _row(self, planned: PlannedStage) -> dict[str, object]:
        return {
            "stage": planned.name,
            "method": planned.stage.method.name(),
            "fingerprint": planned.fingerprint,
            "state": planned.state,
            "reason": planned.reason,
            "inputs": {slot: entry.fingerprint for slot, entry in planned.inputs.items()},
            "output": str(self.entry(planned).output),
            **(planned.hyperparameters.to_dict() if planned.hyperparameters else {}),
            **({"kernels": planned.kernels} if planned.kernels else {}),
        }


@dataclass(frozen=True, kw_only=True)
class Memo:
    """A cache of lookups that several plans share."""

    sources: dict[tuple[str, Source], PlannedInput] = field(default_factory=dict)
    stages: dict[tuple[str, str], tuple[State, str, str]] = field(default_factory=dict)
    codes: dict[type[Method], str] = field(default_factory=dict)

    def code_of(self, method: Method) -> str:
        """Digest of a method's code, cached per class, except for methods with reward functions of their own."""
        if getattr(method, "rewards", None) or getattr(method, "metrics", None):
            return method.code_digest()
        if type(method) not in self.codes:
            self.codes[type(method)] = method.code_digest()
        return self.codes[type(method)]


def make_plan(pipeline: Pipeline, memo: Memo | None = None, placed: Mapping[str, Champion] | None = None) -> Plan:
    """Fingerprints every stage and looks each one up in the store.

    Args:
        placed: name of a source -> the artifact that replaces it; aliases are resolved anyway.

    Raises:
        ConfigError: one of the checks of ``flows.planning`` refuses the pipeline, a tracker is not installed or has no
            account, a source does not exist, the code of a reused stage changed (``code_drift=refuse``), a value is
            outside its range (``advice=strict``), or a stage cannot resume from its checkpoints.
    """
    check_store(pipeline)
    check_gates(pipeline)
    check_metrics(pipeline)
    check_fallbacks(pipeline)
    check_replay(pipeline)
    check_data(pipeline)
    check_row_kinds(pipeline)
    check_images(pipeline)
    check_models(pipeline)
    check_positions(pipeline)
    check_evaluations(pipeline)
    check_frozen_models(pipeline)
    check_kernels(pipeline)
    check_merges(pipeline)
    memo = memo or Memo()
    store = Store(pipeline.store)
    digests = DigestCache(pipeline.store / "digests.json" if is_store(pipeline.store) else None)
    champions = resolve_champions(pipeline, lambda name: _pinned(name, pipeline, digests, memo).fingerprint)
    resolved = _resolved(pipeline, champions.inputs)
    if resolved != pipeline:
        check_models(resolved)
        check_positions(resolved)
    check_same_split(resolved, champions.found)
    artifacts = {**champions.found, **(placed or {})}
    known = {SOURCE + name: _promoted(name, champion) for name, champion in artifacts.items()}
    unknown = [name for name in resolved.used_sources() if SOURCE + name not in known]
    known |= {SOURCE + name: _pinned(name, resolved, digests, memo) for name in unknown}
    stages = []
    for name in resolved.order():
        stage = resolved.stages[name]
        inputs = {slot: known[resolved.key(ref)] for slot, ref in stage.inputs.items()}
        planned = _plan_stage(name, stage, inputs, store, resolved, memo)
        known[name] = PlannedInput(name=name, fingerprint=planned.fingerprint, tokenizer=_tokenizer(planned))
        stages.append(planned)
    stale = {planned.name: planned.stage for planned in stages if planned.state != "reuse"}
    check_benchmarks(stale)
    if stale:
        _ = pipeline.tracking.others  # refuses those that cannot record
    effects = batch_notes(resolved)
    notes = [effects[name] for name in stale if name in effects]
    notes += [*_not_scored(stages, store), *_made_otherwise(stages, store)]
    resolutions = [note for stage in stale.values() for note in stage.notes]
    notes += [*awaited_weights(resolved, [*stale]), *text_part_notes(resolved, [*stale])]
    notes += left_out_notes(resolved, [*stale])
    notes += token_notes(resolved, [*stale])
    notes = list(dict.fromkeys([*champions.notes, *resolutions, *notes]))  # several stages may have the same note
    lengths = {planned.name: planned.hyperparameters for planned in stages if planned.state != "reuse"}
    advice = advice_of(resolved, lengths)
    return Plan(pipeline=resolved, stages=stages, home=pipeline.store, notes=notes, advice=advice)


def refusal_of(pipeline: Pipeline) -> PipelineError | None:
    """Why a run of a pipeline would be refused before its first stage; None: it would not."""
    try:
        make_plan(pipeline)
    except PipelineError as error:
        return error
    return None


def _not_scored(stages: Sequence[PlannedStage], store: Store) -> Iterator[str]:
    """A note for each finished stage whose evaluation was set after its training, or lacks scores that failed."""
    for planned in stages:
        entry = store.entry(planned.name, planned.fingerprint).path
        setting = getattr(planned.stage.method, "evaluation", None)
        if planned.state != "reuse" or not setting:
            continue
        found = failure_lines(failed_scores(entry))
        if not (entry / CHECKPOINT_SCORES_FILE).exists():
            found = ["so its evaluation scores nothing"]
        again = "" if setting.decides else f"set stages.{planned.name}.method.evaluation.pick=best, "
        if found:
            yield (
                f"{planned.name} is finished, {'; '.join(found)}; to train it again with its scores, {again}change "
                f"another field, or delete {entry}; a stage of evaluate scores its output and its start alone"
            )


def _made_otherwise(stages: Sequence[PlannedStage], store: Store) -> Iterator[str]:
    """A note for each finished stage that would do otherwise now because of its rows, which no recipe knows."""
    for planned in stages:
        entry = store.entry(planned.name, planned.fingerprint)
        why = "" if planned.state != "reuse" else _without_choices(planned, entry) or _turns_as_text(planned, entry)
        if why:
            yield (
                f"{planned.name} is finished, and {why}; to produce it again, delete {entry.path}, and the outputs "
                "that were made of it"
            )


def _without_choices(planned: PlannedStage, entry: Entry) -> str:
    """Why rows of a multiple choice were read as others, without their choices."""
    if not (entry.output / DATA_REPORT).exists():
        return ""
    report = json.loads((entry.output / DATA_REPORT).read_text("utf-8", "replace"))
    for slot, read in report.get("sources", {}).items():
        source = planned.inputs[slot].source if slot in planned.inputs else None
        unread = {"choices", "options", "endings"} & read.get("ignored_columns", {}).keys()
        if source and source.format is None and read.get("format") == "reasoning" and unread:
            return f"{read['path']} was read without its {', '.join(sorted(unread))}, which is a part of the prompt now"
    return ""


def _turns_as_text(planned: PlannedStage, entry: Entry) -> str:
    """Why prompts that are turns in text were read as what a user wrote, with brackets and quotes."""
    file, sources = entry.output / TRAIN, [each.source for each in planned.inputs.values()]
    is_own = any(source and not source.path.startswith(QUICKSTART) for source in sources)
    if not (
        is_own and planned.stage.method.produces in (Kind.PREFERENCES, Kind.UNPAIRED, Kind.PROMPTS) and file.exists()
    ):
        return ""
    import pyarrow.parquet as pq

    from tasks.data.formats.turns import BadRowError, turns_in_text

    with pq.ParquetFile(file) as table:
        first = next(table.iter_batches(batch_size=20, columns=["prompt"]), None)
    turns = [turn for prompt in first.column("prompt").to_pylist() for turn in prompt or ()] if first else []
    with suppress(BadRowError):  # of turns that are refused now
        if not any(isinstance(turns_in_text(turn["content"]), list) for turn in turns):
            return ""
    return "its prompts are the text of turns, read as what one user wrote; they are those turns now"


def _resolved(pipeline: Pipeline, inputs: Mapping[str, Mapping[str, str]]) -> Pipeline:
    """The pipeline with these inputs of its stages, without the others, and with ``adapter=auto`` resolved."""
    if inputs != {name: stage.inputs for name, stage in pipeline.stages.items()}:
        stages = {name: replace(pipeline.stages[name], inputs=inputs[name]) for name in inputs}
        pipeline = replace(pipeline, stages=stages)
    chosen = dict(pipeline.stages)
    for name, (label, note) in choose_adapters(pipeline).items():
        choice = chosen[name].choices[label]
        chosen[name] = replace(choice, inputs=chosen[name].inputs, notes=(*choice.notes, note))
    return replace(pipeline, stages=chosen) if chosen != pipeline.stages else pipeline


def _pinned(name: str, pipeline: Pipeline, digests: DigestCache, memo: Memo) -> PlannedInput:
    source = pipeline.sources[name]
    if (name, source) not in memo.sources:
        pinned = pin(name, source, digests)
        memo.sources[name, source] = PlannedInput(name=SOURCE + name, fingerprint=pinned.fingerprint, pinned=pinned)
    return memo.sources[name, source]


def _promoted(name: str, champion: Champion) -> PlannedInput:
    pinned = champion.pinned
    return PlannedInput(name=SOURCE + name, fingerprint=pinned.fingerprint, pinned=pinned, entry=champion.entry)


def _plan_stage(
    name: str, stage: Stage, inputs: Mapping[str, PlannedInput], store: Store, pipeline: Pipeline, memo: Memo
) -> PlannedStage:
    recipe = stage.method.recipe()
    identity = fingerprint(recipe, stage.method.identity_of({slot: each.fingerprint for slot, each in inputs.items()}))
    entry = store.entry(name, identity)
    if (name, identity) not in memo.stages:
        code = memo.code_of(stage.method)
        memo.stages[name, identity] = *state_of(name, stage, entry, inputs, code, pipeline), code
    state, reason, code = memo.stages[name, identity]
    restart = restarts(name, entry, code, pipeline)
    planned = PlannedStage(
        name=name, stage=stage, fingerprint=identity, inputs=inputs, state=state, reason=reason,
        code_digest=code, rerun_drifted=pipeline.code_drift == "rerun", restart=restart,
    )  # fmt: skip
    return _with_hyperparameters(planned, store)


def _tokenizer(planned: PlannedStage) -> str:
    method = planned.stage.method
    if not isinstance(method, Training) or POLICY not in planned.inputs:
        return planned.fingerprint
    input_ = planned.inputs[POLICY]
    template = getattr(method, "chat_template", None)
    return (
        f"{input_.tokenizer or input_.fingerprint} {template}" if template else input_.tokenizer or input_.fingerprint
    )


def _with_hyperparameters(planned: PlannedStage, store: Store) -> PlannedStage:
    method = planned.stage.method
    if not isinstance(method, Training):
        return planned
    tokenization = method.tokenization()
    examples, rows = None, None
    if tokenization and POLICY in planned.inputs:
        input_ = planned.inputs[rows_slot(method)]
        examples = examples_file(store.root, tokenization, input_.fingerprint, _tokenizer(planned))
        entry = input_.entry or (None if input_.pinned else store.entry(input_.name, input_.fingerprint))
        rows = entry.manifest() if entry else None
    found = hyperparameters(method, rows, examples, given=planned.stage.given)
    return replace(planned, examples=examples, hyperparameters=found)
