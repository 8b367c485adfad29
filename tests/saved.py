"""Checkpoints of trainings that have no model."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from lineage.checkpoints import Checkpoint, Checkpoints

_RECORD = Checkpoint(step=0, time=1.0, train_seconds=1.0, num_workers=1, zero_stage=0, metrics={})


def commit(
    store: Checkpoints, step: int, files: Mapping[str, str], *, work: Path | None = None, **record: object
) -> Path:
    """Commits a checkpoint.

    Args:
        files: name -> text.
        work: where it is written first, which must be there; None: beside the checkpoints.
        record: what its record says other than one of a single worker without metrics.
    """
    draft = (work or store.directory.parent) / f"draft-{step}"
    draft.mkdir(parents=work is None)
    for name, text in files.items():
        (draft / name).parent.mkdir(exist_ok=True)
        (draft / name).write_text(text)
    return store.commit(draft, replace(_RECORD, step=step, **record))  # type: ignore[arg-type]
