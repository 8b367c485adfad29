"""What a stage is given is what was planned and committed: checked before it starts, and for sources when it ends."""

from flows.plan import Plan, PlannedStage
from lineage.artifact import SOURCE
from lineage.digest import DigestCache
from lineage.errors import ArtifactError, PipelineError, StageError
from lineage.manifest import Manifest
from lineage.sources import pin


def intact_parents(plan: Plan, planned: PlannedStage) -> dict[str, Manifest]:
    """The records of the stages that it reads and of the models that aliases name, whose every byte is unchanged.

    Raises:
        StageError: one is not.
    """
    parents = {}
    promoted = {given.name: given.entry for given in planned.inputs.values() if given.entry}
    stages = {name: plan.entry(plan.stage(name)) for name in planned.upstream}
    for name, entry in {**stages, **promoted}.items():
        try:
            parents[name] = entry.require_intact()
        except ArtifactError as error:
            raise StageError(planned.name, str(error), str(plan.entry(planned).logs)) from error
    return parents


def require_unchanged_sources(plan: Plan, planned: PlannedStage) -> None:
    """That each source which it reads is still what was planned: its name would stand for other data.

    Raises:
        StageError: one has changed or is gone.
    """
    digests = DigestCache(plan.pipeline.store / "digests.json")
    for given in planned.inputs.values():
        if given.entry or given.pinned is None or given.pinned.digest is None:
            continue
        name = given.name.removeprefix(SOURCE)
        try:
            same = pin(name, given.pinned.source, digests).fingerprint == given.fingerprint
        except (PipelineError, OSError):
            same = False
        if not same:
            raise StageError(
                planned.name,
                f"sources.{name}: {given.pinned.source.path} has changed since the plan was made; "
                "let it rest, and run again: the new bytes get a name of their own",
                str(plan.entry(planned).logs),
            )
