"""The outputs that a run uses in the store, which are protected from ``gc``."""

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from flows.planning.plan import Plan, PlannedStage
from lineage.errors import ArtifactError
from lineage.filesystem.lock import owner
from lineage.gc import guard
from lineage.graph.places import artifact_at, node_key
from lineage.store import Entry, Store


def reads(plan: Plan) -> dict[str, Entry]:
    """Node -> directory of all stages of a plan, and of outputs that its sources name by path."""
    found = {node_key(planned.name, planned.fingerprint): plan.entry(planned) for planned in plan.stages}
    return found | _named(plan)


def claim(plans: Sequence[Plan], note: Callable[[], None] = lambda: None) -> None:
    """Protects what plans reuse or resume from ``gc``, which keeps everything that was used since it looked.

    Args:
        note: records the use by a run, which protects it as long as the run lives.

    Raises:
        ArtifactError: some of it was deleted since its plan was made.
    """
    stages = [(each, plan.entry(each)) for plan in plans for each in plan.stages if each.state in ("reuse", "resume")]
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # in a read-only store nothing is deleted
            for store in sorted({plan.home for plan in plans}):
                stack.enter_context(guard(store))
        note()
        used = {entry.path: entry for _, entry in stages}
        used |= {entry.path: entry for plan in plans for entry in _named(plan).values()}
        for entry in used.values():
            with contextlib.suppress(OSError):
                os.utime(entry.output)
    gone = [entry.path for planned, entry in stages if not _is_there(planned, entry)]
    gone += [file for plan in plans for file in _files(plan) if not file.exists()]  # also of unfinished outputs
    if gone:
        raise ArtifactError(f"{gone[0]}: was there when the plan was made, and is gone since, as after gc; run again")


def _is_there(planned: PlannedStage, entry: Entry) -> bool:
    """Whether its output or checkpoints exist. Checkpoints first: a run that finishes it removes them last."""
    is_resumed = planned.state == "resume"
    if is_resumed and (entry.checkpoints.steps() or (entry.work.is_dir() and owner(entry.path) is not None)):
        return True  # or another run has restarted it, for which this one will wait
    if is_resumed and planned.stage.resources.checkpoint_mirror and entry.manifest() is None:
        return True  # the run reads the mirror again
    return entry.manifest() is not None and entry.output.is_dir()


def _files(plan: Plan) -> list[Path]:
    """Files of sources that are inside the store."""
    pinned = [each.pinned for planned in plan.stages for each in planned.inputs.values() if each.pinned]
    files = dict.fromkeys(file for each in pinned for file in each.record.files)
    return [Path(file) for file in files if artifact_at(plan.home, file)]


def _named(plan: Plan) -> dict[str, Entry]:
    paths: set[str] = set()
    for planned in plan.stages:
        for each in planned.inputs.values():
            if each.pinned:
                paths |= {str(plan.path_of(each)), *map(os.path.dirname, each.pinned.record.files)}
    places = filter(None, (artifact_at(plan.home, path) for path in paths))
    return {node_key(*place): Store(plan.home).entry(*place) for place in places}
