"""``best.yaml``: what reproduces the best trial of a sweep."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from flows.sweep.ledger import Row
from lineage.errors import ConfigError


def best_yaml(row: Row, shared: Sequence[str], config_dir: Path | None) -> str:
    """The file's text.

    Args:
        shared: the overrides of every trial.
    """
    told = {
        "trial": row.number,
        "values": dict(row.values),
        **({"config_dir": str(config_dir.absolute())} if config_dir else {}),
        "overrides": [*shared, *(f"{field}={value}" for field, value in row.params.items())],
    }
    text: str = yaml.safe_dump(told, sort_keys=False, width=10_000)
    return "# posttrain run --overrides-from THIS_FILE\n" + text


def read_best(path: Path) -> tuple[list[str], Path | None]:
    """The overrides of such a file, and the folder of the groups that they were composed with.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    try:
        told = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"--overrides-from {path}: cannot be read ({error}); give the best.yaml of a sweep"
        ) from error
    overrides = told.get("overrides") if isinstance(told, Mapping) else None
    if not isinstance(overrides, list) or not all(isinstance(word, str) for word in overrides):
        raise ConfigError(
            f"--overrides-from {path}: holds no list of overrides; give the best.yaml of a sweep, "
            "or YAML of the form: overrides: [key=value, ...]"
        )
    config_dir = told.get("config_dir")
    return overrides, Path(str(config_dir)) if config_dir else None
