"""Names of nodes, the artifact that a path of the store belongs to, and the index's row of an artifact."""

import os
from pathlib import Path
from typing import NamedTuple

from lineage.fingerprint import short
from lineage.store import ENTRY_NAME, RESERVED


def node_key(name: str, fingerprint: str) -> str:
    """The id of a node of the graph: ``sft@0123456789abcdef``."""
    return f"{name}@{short(fingerprint)}"


def artifact_at(root: Path, path: str) -> tuple[str, str] | None:
    """Stage and first 16 digits of the fingerprint for a path at or below ``<root>/<stage>/<digits>``."""
    parts = parts_below(root, path)
    if len(parts) < 2 or parts[0] in RESERVED or not ENTRY_NAME.fullmatch(parts[1]):
        return None
    return parts[0], parts[1]


def view_at(root: Path, path: str) -> tuple[str, str] | None:
    """Pipeline and stage for a path at or below ``<root>/pipelines/<pipeline>/<stage>``."""
    parts = parts_below(root, path)
    return (parts[1], parts[2]) if len(parts) >= 3 and parts[0] == "pipelines" else None


def parts_below(root: Path, path: str) -> tuple[str, ...]:
    """The path components below a directory, links resolved if needed; empty: the path is not below it."""
    for way in (os.path.abspath, os.path.realpath):
        top, below = way(root), way(path)
        if below.startswith(top + os.sep):
            return tuple(below[len(top) + 1 :].split(os.sep))
    return ()


class Indexed(NamedTuple):
    """A finished artifact as the index stores it; the manifest holds the rest.

    Args:
        id: ``stage@`` and the first 16 digits of the fingerprint.
        kind: of the output; empty in manifests of schema 1.
        start, end: seconds since the epoch.
    """

    id: str
    stage: str
    fingerprint: str
    pipeline: str
    method: str
    kind: str
    start: float
    end: float
