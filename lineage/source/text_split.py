"""What the names of files say; splits of plain text into documents: by line, by paragraph, or the whole file."""

import re
from collections.abc import Sequence
from glob import has_magic
from itertools import takewhile
from pathlib import Path, PurePath
from typing import IO, Literal
from urllib.parse import unquote

from lineage.errors import ConfigError

SplitBy = Literal["line", "paragraph", "document"]

TEXT_SUFFIXES = (".txt", ".text")
_SPLIT_SUFFIXES = (*TEXT_SUFFIXES, ".md")  # ``split_by`` applies to these; Markdown defaults to whole documents
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
NOTE = re.compile(r"(?:readme|licen[cs]e|notice|changelog)(?:[._-][a-z]{2})?", re.IGNORECASE)  # not data
_HEAD_BYTES = 2**20
BLANK_LINE = re.compile(rb"\n[^\S\n]*\n")
_PARTITION, _NULL = re.compile(r"([^\W\d]\w*)=(.+)"), "__HIVE_DEFAULT_PARTITION__"
_PER_FILE = "per file"  # in a fingerprint: some of the files are split by paragraph and others by line


def data_suffix(path: PurePath) -> str:
    """The suffix of a file name without that of its compression: ``.jsonl`` for ``rows.jsonl.gz``."""
    return (PurePath(path.stem) if compression_of(path) else path).suffix.lower()


def partitions(file: PurePath, source: PurePath) -> dict[str, str | None]:
    """The columns that directories below a source hold, as in ``label=1/part-0.parquet``.

    Spark, DuckDB and Polars part tables so, and write files that lack these columns.

    Args:
        source: the path of the source, which may be a glob.
    """
    fixed = sum(1 for _ in takewhile(lambda part: not has_magic(part), source.parts))
    found = filter(None, map(_PARTITION.fullmatch, file.parts[fixed:-1]))
    return {match[1]: None if match[2] == _NULL else unquote(match[2]) for match in found}


def compression_of(path: PurePath) -> str | None:
    """The compression of a file, from its suffix."""
    return COMPRESSIONS.get(path.suffix.lower())


def detected_split(path: Path) -> SplitBy:
    """By paragraph if the first MB of a text has a blank line between two others, else by line.

    An unreadable file counts as split by line; the error is reported when its rows are read.
    """
    try:
        with path.open("rb") as file:
            return detected_split_of(file, compression_of(path))
    except (OSError, ValueError):  # the second is Arrow's, of damaged bytes
        return "line"


def detected_split_of(file: IO[bytes], compression: str | None) -> SplitBy:
    """``detected_split`` for an open file.

    Raises:
        OSError, ValueError: it cannot be read or decompressed.
    """
    if compression:
        import pyarrow as pa

        with pa.CompressedInputStream(pa.PythonFile(file, mode="r"), compression) as stream:
            head: bytes = stream.read(_HEAD_BYTES)
    else:
        head = file.read(_HEAD_BYTES)
    return "paragraph" if BLANK_LINE.search(head.strip()) else "line"


def is_text(path: PurePath, *, in_directory: bool) -> bool:
    """Whether a file is plain text data, and not a README or licence beside other data."""
    return data_suffix(path) in TEXT_SUFFIXES and not (in_directory and NOTE.fullmatch(path.stem))


def split_identity(splits: Sequence[SplitBy]) -> dict[str, object]:
    """The detected splits of a source's files, as they enter its fingerprint.

    Splitting by line adds nothing: it was once the only split.
    """
    if "paragraph" not in splits:
        return {}
    return {"split_by": "paragraph" if set(splits) == {"paragraph"} else _PER_FILE}


def check_split(name: str, path: str, split_by: SplitBy | None, files: Sequence[PurePath]) -> None:
    """Checks that a source with ``split_by`` has a file of plain text.

    Args:
        path, files: of the source.
    """
    if split_by is not None and not any(data_suffix(file) in _SPLIT_SUFFIXES for file in files):
        raise ConfigError(
            f"sources.{name}.split_by={split_by}: {path} has no file of plain text; "
            f"{', '.join(_SPLIT_SUFFIXES)} are split by it; remove split_by"
        )
