"""The readers, by the suffix of a file."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from lineage.errors import DataError
from lineage.text_split import SplitBy, data_suffix
from tasks.data.reading.chunk import Chunk
from tasks.data.reading.delimited import read_csv, read_tsv
from tasks.data.reading.json_files import read_json, read_json_lines
from tasks.data.reading.tables import read_arrow, read_parquet
from tasks.data.reading.text_files import read_markdown, read_text

_READERS: Mapping[str, Callable[[Path, str], Iterator[Chunk]]] = {
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
    ".jsonlines": read_json_lines,
    ".json": read_json,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".feather": read_arrow,
    ".csv": read_csv,
    ".tsv": read_tsv,
}
_TEXTS: Mapping[str, Callable[[Path, str, SplitBy | None], Iterator[Chunk]]] = {
    ".txt": read_text,
    ".text": read_text,
    ".md": read_markdown,
}


def read_file(path: Path, name: str, split_by: SplitBy | None) -> Iterator[Chunk]:
    """The rows of one file.

    Args:
        name: of the file, as the user knows it.
        split_by: what of a plain text is a row; None: it is detected.

    Raises:
        DataError: nothing reads such files, or there is no row in it.
    """
    suffix = data_suffix(path)
    if suffix in _TEXTS:
        return _TEXTS[suffix](path, name, split_by)
    if suffix not in _READERS:
        raise DataError(
            f"{name}: rows are not read from {path.suffix or 'a file without a suffix'}; accepted: "
            f"{', '.join((*_READERS, *_TEXTS))}, each also with .gz, .zst or .bz2; convert or unpack it"
        )
    return _READERS[suffix](path, name)


def is_readable(path: PurePosixPath) -> bool:
    """Whether there is a reader for a file of that name."""
    return data_suffix(path) in (*_READERS, *_TEXTS)
