"""The folder of a sweep, ``<store>/sweeps/<name>/``: which sweep it is of, and what is remembered of every trial."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from filelock import FileLock

from flows.declare.sweep import Sweep
from flows.sweep.trial import Outcome, Trial, TrialState
from lineage.errors import ConfigError
from lineage.files import append_jsonl, atomic_write, read_jsonl

FOLDER = "sweeps"  # in the store
_IDENTITY = "sweep.json"
_TRIALS = "trials.jsonl"


def folder_lock(folder: Path) -> FileLock:
    """Held by whoever writes there: several processes may be at one sweep."""
    return FileLock(folder / "lock")


def sweep_folder(
    store: Path, pipeline: str, sweep: Sweep, params: Mapping[str, str], stages: Iterable[tuple[str, str]]
) -> Path:
    """Makes the folder, or finds it where this sweep was begun before.

    Args:
        params: field -> values of all that varies.
        stages: names and fingerprints of those of its trials, of a sampler's of some; so another sweep is one of other
            data or other settings, wherever these are stated, and none is one that only runs otherwise.

    Raises:
        ConfigError: a sweep of that name tries something else.
    """
    tried = {
        "pipeline": pipeline,
        "params": dict(params),
        **{key: value for key, value in asdict(sweep).items() if key in ("objectives", "sampler", "pruning")},
        "stages": sorted(f"{name}/{fingerprint}" for name, fingerprint in set(stages)),
    }
    digest = sha256(json.dumps(tried, sort_keys=True).encode()).hexdigest()
    folder = store / FOLDER / (sweep.name or f"{pipeline}-{digest[:8]}")
    folder.mkdir(parents=True, exist_ok=True)
    with folder_lock(folder):
        path = folder / _IDENTITY
        if not path.exists():
            atomic_write(path, json.dumps(tried, indent=2) + "\n")
        begun = json.loads(path.read_text())
    differing = next((key for key in tried if begun.get(key) != tried[key]), None)
    if differing == "stages":
        raise ConfigError(
            f"sweep.name={sweep.name}: {folder} holds a sweep on other data or with other settings of its stages; "
            "take another sweep.name, or remove that folder"
        )
    if differing:
        raise ConfigError(
            f"sweep.name={sweep.name}: {folder} holds a sweep with {differing}={json.dumps(begun.get(differing))}, "
            f"this one has {json.dumps(tried[differing])}; take another sweep.name, or remove that folder"
        )
    return folder


@dataclass(frozen=True, kw_only=True)
class Row:
    """One trial that ended.

    Args:
        values: objective -> number; empty unless complete.
        metrics: ``STAGE/METRIC`` -> number, of every stage that was finished.
        fingerprints: stage -> fingerprint of what was finished.
    """

    number: int
    params: Mapping[str, str]
    state: TrialState
    seconds: float
    cause: str
    values: Mapping[str, float]
    metrics: Mapping[str, float]
    fingerprints: Mapping[str, str]


def row_of(trial: Trial, outcome: Outcome) -> Row:
    """What is remembered of a trial."""
    return Row(
        number=trial.number, params=dict(trial.params), state=outcome.state, seconds=outcome.seconds,
        cause=outcome.cause, values=dict(outcome.values), metrics=outcome.metrics,
        fingerprints={stage: each.fingerprint for stage, each in outcome.manifests.items()},
    )  # fmt: skip


class Ledger:
    """The rows by number; a line is appended for every trial that ends, and the last one of a number counts.

    Whoever adds holds the lock of the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / _TRIALS

    def add(self, row: Row) -> None:
        if row in self.rows():
            return
        append_jsonl(self._path, asdict(row))

    def rows(self) -> list[Row]:
        """In the order of their numbers."""
        found = {row.number: row for row in read_jsonl(self._path, Row)}
        return [found[number] for number in sorted(found)]
