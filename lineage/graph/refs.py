"""REFs: the ways in which a user names an artifact or a source."""

import logging
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from lineage.artifact import SOURCE
from lineage.errors import ConfigError
from lineage.fingerprint import short
from lineage.graph.index import Index
from lineage.graph.places import artifact_at, node_key, parts_below, view_at
from lineage.store import Entry

logger = logging.getLogger(__name__)

FORMS = (
    "a fingerprint or at least 4 digits of one, PIPELINE/STAGE, STAGE, STAGE@DIGITS, the path of an output, "
    "alias:NAME, source:NAME"
)
_ALIAS = "alias:"
_DIGITS = re.compile("[0-9a-f]{4,64}")
_MOST_NAMED = 8  # candidates in one message


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a REF names.

    Args:
        node: its id in the graph, ``sft@0123456789abcdef`` or ``source:corpus@0123456789abcdef``.
        entry: its directory; None: it is a source.
    """

    node: str
    entry: Entry | None

    @property
    def name(self) -> str:
        return self.node.rpartition("@")[0]


def resolve(ref: str, index: Index) -> Found:
    """Resolves a REF (ConfigError: no or several things have that name; the message names similar ones)."""
    if index.is_empty():
        raise ConfigError(
            f"{ref}: the store {index.store} holds no finished artifact: nothing is trained here yet; posttrain run "
            "first, or cd into your project"
        )
    nodes = _candidates(ref, index)
    if len(nodes) > 1:
        raise ConfigError(f"{ref} names {len(nodes)} things: {_some(nodes)}; name one of them")
    if not nodes:
        raise _unknown(ref, index)
    (node,) = nodes
    return Found(node=node, entry=None if node.startswith(SOURCE) else index.entry(node))


def known_names(index: Index, kinds: Collection[str] = ()) -> str:
    """What a REF may name, for messages: the stages with an artifact, of some kinds of output if any are given."""
    places = [place for place in index.places() if not kinds or _kind(place, index) in kinds]
    return _some(["/".join(place) for place in places] + [_ALIAS + alias for alias in sorted(index.aliases)])


def _kind(place: tuple[str, str], index: Index) -> str:
    newest = index.newest(*place)
    return newest.kind if newest else ""


def _candidates(ref: str, index: Index) -> list[str]:
    if ref.startswith(_ALIAS):
        return _by_alias(ref.removeprefix(_ALIAS), index)
    name, at, digits = ref.rpartition("@")
    if at and _DIGITS.fullmatch(digits):
        return [node for node in _by_digits(digits, index) if node.startswith(name + "@")]
    if ref.startswith(SOURCE):
        return index.sources(ref.removeprefix(SOURCE))[-1:]
    if _DIGITS.fullmatch(ref):
        return _one_per_artifact(_by_digits(ref, index)) or _by_stage(ref, index)
    return _by_path(ref, index) or _by_place(ref, index) or _by_stage(ref, index)


def _by_stage(ref: str, index: Index) -> list[str]:
    """PIPELINE/STAGE of the pipeline that ran a stage of that name last; a newer artifact of it is reported."""
    found = [index.newest(pipeline, stage) for pipeline, stage in index.places() if stage == ref]
    newest = max((each for each in found if each), key=lambda each: each.end, default=None)
    if newest is None:
        return []
    nodes = _by_place(f"{newest.pipeline}/{ref}", index)
    if nodes != [newest.id]:
        logger.warning(
            "%s is %s, of %s as declared; newer, of other settings: %s", ref, *nodes, newest.pipeline, newest.id
        )
    return nodes


def _by_alias(alias: str, index: Index) -> list[str]:
    if alias not in index.aliases:
        raise ConfigError(
            f"{_ALIAS}{alias}: no such alias; aliases now: {', '.join(sorted(index.aliases)) or 'none'}; "
            f"set it with: posttrain promote REF --alias {alias}"
        )
    return [index.aliases[alias]]


def _by_digits(digits: str, index: Index) -> list[str]:
    nodes = index.with_prefix(short(digits))
    return nodes if len(digits) <= 16 else [node for node in nodes if _fingerprint(node, index).startswith(digits)]


def _fingerprint(node: str, index: Index) -> str:
    artifact = index.artifact(node)
    if artifact:
        return artifact.fingerprint
    records = index.records(node)
    return records[0].fingerprint if records else ""


def _one_per_artifact(nodes: list[str]) -> list[str]:
    """Drops sources that are artifacts of this store (a champion), which share the artifact's fingerprint."""
    artifacts = {node.rpartition("@")[2] for node in nodes if not node.startswith(SOURCE)}
    return [node for node in nodes if not node.startswith(SOURCE) or node.rpartition("@")[2] not in artifacts]


def _by_path(ref: str, index: Index) -> list[str]:
    path = os.path.expanduser(ref)
    place = artifact_at(index.store, path)
    if place:
        node = node_key(*place)
        return [node] if index.artifact(node) else []
    view = view_at(index.store, path)
    return _by_place("/".join(view), index) if view else []


def _by_place(ref: str, index: Index) -> list[str]:
    pipeline, slash, stage = ref.partition("/")
    if not slash or not stage or "/" in stage:
        return []
    view = _viewed(index.store / "pipelines" / pipeline / stage, index)
    newest = index.newest(pipeline, stage)
    return [view] if view else [newest.id] if newest else []


def _viewed(directory: Path, index: Index) -> str | None:
    """The artifact that the view of a pipeline shows, if it is in the store."""
    manifest = Entry(directory).readable_manifest()
    node = node_key(manifest.stage, manifest.fingerprint) if manifest else None
    return node if node and index.artifact(node) else None


def _unknown(ref: str, index: Index) -> ConfigError:
    names = ["/".join(place) for place in index.places()]
    names += sorted({source.rpartition("@")[0] for source in index.sources()})
    names += [_ALIAS + alias for alias in sorted(index.aliases)]
    last = ref.rpartition("/")[2]
    near = get_close_matches(ref, names, n=3, cutoff=0.6) or [name for name in names if name.endswith("/" + last)]
    inside = (
        " (a path of this store, but no finished artifact)" if parts_below(index.store, os.path.expanduser(ref)) else ""
    )
    there = f"did you mean {_some(near)}?" if near else f"there are: {_some(names)}"
    return ConfigError(f"{ref}: no such artifact or source in {index.store}{inside}; accepted: {FORMS}; {there}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
