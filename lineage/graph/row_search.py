"""Finds rows in the data artifacts that were made of a source: by id, or by a text that they hold."""

import json
import logging
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lineage.artifact import DATA, SOURCE
from lineage.errors import ArtifactError, ConfigError
from lineage.fingerprint import without_nones
from lineage.graph.index import Index
from lineage.graph.index_queries import Indexed

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

SIDES = ("train", "held_out")
_ROW_ID = re.compile("[0-9a-f]{16}(-[0-9]+)?")
_SHOWN = 120  # characters of a row


@dataclass(frozen=True, kw_only=True)
class FoundRow:
    """A row, and on which side it is of each data artifact that has it: ``train`` or ``held_out``."""

    row_id: str
    text: str
    sides: dict[str, str] = field(default_factory=dict)


def find_rows(index: Index, source: str, wanted: str) -> list[FoundRow]:
    """Every row of that id (and its duplicates) or with that text, of all that was ever read from a source.

    Args:
        source: its name, or its node for one version of it.

    Raises:
        ConfigError: no such source, no such row, or none in what can be searched of it.
    """
    nodes = [source] if "@" in source else index.sources(source.removeprefix(SOURCE))
    made = [index.artifact(child) for node in nodes for child, _ in index.children(node)]
    data = [artifact for artifact in made if artifact and artifact.kind in DATA]
    if not data:
        raise ConfigError(
            f"{source}: no data stage in {index.store} has read rows of that source; there are: "
            f"{', '.join(sorted({node.rpartition('@')[0] for node in index.sources()})) or 'none'}"
        )
    found: dict[str, FoundRow] = {}
    for artifact in data:
        for side in SIDES:
            for row_id, text in _rows(index, artifact, side, wanted):
                found.setdefault(row_id, FoundRow(row_id=row_id, text=text)).sides[artifact.id] = side
    unsearched = [each.id for each in data if not any(_file(index, each.id, side).exists() for side in SIDES)]
    if unsearched and not found:
        raise ConfigError(
            f"{source}#{wanted}: nobody knows: {', '.join(unsearched[:8])} cannot be searched, for there is no "
            f"{' or '.join(f'{side}.parquet' for side in SIDES)} in its output; search its source yourself, and ask "
            f"of all of it: posttrain impact {unsearched[0]}"
        )
    if unsearched:
        logger.warning("artifacts=%s searched=no: without rows in parquet; may hold it too", ",".join(unsearched[:8]))
    if not found:
        raise ConfigError(
            f"{source}#{wanted}: no row of that id or with that text in {', '.join(each.id for each in data[:8])}; "
            "a row id is 16 hexadecimal digits, a text is found as it is written, capitals and all"
        )
    return list(found.values())


def row_sides(index: Index, artifact: str) -> dict[str, str]:
    """Row id -> side, of every row of a data artifact; empty where it has no such rows."""
    sides = {}
    for side in SIDES:
        file = _file(index, artifact, side)
        if file.exists():
            import pyarrow.parquet as pq  # a fifth of a second, in vain where there are none

            sides.update(dict.fromkeys(pq.read_table(file, columns=["row_id"])["row_id"].to_pylist(), side))
    return sides


def _file(index: Index, artifact: str, side: str) -> Path:
    return index.entry(artifact).output / f"{side}.parquet"


def _rows(index: Index, artifact: Indexed, side: str, wanted: str) -> list[tuple[str, str]]:
    """Id and text of the rows found in one file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = _file(index, artifact.id, side)
    if not file.exists():  # data of a method that writes no such rows
        return []
    found = []
    try:
        for batch in pq.ParquetFile(file).iter_batches():
            ids = batch.column("row_id")
            places = _with_id(ids, wanted) if _ROW_ID.fullmatch(wanted) else _with_text(batch.columns[1:], wanted)
            found += [(ids[place].as_py(), _text(batch.slice(place, 1).to_pylist()[0])) for place in sorted(places)]
    except (pa.ArrowException, KeyError, OSError) as error:
        raise ArtifactError(
            f"{file}: cannot be read as rows ({error}); see what changed with: posttrain verify {artifact.id}"
        ) from error
    return found


def _with_id(ids: "pa.Array", wanted: str) -> set[int]:
    """Places of a row and of its duplicates: theirs are numbered, ``0123456789abcdef-1``."""
    import pyarrow.compute as pc

    return set(pc.indices_nonzero(pc.or_(pc.equal(ids, wanted), pc.starts_with(ids, wanted + "-"))).to_pylist())


def _with_text(columns: "list[pa.Array]", wanted: str) -> set[int]:
    """Places of the rows that hold a text in any string, however deep."""
    import pyarrow as pa
    import pyarrow.compute as pc

    found: set[int] = set()
    for column in columns:
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            found |= set(pc.indices_nonzero(pc.match_substring(column, wanted)).to_pylist())
        elif pa.types.is_struct(column.type):
            found |= _with_text(column.flatten(), wanted)
        elif pa.types.is_list(column.type):
            rows = pc.list_parent_indices(column)
            found |= {rows[place].as_py() for place in _with_text([column.flatten()], wanted)}
    return found


def _text(row: dict[str, object]) -> str:
    """The beginning of a row for people."""
    values = without_nones({name: value for name, value in row.items() if name not in ("row_id", "kind")})
    assert isinstance(values, dict)
    whole = values.get("text")
    text = whole if isinstance(whole, str) else json.dumps(values, ensure_ascii=False)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
