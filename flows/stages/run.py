"""The shared state of one run's stages, and the checks before a stage starts.

Its inputs are those that were planned and committed; sources are checked also at its end. The rows of all stages are
checked before the first of them trains.
"""

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from flows.planning.plan import Plan, PlannedStage, used_resources
from flows.planning.reads import claim
from flows.planning.staleness import PlannedInput, write_examples
from flows.planning.verdicts import why_not_begun
from flows.progress.recorder import RunRecorder
from flows.reports.wording import counted
from flows.stages.job import Job, JobInput
from flows.stages.launch import StageProcesses
from flows.stages.resources import Waiting, admitted, used_by_others
from lineage.artifact import DATA, MODELS, SOURCE, Kind
from lineage.errors import ArtifactError, DataError, GateError, LostError, StageError
from lineage.filesystem.digest import DigestCache
from lineage.record.tracker import Event, Listener, Tracker
from lineage.source.sources import is_unchanged
from lineage.store import InputRecord, Manifest, Store
from tasks.context import Metrics
from tasks.data.kinds import HELD_OUT
from tasks.evaluate.evaluate import Evaluate, EvaluationCheck, agreed_thinking
from tasks.judgement.check_rows import EXAMPLES, LEAKED, POLICY, RowCheck, describe_lost, rows_slot
from tasks.method import Input, Method, Training
from tasks.recipe import without_verdict
from tasks.reward_functions.metric import Metric


def inputs_as_planned(plan: Plan, planned: PlannedStage) -> dict[str, Manifest]:
    """The manifests of the inputs of a stage, after a check that sources, inputs and code are those of the plan.

    Raises:
        StageError: an input, a source or the code is not, a byte of an input has changed, or a gate refuses.
        DataError: it would learn nothing new.
    """
    parents, digests = {}, DigestCache(plan.pipeline.store / "digests.json", rereads=True)
    promoted = {each.name: each.entry for each in planned.inputs.values() if each.entry}
    stages = {name: plan.entry(plan.stage(name)) for name in planned.upstream}
    for name, entry in {**stages, **promoted}.items():
        try:
            parents[name] = entry.require_intact(digests)
        except ArtifactError as error:
            raise StageError(planned.name, str(error), str(plan.entry(planned).logs)) from error
    require_unchanged(plan, planned)
    require_new_rows(plan, planned)
    if why := why_not_begun(plan, planned):
        raise StageError(planned.name, why, str(plan.entry(planned).logs), exit_code=GateError.exit_code)
    return parents


def require_unchanged(
    plan: Plan, planned: PlannedStage, *, code: bool = True, loaded: Collection[str] = ()
) -> None:  # fmt: skip
    """Requires that its sources and its code are still those of the plan; else its fingerprint would be wrong.

    Args:
        code: whether to check the code too.
        loaded: slots of models that may have changed since the stage loaded them.
    """
    digests, log = DigestCache(plan.pipeline.store / "digests.json"), str(plan.entry(planned).logs)
    for slot, input_ in planned.inputs.items():
        if input_.entry or input_.pinned is None or slot in loaded:
            continue
        name = input_.name.removeprefix(SOURCE)
        if not is_unchanged(name, input_.pinned.source, input_.fingerprint, digests):
            raise StageError(
                planned.name,
                f"sources.{name}: {input_.pinned.source.path} has changed since the plan was made; "
                "let it rest, and run again: the new bytes get a name of their own",
                log,
            )
    if code and planned.stage.method.code_digest(now=True) != planned.code_digest:
        raise StageError(
            planned.name,
            f"the code of {type(planned.stage.method).__module__} has changed since the plan was made; run again: what "
            "is finished is kept, and the rest is made by the new code",
            log,
        )


def require_new_rows(plan: Plan, planned: PlannedStage) -> None:
    """Requires that a model which is retrained to be promoted reads a row that its data stages had not read before.

    Raises:
        DataError: each of them found nothing new: it would learn the old rows once more.
    """
    if plan.pipeline.operation.retrain is None or planned.stage.method.produces not in MODELS:
        return
    reading = [other for other in plan.stages if Kind.ROWS in other.stage.method.consumes.values()]
    manifests = {other.name: plan.entry(other).manifest() for other in reading}
    # Where one does not count, or is not finished, it may have something new.
    if {manifest.metrics.get("new_rows") if manifest else None for manifest in manifests.values()} == {0}:
        raise DataError(
            f"nothing is new: {', '.join(manifests)} found no row that was not there before, so {planned.name} would "
            "learn the old ones once more; give new rows, state retrain=null to train all the same, or start from base"
        )


def job_inputs(plan: Plan, planned: PlannedStage, parents: Mapping[str, Manifest]) -> dict[str, JobInput]:
    """The inputs of its slots, for the process that runs it."""
    consumes = planned.stage.method.consumes
    return {
        slot: job_input(plan, input_, consumes[slot] if slot in consumes else consumes["*"], parents)
        for slot, input_ in without_verdict(planned.inputs).items()
    }


def input_records(planned: PlannedStage, parents: Mapping[str, Manifest]) -> dict[str, InputRecord]:
    """The inputs of its slots, for its manifest."""
    return {slot: _record(each, parents) for slot, each in planned.inputs.items()}


def job_input(plan: Plan, input_: PlannedInput, kind: Kind, parents: Mapping[str, Manifest]) -> JobInput:
    """The input of one slot."""
    return JobInput(
        planned=Input(
            name=input_.name, kind=kind, fingerprint=input_.fingerprint, path=plan.path_of(input_),
            source=input_.source, digest=_record(input_, parents).digest,
        ),
        trusts_code=_trusts_code(plan, input_), is_artifact=input_.entry is not None,
    )  # fmt: skip


def _trusts_code(plan: Plan, input_: PlannedInput) -> bool:
    """Whether a policy comes from a source that lets the model's own code run."""
    if input_.source is not None:
        return input_.source.trust_remote_code
    policy = plan.stage(input_.name).inputs.get(POLICY)
    return policy is not None and _trusts_code(plan, policy)


def _record(input_: PlannedInput, parents: Mapping[str, Manifest]) -> InputRecord:
    pinned = input_.pinned
    digest = pinned.digest if pinned else parents[input_.name].output_digest
    return InputRecord(
        artifact=input_.name, fingerprint=input_.fingerprint, digest=digest, source=pinned.record if pinned else None
    )


# --- the rows of all that is to train, before the first of it trains


@dataclass
class DataChecks:
    """The checks of rows in one run, once per stage."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _errors: dict[str, StageError | None] = field(default_factory=dict)  # fingerprint of a stage -> its refusal
    _examples: dict[str, int] = field(default_factory=dict)  # fingerprint of a stage -> how many it trains on in a pass

    def require(self, run: "Run", planned: PlannedStage) -> None:
        """Checks the rows of this stage and of all that are to train after it, as far as they are prepared.

        Of an evaluation on local benchmarks those that its models were trained on before, for rows of the benchmarks.
        """
        if isinstance(planned.stage.method, Training):
            checked = [planned, *(other for other in run.plan.stale if other is not planned)]
        elif any(_local_benchmarks(planned)):
            trained = (each for each in run.plan.stages if isinstance(each.stage.method, Training))
            checked = [each for each in trained if each.state == "reuse"]
        else:
            return
        with self._lock:
            for each in checked:
                job = check_job(run.plan, each, run.plan.entry(planned).path)
                if job is None:
                    continue
                if each.fingerprint not in self._errors:
                    whose = "its rows" if each is planned else f"the rows of {each.name}"
                    wait = partial(run.wait_for_capacity, planned, f"the check of {whose}")
                    self._errors[each.fingerprint] = self._check(run, each, job, wait)
                if error := self._errors[each.fingerprint]:
                    raise error

    def num_steps(self, planned: PlannedStage, method: Method) -> int | None:
        """Optimizer steps of a method on the rows of a stage, or reports of another; None: not known."""
        if not isinstance(method, Training):
            return method.num_reports(planned.inputs)
        examples = self._examples.get(planned.fingerprint)
        return method.steps(lambda: examples or 0) if examples or method.num_steps else None

    def _check(self, run: "Run", planned: PlannedStage, job: Job, wait: Waiting) -> StageError | None:
        """Checks the rows, and returns the error that refuses them.

        Raises:
            LostError: its process was lost once too often: nothing is known of the rows.
        """
        wait()
        for left in reversed(range(job.resources.max_failures + 1)):
            try:
                with admitted(job.resources.cpus_per_worker, 0, wait, run.user(planned)):
                    found = run.processes.run(job)
                break
            except LostError as lost:
                if not left:
                    raise
                run.announce(f"{lost}; its rows are checked again")
            except StageError as error:
                return error
        return self._counted(run, planned, job.method, found) if isinstance(job.method, RowCheck) else None

    def _counted(self, run: "Run", planned: PlannedStage, check: RowCheck, found: Metrics) -> StageError | None:
        """Announces what of the rows is not trained on, and returns the error where that is too much."""
        unused = describe_lost(found, check.method.max_length)
        if EXAMPLES in found:
            self._examples[planned.fingerprint] = int(found[EXAMPLES])
            if planned.examples:
                write_examples(planned.examples, int(found[EXAMPLES]), unused)
        if unused:
            run.announce(f"{planned.name}: {unused}")
        most = planned.stage.resources.max_dropped
        if found.get("rows_dropped", 0) > most * found.get("rows", 0):
            return StageError(
                planned.name,
                f"{unused}; a share of {most:g} dropped is accepted; change max_length, or set "
                f"stages.{planned.name}.resources.max_dropped=1 if that is meant",
                str(run.plan.entry(planned).logs),
                exit_code=2,
            )
        if found[LEAKED]:
            rows = counted(int(found[LEAKED]), "held-out row")
            run.announce(f"{planned.name}: {rows} among what it trains on: {check.leakage}")
        return None


def check_job(plan: Plan, planned: PlannedStage, directory: Path) -> Job | None:
    """The check of one stage's rows; None: it has no such check, or its inputs are not finished yet.

    Args:
        directory: of the stage that asks: the check goes to its log.
    """
    method = planned.stage.method
    if isinstance(method, Evaluate):
        return _evaluation_check(plan, planned, method, directory)
    if not isinstance(method, Training) or method.tokenization() is None or POLICY not in planned.inputs:
        return None
    slot = rows_slot(method)
    rows, (tokenizer, template) = planned.inputs[slot], _tokenizer(plan, planned)
    parents = {each.name: manifest for each in (rows, tokenizer) if (manifest := _manifest(plan, each))}
    if any(each.pinned is None and each.name not in parents for each in (rows, tokenizer)):
        return None
    check = RowCheck(
        method=method, stage=planned.name, chat_template=template, held_out=dict(_held_out(plan)),
        benchmarks=tuple(_benchmarks(plan)),
        previous_percent=_previous_percent(plan, planned), leakage=directory / f"logs/leakage-{planned.name}.parquet",
    )  # fmt: skip
    inputs = {
        slot: job_input(plan, rows, method.consumes[slot], parents),
        POLICY: job_input(plan, tokenizer, method.consumes[POLICY], parents),
    }
    resources = used_resources(check, planned.stage.resources)
    return Job(
        stage=planned.name, method=check, resources=resources, directory=directory, inputs=inputs,
        row_processes=planned.row_processes,
    )  # fmt: skip


def _evaluation_check(plan: Plan, planned: PlannedStage, method: Evaluate, directory: Path) -> Job | None:
    """The check of an evaluation's rows; None also where what its models were trained with is not in the plan."""
    models = [each for slot, each in planned.inputs.items() if method.consumes.get(slot, Kind.CHECKPOINT) in MODELS]
    outside = any(each.entry or (each.source and Path(each.source.path).name == "output") for each in models)
    recipes = {each.name: plan.stage(each.name).stage.method.recipe() for each in models if not each.pinned}
    lengths = [length for each in recipes.values() if isinstance(length := each.get("max_length"), int)]
    if outside or "reference" not in planned.inputs or not (method.max_length or lengths):
        return None
    thinking = agreed_thinking({name: each["thinking"] for name, each in recipes.items() if "thinking" in each})
    kept = "keep" in [each.get("control_tokens") for each in recipes.values()]
    method = replace(
        method, max_length=method.max_length or max(lengths), thinking=method.thinking or thinking,
        control_tokens=method.control_tokens or ("keep" if kept else None),
    )  # fmt: skip
    tokenizer, template = _tokenizer(plan, planned, "reference")
    rows = {slot: each for slot, each in planned.inputs.items() if method.consumes.get(slot) in DATA}
    read = {**rows, "reference": tokenizer}
    parents = {each.name: manifest for each in read.values() if (manifest := _manifest(plan, each))}
    if any(each.pinned is None and each.name not in parents for each in read.values()):
        return None
    check = EvaluationCheck(method=method, chat_template=template)
    inputs = {slot: job_input(plan, each, method.consumes[slot], parents) for slot, each in read.items()}
    resources = used_resources(check, planned.stage.resources)
    return Job(
        stage=planned.name, method=check, resources=resources, directory=directory, inputs=inputs,
        row_processes=planned.row_processes,
    )  # fmt: skip


def _tokenizer(plan: Plan, planned: PlannedStage, slot: str = POLICY) -> tuple[PlannedInput, str | None]:
    """The model whose tokenizer a stage will get, and the template that a stage between the two installs."""
    template: str | None = None
    while True:
        configured = planned.stage.method.recipe().get("chat_template")
        template = template or (str(configured) if configured else None)
        input_, slot = planned.inputs[slot], POLICY
        parent = None if input_.pinned else plan.stage(input_.name)
        if parent is None or not isinstance(parent.stage.method, Training) or POLICY not in parent.inputs:
            return input_, template
        planned = parent


def _manifest(plan: Plan, input_: PlannedInput) -> Manifest | None:
    entry = input_.entry or (None if input_.pinned else plan.entry(plan.stage(input_.name)))
    return entry.manifest() if entry else None


def _held_out(plan: Plan) -> Iterator[tuple[str, Path]]:
    """All sets of rows that models may be measured on."""
    for planned in plan.stages:
        output = plan.entry(planned).output
        if planned.stage.method.produces in DATA and plan.entry(planned).is_finished() and (output / HELD_OUT).exists():
            yield planned.name, output


def _benchmarks(plan: Plan) -> Iterator[Metric]:
    """All benchmarks with local files that models are measured on."""
    for planned in plan.stages:
        yield from _local_benchmarks(planned)


def _local_benchmarks(planned: PlannedStage) -> Iterator[Metric]:
    beside = getattr(planned.stage.method, "evaluation", None)
    found = [*getattr(planned.stage.method, "own_metrics", ()), *(beside.own_metrics if beside else ())]
    yield from (each for each in found if each.local_task)


def _previous_percent(plan: Plan, planned: PlannedStage) -> float | None:
    """The share of tokens that this stage trained when this pipeline trained it last; None: never, or not asked."""
    if planned.name in plan.pipeline.accept_label_drop:
        return None
    finished = Store(plan.pipeline.store).finished(planned.name)
    mine = (manifest.metrics for manifest in finished if manifest.pipeline == plan.pipeline.name)
    return next((metrics["trained_tokens_percent"] for metrics in mine if "trained_tokens_percent" in metrics), None)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a plan: what its stages share.

    Args:
        emit: passes an event to all listeners.
        waits: title -> what it waits for.
        titles: stage -> its title in events, where that is not its name.
        recorder: None: nothing records it, since nothing runs.
    """

    plan: Plan
    processes: StageProcesses
    emit: Listener
    tracker: Tracker
    titles: Mapping[str, str] = field(default_factory=dict)
    waits: dict[str, str] = field(default_factory=dict)
    checks: DataChecks = field(default_factory=DataChecks)
    recorder: RunRecorder | None = None

    def title(self, planned: PlannedStage) -> str:
        return self.titles.get(planned.name, planned.name)

    def wait(self, planned: PlannedStage, reason: str) -> None:
        """Emits what a stage waits for, when that changes; called at each poll.

        Raises:
            PipelineError: as ``StageProcesses.raise_if_ended``.
        """
        self.processes.raise_if_ended(self.plan.entry(planned).path)
        title = self.title(planned)
        if self.waits.get(title) != reason:
            self.waits[title] = reason
            self.emit(Event(title=title, state="waiting", text=reason))

    def wait_for_capacity(self, planned: PlannedStage, what: str) -> None:
        """Emits what a stage waits for, and which other runs use this machine; raises as ``wait``."""
        self.wait(planned, what + used_by_others())

    def user(self, planned: PlannedStage) -> str:
        """A stage, as other runs name it that wait for its capacity."""
        return self.title(planned) + (f" of run {self.recorder.record.id}" if self.recorder else "")

    def claim(self, plans: Sequence[Plan]) -> None:
        """Keeps what further plans read, such as those of trials; raises as ``claim`` of the same name."""
        (self.recorder.claim if self.recorder else claim)(plans)

    def announce(self, text: str) -> None:
        """Emits lines that belong to no single stage."""
        self.emit(Event(text=text))
