"""Outputs and checkpoints of stages that never ran: committed as if they had."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from flows.planning.plan import Plan
from lineage.filesystem.digest import digest_files, digest_of
from lineage.filesystem.lock import Lock
from lineage.record.environment import provenance_here
from lineage.record.tracker import Event, StageStart
from lineage.store import Entry, InputRecord, Manifest, Provenance
from tests.saved import commit


def finish(
    plan: Plan, *names: str, metrics: Mapping[str, float] | None = None, files: Mapping[str, str] | None = None
) -> None:
    """Commits an output for each of these stages, or for all; ``files``: name -> content."""
    ran = _ran()
    for planned in plan.stages:
        if names and planned.name not in names:
            continue
        entry = plan.entry(planned)
        lock = Lock(entry.path)
        lock.try_acquire()
        entry.begin()
        for name, content in (files or {"f": planned.name}).items():
            (entry.output / name).write_text(content)
        written = digest_files(entry.output)
        inputs = {
            slot: InputRecord(
                artifact=given.name,
                fingerprint=given.fingerprint,
                digest=None,
                source=given.pinned.record if given.pinned else None,
            )
            for slot, given in planned.inputs.items()
        }
        manifest = Manifest(
            pipeline=plan.pipeline.name, stage=planned.name, method="m", recipe=dict(planned.stage.method.recipe()),
            fingerprint=planned.fingerprint, files=written, output_digest=digest_of(written), inputs=inputs,
            metrics=dict(metrics or {}), provenance=replace(ran, code_digest=planned.code_digest),
        )  # fmt: skip
        with lock.holding():
            entry.commit(manifest, lock)


@cache
def _ran() -> Provenance:
    """Asks git once per process."""
    return replace(provenance_here(start=0), end=1, seed=0)


def save(entry: Entry, step: int, **record: int) -> Path:
    """Commits a checkpoint."""
    return commit(entry.checkpoints, step, {"state.txt": str(step)}, **record)


def event(state, text="", *, title="dpo", directory=None, num_steps=None, seconds=1.0, **metrics):
    """An event of a stage of this directory."""
    manifest = Manifest(
        pipeline="toy", stage=title, method="DPO", produces="policy", fingerprint="0" * 64, recipe={}, inputs={},
        files={}, output_digest="", metrics=metrics, provenance=Provenance(start=10.0, end=10.0 + seconds),
    )  # fmt: skip
    start = StageStart(manifest=manifest, directory=directory or Path(), parents={})
    return Event(
        title=title, state=state, text=text, start=start if state == "running" else None, num_steps=num_steps,
        manifest=manifest if state == "done" else None,
    )  # fmt: skip
