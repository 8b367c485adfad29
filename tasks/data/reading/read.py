"""Reads what a source names: rows with the place that each came from."""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

from lineage.artifact import Source
from lineage.errors import DataError
from lineage.remote_files import is_url, open_remote, remote_versions
from lineage.sources import QUICKSTART, local_paths
from tasks.data.reading.chunk import Chunk, ParsedChunk, Row
from tasks.quickstart import quickstart_rows

_LINES = (".jsonl", ".ndjson", ".jsonlines", ".json")  # one JSON object per line
_TABLES = {".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}  # read by the builder of `datasets` of that name
_DATA = {*_LINES, *_TABLES, ".tsv", ".gz", ".zst", ".bz2", ".xz", ".zip"}  # what must not be passed over


_ROWS_PER_CHUNK = 1000


def read_chunks(source: Source) -> Iterator[Chunk]:
    """The rows of a source in order, in pieces.

    Raises:
        DataError: nothing can be read from it at all. One line that is no row is a ``Broken`` in its chunk.
    """
    rows = _rows(source)
    while entries := tuple(islice(rows, _ROWS_PER_CHUNK)):
        yield ParsedChunk(entries=entries)


def read_rows(source: Source) -> Iterator[Row]:
    """The rows of a source, in order: of the quickstart, of files, of a directory, of a URL or of a hub data set.

    Raises:
        DataError: a line that is no JSON object, a file that is not UTF-8, or no row at all.
    """
    count = 0
    for row in _rows(source):
        count += 1
        yield row
    if not count:
        raise DataError(f'{source.path}: no rows; give at least one row, such as a line {{"text": "..."}}')


def _rows(source: Source) -> Iterator[Row]:
    if source.path.startswith(QUICKSTART):
        rows = quickstart_rows(source.path.removeprefix(QUICKSTART))
        yield from (Row(fields=fields, where=f"{source.path}[{index}]") for index, fields in enumerate(rows))
        return
    if is_url(source.path):
        urls = list(remote_versions("rows", source.path))
        # As in a directory of this machine, what is no data is passed over; alone, it is refused.
        for url in [url for url in urls if _place(url).suffix in _DATA] or urls:
            yield from _read_url(url)
        return
    paths = local_paths(source.path)
    for path in paths:
        if path.is_dir():
            yield from _read_directory(path, source)
        else:
            yield from _read_file(path, str(path))
    if not paths:
        yield from _read_dataset(source.path, source, local=None)


def _read_directory(directory: Path, source: Source) -> Iterator[Row]:
    """All rows below a directory: of its JSON Lines, or as one data set; never of a part of it."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    saved = any((directory / name).exists() for name in ("dataset_dict.json", "state.json"))
    lines = [path for path in files if path.suffix in _LINES]
    if saved or not lines:
        yield from _read_dataset(str(directory), source, local=directory)
        return
    others = [path for path in files if path.suffix in _DATA - set(_LINES)]
    if others:
        raise DataError(
            f"{directory}: holds JSON Lines ({lines[0].name}) and other data ({others[0].name}); "
            "one kind in a directory is accepted; name the files you mean by a glob"
        )
    for file in lines:
        yield from _read_lines(file, str(file))


def _place(url: str) -> PurePosixPath:
    """Of a web page without its query; a bucket's names may hold question marks."""
    return PurePosixPath(urlsplit(url).path if url.startswith(("http://", "https://")) else url)


def _read_url(url: str) -> Iterator[Row]:
    with TemporaryDirectory() as scratch:
        copy = Path(scratch, _place(url).name)
        with open_remote(url) as remote, copy.open("wb") as file:
            shutil.copyfileobj(remote, file)
        yield from _read_file(copy, url, cache_dir=scratch)


def _read_file(file: Path, name: str, cache_dir: str | None = None) -> Iterator[Row]:
    if file.suffix in _LINES:
        yield from _read_lines(file, name)
    elif file.suffix in _TABLES:
        import datasets

        kind = _TABLES[file.suffix]
        rows = datasets.load_dataset(kind, data_files=str(file), split="train", cache_dir=cache_dir)
        yield from _numbered(rows, name)
    else:
        accepted = ", ".join((*_LINES, *_TABLES))
        raise DataError(
            f"{name}: rows are not read from {file.suffix or 'a file without a suffix'}; accepted: {accepted}"
        )


def _read_lines(file: Path, name: str) -> Iterator[Row]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{name}:{number}"
                yield Row(fields=_parse(line, where, first=number == 1), where=where)


def _parse(line: bytes, where: str, first: bool) -> Mapping[str, object]:
    try:
        fields = json.loads(line.decode("utf-8-sig" if first else "utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: byte {line[error.start]:#04x} at column {error.start + 1} is not UTF-8; "
            "UTF-8 is accepted; convert the file, such as with `iconv -f ENCODING -t UTF-8`"
        ) from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: not JSON: {error.msg} at column {error.colno}; one JSON object per line is accepted"
            + _hint(line)
        ) from error
    if not isinstance(fields, dict):
        raise DataError(f"{where}: a JSON {type(fields).__name__}; one JSON object per line is accepted" + _hint(line))
    return fields


def _hint(line: bytes) -> str:
    if line.lstrip(b"\xef\xbb\xbf \t").startswith(b"["):
        return "; for one array over the whole file, write its items as lines: `jq -c '.[]' FILE > FILE.jsonl`"
    return "; mend or remove the line"


def _read_dataset(path: str, source: Source, local: Path | None) -> Iterator[Row]:
    import datasets

    try:
        if local and (local / "dataset_dict.json").exists():
            data = datasets.load_from_disk(path)[source.split]
        elif local and (local / "state.json").exists():
            data = datasets.load_from_disk(path)
        else:
            data = datasets.load_dataset(path, revision=source.revision, split=source.split)
    except (OSError, ValueError, KeyError, RuntimeError) as error:  # what `datasets` raises for data it cannot find
        raise DataError(
            f"{path}: `datasets` reads no split {source.split!r} from it ({type(error).__name__}: "
            f"{str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}); give a .jsonl file, "
            "a directory or glob of them, a directory of .parquet files, a saved data set, or a hub id; or set split"
        ) from error
    yield from _numbered(data, path)


def _numbered(rows: Iterable[Mapping[str, object]], name: str) -> Iterator[Row]:
    for index, fields in enumerate(rows):
        yield Row(fields=fields, where=f"{name}[{index}]")
