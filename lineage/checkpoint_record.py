"""What is known of one checkpoint: ``checkpoint.json`` in it, which carries a digest of itself."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from lineage.errors import ArtifactError
from lineage.fingerprint import canonical_json, short

RECORD = "checkpoint.json"
_DIGEST = "digest"  # SHA-256 of all else in the record


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What is known of one checkpoint.

    Args:
        step: optimizer steps that were done; the position in the data is ``step`` global batches.
        time: when it was committed, in seconds since the epoch.
        train_seconds: of all attempts, up to here.
        num_workers, zero_stage, micro_batch_size, cpus_per_worker: of the attempt that wrote it; None: not known.
        metrics: means of the last steps' reports.
        files: path below the checkpoint -> SHA-256.
    """

    step: int
    time: float
    train_seconds: float
    num_workers: int
    zero_stage: int
    metrics: Mapping[str, float]
    micro_batch_size: int | None = None
    cpus_per_worker: int | None = None
    files: Mapping[str, str] = field(default_factory=dict)


def write_record(directory: Path, checkpoint: Checkpoint) -> None:
    """Puts the record into its checkpoint; a metric that is no number, which JSON cannot state, is left out."""
    numbers = {name: value for name, value in checkpoint.metrics.items() if math.isfinite(value)}
    fields = asdict(replace(checkpoint, metrics=numbers))
    (directory / RECORD).write_text(json.dumps({**fields, _DIGEST: _digest(fields)}, indent=1) + "\n")


def read_record(directory: Path) -> Checkpoint:
    """The record in a checkpoint.

    Raises:
        ArtifactError: it is gone, cannot be read, or is not what was written.
    """
    path = directory / RECORD
    try:
        fields = json.loads(path.read_text())
        recorded = fields.pop(_DIGEST)
        found = _digest(fields)
        checkpoint = Checkpoint(**fields)
    except FileNotFoundError as error:
        raise ArtifactError(f"{path} is missing") from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ArtifactError(f"{path} cannot be read ({type(error).__name__}: {error})") from error
    if found != recorded:
        raise ArtifactError(f"{path} has SHA-256 {short(found)}, recorded in it is {str(recorded)[:16]}")
    return checkpoint


def _digest(fields: Mapping[str, object]) -> str:
    return hashlib.sha256(canonical_json(fields).encode()).hexdigest()
