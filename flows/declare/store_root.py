"""The location of the store, for commands that read only the record. Imports no Hydra."""

from collections.abc import Sequence
from pathlib import Path

import yaml

from lineage.store import require_store, store_path

CONFIG = Path(__file__).parents[2] / "conf" / "config.yaml"


_KEY = "store="


def store_root(overrides: Sequence[str], config_dir: Path | None = None) -> Path:
    """The store of the configuration; skips Hydra, which takes half a second, if only ``store=`` is overridden.

    Raises:
        ConfigError: an override is wrong.
    """
    if config_dir is None and all(word.startswith(_KEY) and not set(word) & set("\"'${}[],") for word in overrides):
        configured = [word.removeprefix(_KEY) for word in overrides]
        root = configured[-1] if configured else str(yaml.safe_load(CONFIG.read_text())["store"])
        return store_path(root)
    from flows.declare.config import load_pipeline

    return load_pipeline(overrides, config_dir).store


def asked_store(overrides: Sequence[str], config_dir: Path | None = None) -> Path:
    """``store_root`` for read-only commands; raises ``ConfigError`` if there is no store."""
    return require_store(store_root(overrides, config_dir))
