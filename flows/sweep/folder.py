"""The folder of a sweep, ``<store>/sweeps/<name>/``: what it tries, and the results of its trials.

- ``sweep.json``: what is tried; ``trials.jsonl``: the results, from which ``flows/sweep/files.py`` writes the others.
- ``study.db``, ``running/``: of a sampler: Optuna's study, and the locks of running trials.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Literal

import yaml
from filelock import FileLock

from flows.declare.sweep import Sweep
from lineage.errors import ConfigError
from lineage.filesystem.files import atomic_write, read_jsonl

FOLDER = "sweeps"  # in the store

TrialState = Literal["complete", "pruned", "failed"]


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """The end of a trial: a line of ``trials.jsonl``.

    Args:
        params: field -> value as an override writes it.
        seconds: of its own finished stages, whichever run produced them; waiting excluded.
        cause: why it failed or was pruned.
        values: objective -> value; empty unless complete.
        metrics: ``STAGE/METRIC`` -> number, of every finished stage.
        fingerprints: of every finished stage.
    """

    number: int
    params: Mapping[str, str]
    state: TrialState
    seconds: float = 0.0
    cause: str = ""
    values: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    fingerprints: Mapping[str, str] = field(default_factory=dict)


def trial_results(folder: Path) -> list[TrialResult]:
    """Results of all ended trials by number; of repeated numbers the last."""
    found = {result.number: result for result in read_jsonl(folder / "trials.jsonl", TrialResult)}
    return [found[number] for number in sorted(found)]


def sweep_folder(
    store: Path, pipeline: str, sweep: Sweep, params: Mapping[str, str], stages: Iterable[tuple[str, str]]
) -> Path:
    """Creates the folder, or finds that of the same sweep.

    Args:
        params: field -> values, of all fields that vary.
        stages: names and fingerprints of the trials' stages (for a sampler, of some): other data or settings are
            another sweep, other resources are not.

    Raises:
        ConfigError: a sweep of that name tries something else.
    """
    settings = asdict(sweep)
    tried = {
        "pipeline": pipeline, "params": dict(params),
        **{key: settings[key] for key in ("objectives", "sampler", "pruning")},
        "stages": sorted(f"{name}/{fingerprint}" for name, fingerprint in set(stages)),
    }  # fmt: skip
    digest = sha256(json.dumps(tried, sort_keys=True).encode()).hexdigest()
    folder = store / FOLDER / (sweep.name or f"{pipeline}-{digest[:8]}")
    folder.mkdir(parents=True, exist_ok=True)
    with folder_lock(folder):
        path = folder / "sweep.json"
        if not path.exists():
            atomic_write(path, json.dumps(tried, indent=2) + "\n")
        before = json.loads(path.read_text())
    differing = [key for key in tried if before.get(key) != tried[key]]
    if differing:
        raise ConfigError(
            f"sweep.name={sweep.name}: {folder} holds another sweep, as its sweep.json says: it differs in "
            f"{', '.join(differing)}; choose another sweep.name, or remove that folder"
        )
    return folder


def folder_lock(folder: Path) -> FileLock:
    """Held to change the folder, which several processes may share."""
    return FileLock(folder / "lock", thread_local=False)


def read_best(path: Path) -> tuple[list[str], Path | None]:
    """The overrides and ``--config-dir`` in a ``best.yaml``.

    Raises:
        ConfigError: it cannot be read, or has another content.
    """
    try:
        held = yaml.safe_load(path.read_text())
        cli_args, config_dir = held["overrides"], held.get("config_dir")
        if not isinstance(cli_args, list) or not all(isinstance(word, str) for word in cli_args):
            raise TypeError(f"overrides: {cli_args}")
    except (OSError, ValueError, yaml.YAMLError, TypeError, KeyError) as error:
        what = str(error).partition("\n")[0]
        raise ConfigError(
            f"--overrides-from {path}: holds no list of overrides ({what}); give the best.yaml of a sweep, "
            "or YAML of the form: overrides: [key=value, ...]"
        ) from error
    return cli_args, Path(config_dir) if config_dir else None


def overrides(params: Mapping[str, str]) -> list[str]:
    """Parameters as overrides."""
    return [f"{field}={value}" for field, value in params.items()]


def short_names(fields: Iterable[str]) -> dict[str, str]:
    """Field -> its shortest unique suffix, for headings."""
    endings = {field: [field.split(".", start)[-1] for start in range(field.count("."), -1, -1)] for field in fields}
    counts = Counter(ending for each in endings.values() for ending in each)
    return {field: next((each for each in found if counts[each] == 1), field) for field, found in endings.items()}
