"""The format of a source, told from its first rows."""

from collections.abc import Iterator
from itertools import chain

from lineage.artifact import Kind, Source
from lineage.errors import DataError
from tasks.data.formats.detect import Detected, detect
from tasks.data.formats.values import BadRowError, Fields
from tasks.data.preparing.convert_rows import templated
from tasks.data.reading.chunk import Chunk, Row
from tasks.data.reading.read import read_chunks

SAMPLE = 1000  # rows that are looked at
Opened = tuple[Detected | None, Iterator[Chunk]]  # how the rows of a source are read, and all of them


def detect_source(source: Source, template: str | None = None) -> Opened:
    """How the rows of a source are read, and all of them; None: not one of the first rows can be.

    Args:
        template: of prompts; it makes columns that the format reads.
    Raises:
        DataError: there are no rows, no format fits them, or several do.
    """
    chunks = read_chunks(source)
    looked_at: list[Chunk] = []
    count = 0
    sample: list[Fields] = []
    for chunk in chunks:
        looked_at.append(chunk)
        for entry in chunk.rows():
            count += 1
            if isinstance(entry, Row) and len(sample) < SAMPLE:
                sample += _templated(entry.fields, template)
        if count >= SAMPLE:
            break
    if not count:
        raise DataError(f'{source.path}: no rows; give at least one row, such as a line {{"text": "..."}}')
    detected = detect(sample, source.path, columns=source.columns, stated=source.format) if sample else None
    return detected, chain(looked_at, chunks)


def require_kind(detected: Detected, source: Source, kind: Kind) -> None:
    """Refuses rows that another stage reads."""
    found = detected.format.kind
    if found != kind:
        splits = (found, kind) == (Kind.PREFERENCES, Kind.UNPAIRED)
        after = " and conf/stage/unpair.yaml after it, which splits pairs" if splits else ""
        raise DataError(
            f"{source.path}: detected {detected.name} ({detected.evidence}), which gives {found}; this stage makes "
            f"{kind}; use conf/stage/{found}.yaml for it{after}, or say with format=NAME how else it is read"
        )


def _templated(fields: Fields, template: str | None) -> list[Fields]:
    try:
        return [templated(fields, template)]
    except BadRowError:  # named when all rows are read
        return []
