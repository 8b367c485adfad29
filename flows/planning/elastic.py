"""Whether a stage can go on from its checkpoint with the workers that it is given now."""

from flows.declare.pipeline import Stage
from lineage.errors import ConfigError
from lineage.store import Entry
from tasks.zero import require_readable


def goes_on_with(name: str, stage: Stage, entry: Entry, reason: str) -> str:
    """Why a stage is resumed, and what other workers than those before change about what comes out.

    Raises:
        ConfigError: they cannot read what was saved.
    """
    checkpoint = entry.checkpoints.newest()
    if checkpoint is None:
        return reason
    try:
        require_readable(checkpoint, stage.resources)
    except ConfigError as error:
        raise ConfigError(f"stages.{name}.resources: {error}, or begin again with restart=[{name}]") from error
    now, before = stage.resources.num_workers, checkpoint.num_workers
    if now == before:
        return reason
    workers = "1 worker" if now == 1 else f"{now} workers"
    return f"{reason}; with {workers} instead of {before}: within tolerance, not to the bit"
