"""How files of plain text become documents: by line, by paragraph, or as a whole."""

import re
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import IO, Literal

from lineage.errors import ConfigError

SplitBy = Literal["line", "paragraph", "document"]

TEXT_SUFFIXES = (".txt", ".text")
_SPLIT_SUFFIXES = (*TEXT_SUFFIXES, ".md")  # what ``split_by`` is read of; Markdown is a document where it is not set
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
NOTE = re.compile(r"(?:readme|licen[cs]e|notice|changelog)(?:[._-][a-z]{2})?", re.IGNORECASE)  # no data
_HEAD_BYTES = 2**20
BLANK_LINE = re.compile(rb"\n[^\S\n]*\n")
_PER_FILE = "per file"  # in a fingerprint: some of the files are split by paragraph and others by line


def data_suffix(path: PurePath) -> str:
    """What a file's name says of its rows, without its compression: ``.jsonl`` of ``rows.jsonl.gz``."""
    return (PurePath(path.stem) if compression_of(path) else path).suffix.lower()


def compression_of(path: PurePath) -> str | None:
    """What packs a file, by its name."""
    return COMPRESSIONS.get(path.suffix.lower())


def detected_split(path: Path) -> SplitBy:
    """By paragraph where the first MB of a text has a blank line between two others, else by line.

    One that cannot be read is by line: reading all of it reports the error.
    """
    try:
        with path.open("rb") as file:
            return detected_split_of(file, compression_of(path))
    except (OSError, ValueError):  # the second is Arrow's, of damaged bytes
        return "line"


def detected_split_of(file: IO[bytes], compression: str | None) -> SplitBy:
    """As ``detected_split``, of an open file.

    Raises:
        OSError, ValueError: it cannot be read or unpacked.
    """
    if compression:
        import pyarrow as pa

        with pa.CompressedInputStream(pa.PythonFile(file, mode="r"), compression) as stream:
            head: bytes = stream.read(_HEAD_BYTES)
    else:
        head = file.read(_HEAD_BYTES)
    return "paragraph" if BLANK_LINE.search(head.strip()) else "line"


def is_text(path: PurePath, *, in_directory: bool) -> bool:
    """Whether a file is plain text, and no note on the other data of a directory."""
    return data_suffix(path) in TEXT_SUFFIXES and not (in_directory and NOTE.fullmatch(path.stem))


def split_identity(splits: Sequence[SplitBy]) -> dict[str, object]:
    """What the fingerprint of a source says of the splits that were detected of its files.

    Of lines nothing: so it was while there was no other split.
    """
    if "paragraph" not in splits:
        return {}
    return {"split_by": "paragraph" if set(splits) == {"paragraph"} else _PER_FILE}


def check_split(name: str, path: str, split_by: SplitBy | None, files: Sequence[PurePath]) -> None:
    """That a source with ``split_by`` has a file that is read by it.

    Args:
        path, files: of the source, and what lies there.

    Raises:
        ConfigError: it has none.
    """
    if split_by is not None and not any(data_suffix(file) in _SPLIT_SUFFIXES for file in files):
        raise ConfigError(
            f"sources.{name}.split_by={split_by}: {path} has no file of plain text; "
            f"{', '.join(_SPLIT_SUFFIXES)} are split by it; remove split_by"
        )
