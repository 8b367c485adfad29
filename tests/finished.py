"""Outputs and checkpoints of stages that never ran: committed as if they had."""

from collections.abc import Mapping
from pathlib import Path

from flows.planning.plan import Plan
from lineage.checkpoints import Checkpoint
from lineage.digest import digest_files, digest_of
from lineage.lease import Lease
from lineage.manifest import InputRecord, Manifest, provenance
from lineage.store import Entry


def finish(plan: Plan, *names: str, metrics: Mapping[str, float] | None = None) -> None:
    """Commits an output for each of these stages, or for all."""
    for planned in plan.stages:
        if names and planned.name not in names:
            continue
        entry = plan.entry(planned)
        lease = Lease(entry.path)
        lease.try_acquire()
        entry.begin()
        (entry.output / "f").write_text(planned.name)
        files = digest_files(entry.output)
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
            fingerprint=planned.fingerprint, files=files, output_digest=digest_of(files), metrics=dict(metrics or {}),
            inputs=inputs, provenance=provenance(start=0, end=1, code_digest=planned.code_digest, seed=0, resources={}),
        )  # fmt: skip
        with lease.holding():
            entry.commit(manifest, lease)


def save(entry: Entry, step: int, *, num_workers: int = 1, zero_stage: int = 0, **fields: int) -> Path:
    """Commits a checkpoint."""
    draft = entry.path / "draft"
    draft.mkdir(parents=True)
    (draft / "state.txt").write_text(str(step))
    checkpoint = Checkpoint(
        step=step, time=1.0, train_seconds=1.0, num_workers=num_workers, zero_stage=zero_stage, metrics={}, **fields
    )
    return entry.checkpoints.commit(draft, checkpoint)
