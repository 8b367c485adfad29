"""What the REF of ``impact`` stands for: besides an artifact or a source, a file, a row or a label."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lineage.artifact import SOURCE
from lineage.digest import digest_file
from lineage.errors import ConfigError
from lineage.graph.index import Index
from lineage.graph.places import parts_below
from lineage.graph.refs import resolve
from lineage.graph.row_search import FoundRow, find_rows

LABEL = "label:"
FORMS = "impact also takes label:NAME, source:NAME#ROW-ID, source:NAME#TEXT, and the path of a data file"


@dataclass(frozen=True, kw_only=True)
class Meant:
    """The nodes that a REF stands for.

    Args:
        words: what they are, for people.
        roots: everything made from these is affected.
        within: artifacts that are affected themselves: the data that holds a row.
        sources: the sources that would have to change.
        files: that hold the row or are the file, as they were read.
    """

    words: str
    roots: list[str]
    within: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    rows: list[FoundRow] = field(default_factory=list)


def meant_by(ref: str, index: Index) -> Meant:
    """Finds what a REF of ``impact`` stands for.

    Raises:
        ConfigError: nothing bears that name.
    """
    if not ref.strip():
        raise ConfigError(f"REF is empty ({ref!r}), and would be everything; name an artifact or a source; {FORMS}")
    if ref.startswith(LABEL):
        return _label(ref.removeprefix(LABEL), index)
    source, hash_sign, wanted = ref.partition("#")
    if source.startswith(SOURCE) and hash_sign:
        return _rows(source, wanted, index)
    if source.startswith(SOURCE) and "@" not in source and index.sources(source.removeprefix(SOURCE)):
        nodes = index.sources(source.removeprefix(SOURCE))
        versions = f", all {len(nodes)} versions that were ever read" if len(nodes) > 1 else ""
        return Meant(words=source + versions, roots=nodes, sources=nodes)
    path = os.path.abspath(os.path.expanduser(ref))
    may_be_file = os.sep in ref or os.path.exists(path)
    nodes = _reading(path, index) if may_be_file and not parts_below(index.store, path) else []
    if nodes:
        return Meant(words=f"the file {path}", roots=nodes, sources=nodes, files=[path])
    try:
        node = resolve(ref, index).node
    except ConfigError as error:
        raise ConfigError(f"{error}; {FORMS}") from error
    return Meant(words=node, roots=[node], sources=[node] if node.startswith(SOURCE) else [])


def _label(label: str, index: Index) -> Meant:
    nodes = index.sources_with_label(label)
    if not nodes:
        known = sorted({each for node in index.sources() for each in index.labels(node)})
        raise ConfigError(
            f"{LABEL}{label}: no source in {index.store} was recorded with that label; "
            f"labels there: {', '.join(known) or 'none'}; label a source with sources.NAME.labels=[...]"
        )
    return Meant(words=f"the label {label}", roots=nodes, sources=nodes)


def _rows(source: str, wanted: str, index: Index) -> Meant:
    if not wanted:
        raise ConfigError(f"{source}#: a row is named by its id or by a text in it, such as {source}#some text")
    rows = find_rows(index, source, wanted)
    held = sorted({artifact for row in rows for artifact in row.sides})
    trained = sorted({artifact for row in rows for artifact, side in row.sides.items() if side == "train"})
    parents = {parent for artifact in held for parent, _ in index.parents(artifact)}
    sources = sorted(parent for parent in parents if parent.startswith(source.partition("@")[0] + "@"))
    words = f"row {rows[0].row_id} of {source}" if len(rows) == 1 else f"{len(rows)} rows of {source}"
    measured = [each.id for each in index.descendants(held) if each.kind in ("report", "verdict")]
    files = sorted({file for node in sources for file in _files(node, index)})
    return Meant(words=words, roots=trained, within=[*held, *measured], sources=sources, files=files, rows=rows)


def _files(source: str, index: Index) -> Iterator[str]:
    for record in index.records(source):
        if record.source:
            yield from record.source.files


def _reading(path: str, index: Index) -> list[str]:
    """The sources that a file or directory is part of: by its path, or else by what it holds now."""
    named = [node for node in index.sources_that_say(path) if _is_part(path, node, index)]
    if named or not os.path.isfile(path):
        return named
    return index.sources_that_say(digest_file(Path(path)))


def _is_part(path: str, source: str, index: Index) -> bool:
    recorded = [record.source.path for record in index.records(source) if record.source]
    return any(each == path or each.startswith(path + os.sep) for each in [*recorded, *_files(source, index)])
