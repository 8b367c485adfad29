"""What of the store a run reads, so that nobody frees it meanwhile, nor soon after."""

import contextlib
import os
from pathlib import Path

from flows.planning.plan import Plan
from lineage.errors import ArtifactError
from lineage.graph.places import artifact_at, node_key
from lineage.store import Entry, Store


def reads(plan: Plan) -> dict[str, Entry]:
    """Node -> directory of all that a plan makes or reuses, and of the outputs that its sources name by their path."""
    found = {node_key(planned.name, planned.fingerprint): plan.entry(planned) for planned in plan.stages}
    return found | _named(plan)


def mark_used(plan: Plan) -> None:
    """Makes what it finds finished young again for ``gc``."""
    for entry in _reused(plan):
        with contextlib.suppress(OSError):  # of a store that may only be read, nothing is freed either
            os.utime(entry.path)


def require_there(plan: Plan) -> None:
    """For a run whose note says by now what it reads.

    Raises:
        ArtifactError: something was freed between the plan and the note.
    """
    reused = (plan.entry(each) for each in plan.stages if each.state == "reuse")
    gone = [entry.path for entry in reused if not (entry.manifest() and entry.output.is_dir())]
    gone += [file for file in _files(plan) if not file.exists()]  # of an unfinished output too, where one names it
    if gone:
        raise ArtifactError(
            f"{gone[0]}: was there when the plan was made, and is gone since, as when gc frees it; run again"
        )


def _reused(plan: Plan) -> list[Entry]:
    return [*(plan.entry(each) for each in plan.stages if each.state == "reuse"), *_named(plan).values()]


def _files(plan: Plan) -> list[Path]:
    """Of the store, that sources name."""
    pinned = [given.pinned for planned in plan.stages for given in planned.inputs.values() if given.pinned]
    files = dict.fromkeys(file for each in pinned for file in each.record.files)
    return [Path(file) for file in files if artifact_at(plan.pipeline.store, file)]


def _named(plan: Plan) -> dict[str, Entry]:
    store = plan.pipeline.store
    paths: set[str] = set()
    for planned in plan.stages:
        for given in planned.inputs.values():
            if given.pinned:
                paths |= {str(plan.path_of(given)), *map(os.path.dirname, given.pinned.record.files)}
    places = filter(None, (artifact_at(store, path) for path in paths))
    return {node_key(*place): Store(store).entry(*place) for place in places}
