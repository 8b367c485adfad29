"""The inputs of a stage: those that were planned and committed, checked before it starts; sources also at its end."""

from collections.abc import Mapping

from flows.planning.model_checks import POLICY
from flows.planning.plan import Plan, PlannedStage
from flows.planning.staleness import PlannedInput
from flows.stages.job import JobInput
from lineage.artifact import MODELS, SOURCE, Kind
from lineage.digest import DigestCache
from lineage.errors import ArtifactError, DataError, PipelineError, StageError
from lineage.manifest import InputRecord, Manifest
from lineage.sources import pin


def inputs_as_planned(plan: Plan, planned: PlannedStage) -> dict[str, Manifest]:
    """The manifests of the inputs of a stage, after a check that sources, inputs and code are those of the plan.

    Raises:
        StageError: an input, a source or the code is not.
        DataError: it would learn nothing new.
    """
    parents = intact_parents(plan, planned)
    require_unchanged(plan, planned)
    require_new_rows(plan, planned)
    return parents


def intact_parents(plan: Plan, planned: PlannedStage) -> dict[str, Manifest]:
    """The records of the stages that it reads and of the models that aliases name, whose every byte is unchanged.

    Raises:
        StageError: one is not.
    """
    parents = {}
    promoted = {
        planned_input.name: planned_input.entry for planned_input in planned.inputs.values() if planned_input.entry
    }
    stages = {name: plan.entry(plan.stage(name)) for name in planned.upstream}
    for name, entry in {**stages, **promoted}.items():
        try:
            parents[name] = entry.require_intact()
        except ArtifactError as error:
            raise StageError(planned.name, str(error), str(plan.entry(planned).logs)) from error
    return parents


def require_unchanged(plan: Plan, planned: PlannedStage) -> None:
    """That the sources which it reads and its code are still what was planned; cheap where they are.

    Raises:
        StageError: one is not.
    """
    require_unchanged_sources(plan, planned)
    require_unchanged_code(plan, planned)


def require_unchanged_sources(plan: Plan, planned: PlannedStage) -> None:
    """That each source which it reads is still what was planned: its name would stand for other data.

    Raises:
        StageError: one has changed or is gone.
    """
    digests = DigestCache(plan.pipeline.store / "digests.json")
    for planned_input in planned.inputs.values():
        if planned_input.entry or planned_input.pinned is None:
            continue
        name = planned_input.name.removeprefix(SOURCE)
        try:
            same = pin(name, planned_input.pinned.source, digests).fingerprint == planned_input.fingerprint
        except (PipelineError, OSError):
            same = False
        if not same:
            raise StageError(
                planned.name,
                f"sources.{name}: {planned_input.pinned.source.path} has changed since the plan was made; "
                "let it rest, and run again: the new bytes get a name of their own",
                str(plan.entry(planned).logs),
            )


def require_unchanged_code(plan: Plan, planned: PlannedStage) -> None:
    """That the code which would make it is still that of the plan: the manifest names it.

    Raises:
        StageError: it was changed while the stages before ran.
    """
    module = type(planned.stage.method).__module__
    if planned.stage.method.code_digest(now=True) != planned.code_digest:
        raise StageError(
            planned.name,
            f"the code of {module} has changed since the plan was made; run again: what is finished is kept, and the "
            "rest is made by the new code",
            str(plan.entry(planned).logs),
        )


def require_new_rows(plan: Plan, planned: PlannedStage) -> None:
    """That a model which is renewed, to be promoted, meets a row that its data stages had not met before.

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
    """What fills its slots, for the process that runs it."""
    consumes = planned.stage.method.consumes
    return {
        slot: job_input(plan, planned_input, consumes[slot] if slot in consumes else consumes["*"], parents)
        for slot, planned_input in planned.inputs.items()
    }


def input_records(planned: PlannedStage, parents: Mapping[str, Manifest]) -> dict[str, InputRecord]:
    """What fills its slots, for its manifest."""
    return {slot: _record(planned_input, parents) for slot, planned_input in planned.inputs.items()}


def job_input(plan: Plan, planned_input: PlannedInput, kind: Kind, parents: Mapping[str, Manifest]) -> JobInput:
    """What fills one slot."""
    return JobInput(
        name=planned_input.name,
        kind=kind,
        fingerprint=planned_input.fingerprint,
        path=plan.path_of(planned_input),
        source=planned_input.source,
        digest=_record(planned_input, parents).digest,
        trusts_code=_trusts_code(plan, planned_input),
    )


def _trusts_code(plan: Plan, planned_input: PlannedInput) -> bool:
    """Whether a policy comes from a source that lets the model's own code run."""
    if planned_input.source is not None:
        return planned_input.source.trust_remote_code
    policy = plan.stage(planned_input.name).inputs.get(POLICY)
    return policy is not None and _trusts_code(plan, policy)


def _record(planned_input: PlannedInput, parents: Mapping[str, Manifest]) -> InputRecord:
    pinned = planned_input.pinned
    digest = pinned.digest if pinned else parents[planned_input.name].output_digest
    return InputRecord(
        artifact=planned_input.name,
        fingerprint=planned_input.fingerprint,
        digest=digest,
        source=pinned.record if pinned else None,
    )
