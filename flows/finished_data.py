"""Data stages that are finished, for ``posttrain data``."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from flows.declare.store_root import store_root
from lineage.artifact import DATA, Kind
from lineage.errors import ConfigError
from lineage.graph.index import Index
from lineage.graph.refs import resolve
from lineage.sources import local_paths
from lineage.store import is_store
from tasks.data.examine import Examined, finished
from tasks.data.preparing.report import REPORT


def finished_data(words: Sequence[str], config_dir: Path | None) -> Examined | None:
    """What a data stage of the store left behind, where the one word names it; None: it names rows, or nothing."""
    word, *others = words
    if others or ":" in word or local_paths(word) or not is_store(store := store_root([], config_dir)):
        return None
    with Index(store) as index, suppress(ConfigError):
        entry = resolve(word, index).entry
        manifest = entry.manifest() if entry else None
        if entry and manifest and manifest.produces in DATA and (entry.output / REPORT).exists():
            return finished(word, Kind(manifest.produces), entry.output)
    return None
