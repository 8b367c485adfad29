"""Whether a stage can go on from its checkpoint with the machines that it is given now, and to which bit."""

from collections.abc import Iterator

from flows.declare.pipeline import Stage
from lineage.checkpoints import Checkpoint
from lineage.errors import ConfigError
from lineage.store import Entry
from tasks.context import Resources
from tasks.train.sharding import require_readable


def goes_on_with(name: str, stage: Stage, entry: Entry, reason: str) -> str:
    """Why a stage is resumed, and what other machines than those before change about what comes out.

    Raises:
        ConfigError: a run would refuse: it has checkpoints and none is whole, or the workers cannot read the last.
    """
    checkpoint = entry.checkpoints.newest()
    if checkpoint is None:
        raise ConfigError(
            f"stages.{name}: of its checkpoints in {entry.checkpoints.directory} each lacks a file, or a record that "
            f"can be read; restore the files, or lose their steps and begin again with restart=[{name}]"
        )
    try:
        require_readable(checkpoint, stage.resources)
    except ConfigError as error:
        raise ConfigError(f"stages.{name}.resources: {error}, or begin again with restart=[{name}]") from error
    changes = ", ".join(_changes(checkpoint, stage.resources))
    return f"{reason}; with {changes}: within tolerance, not to the bit" if changes else reason


def _changes(before: Checkpoint, now: Resources) -> Iterator[str]:
    """What makes sums be added in another order."""
    if now.num_workers != before.num_workers:
        workers = "1 worker" if now.num_workers == 1 else f"{now.num_workers} workers"
        yield f"{workers} instead of {before.num_workers}"
    for field in ("micro_batch_size", "cpus_per_worker"):
        old, new = getattr(before, field), getattr(now, field)
        if old not in (None, new):
            yield f"{field}={new} instead of {old}"
