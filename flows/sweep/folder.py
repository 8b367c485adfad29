"""The folder of a sweep, ``<store>/sweeps/<name>/``: one space, whatever is continued or run again."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

from filelock import FileLock

from flows.sweep.settings import Sweep
from lineage.errors import ConfigError

FOLDER = "sweeps"  # in the store
_FILE = "sweep.json"
# Keys of words that change how trials run, never what they try; `sweep` itself is told apart by its fields.
_NOT_TRIED = ("sweep", "resources", "tracking", "store", "code_drift")
_NUMBER_AND_PACE = ("name", "params", "num_trials", "parallel", "by_step")  # params: told with the command line's


def sweep_folder(store: Path, pipeline: str, sweep: Sweep, params: Mapping[str, str], words: Sequence[str]) -> Path:
    """Makes the folder, or finds it where this sweep was begun before.

    Args:
        params: field -> values of all that varies.
        words: the overrides that all trials share.

    Raises:
        ConfigError: a sweep of that name tries something else.
    """
    tried = _tried(pipeline, sweep, params, words)
    digest = sha256(json.dumps(tried, sort_keys=True).encode()).hexdigest()
    folder = store / FOLDER / (sweep.name or f"{pipeline}-{digest[:8]}")
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"{_FILE}.lock"):
        path = folder / _FILE
        if not path.exists():
            draft = path.with_suffix(".tmp")
            draft.write_text(json.dumps(tried, indent=2) + "\n")
            draft.replace(path)
        begun = json.loads(path.read_text())
    differing = [key for key in tried if begun.get(key) != tried[key]]
    if differing:
        key = differing[0]
        raise ConfigError(
            f"sweep.name={sweep.name}: {folder} holds a sweep with {key}={json.dumps(begun.get(key))}, "
            f"this one has {json.dumps(tried[key])}; take another sweep.name, or remove that folder"
        )
    return folder


def _tried(pipeline: str, sweep: Sweep, params: Mapping[str, str], words: Sequence[str]) -> dict[str, object]:
    """All that says which trials there are and how they are judged."""
    fields = {key: value for key, value in asdict(sweep).items() if key not in _NUMBER_AND_PACE}
    shared = [word for word in words if word.lstrip("+~").partition("=")[0].split(".")[0] not in _NOT_TRIED]
    return {"pipeline": pipeline, "params": dict(params), "words": shared, **fields}
