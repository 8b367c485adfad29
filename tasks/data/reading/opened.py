"""Files of this machine opened as bytes, unpacked on the way; each that is not what its name says is refused."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader, RawIOBase
from pathlib import Path
from tempfile import TemporaryDirectory

from lineage.errors import DataError
from lineage.text_split import compression_of

_BUFFER_BYTES = 2**20
_BOM = b"\xef\xbb\xbf"  # of UTF-8; says nothing

_ICONV = "UTF-8 is accepted; convert it: `iconv -f {} -t UTF-8 FILE > NEW`"
_NO_TEXT = {  # how a file begins -> what it is, and what to do; of two that fit, the first
    b"\xff\xfe\x00\x00": ("UTF-32 (by its byte order mark)", _ICONV.format("UTF-32")),
    b"\x00\x00\xfe\xff": ("UTF-32 (by its byte order mark)", _ICONV.format("UTF-32")),
    b"\xff\xfe": ("UTF-16 (by its byte order mark)", _ICONV.format("UTF-16")),
    b"\xfe\xff": ("UTF-16 (by its byte order mark)", _ICONV.format("UTF-16")),
    b"\x1f\x8b": ("gzip", "text is accepted; if it is packed text, add .gz to its name"),
    b"\x28\xb5\x2f\xfd": ("Zstandard", "text is accepted; if it is packed text, add .zst to its name"),
    b"BZh": ("bzip2", "text is accepted; if it is packed text, add .bz2 to its name"),
    b"PK\x03\x04": ("a zip archive, or a workbook of Excel", "text is accepted; unpack it, or save it as CSV"),
    b"PAR1": ("Parquet", "text is accepted; name it .parquet"),
    b"ARROW1": ("Arrow", "text is accepted; name it .arrow"),
    b"SQLite format 3": ("a SQLite database", "text is accepted; export its rows as CSV"),
    b"%PDF-": ("PDF", "text is accepted; extract its text"),
    b"version https://git-lfs": ("a pointer of Git LFS, not the data", "the data is accepted; run `git lfs pull`"),
}


@contextmanager
def opened(path: Path, name: str) -> Iterator[BufferedReader]:
    """The bytes of a text file, after its byte order mark.

    Args:
        name: of the file, for messages.

    Raises:
        DataError: it is empty, cannot be read, is damaged, or begins as what is no text in UTF-8.
    """
    with unpacked(path, name) as stream:
        head = stream.peek(64)
        require_some(head, name)
        found, mend = _known(head)
        if mend:
            raise DataError(f"{name} is {found}; {mend}")
        if head.startswith(_BOM):
            stream.read(len(_BOM))
        yield stream


@contextmanager
def on_disk(path: Path, name: str) -> Iterator[Path]:
    """The file unpacked, for a reader that goes back and forth in it."""
    if not compression_of(path):
        yield path
        return
    with TemporaryDirectory() as scratch:
        copy = Path(scratch, path.stem)
        with unpacked(path, name) as stream, copy.open("wb") as file:
            shutil.copyfileobj(stream, file, _BUFFER_BYTES)
        yield copy


@contextmanager
def unpacked(path: Path, name: str) -> Iterator[BufferedReader]:
    """The bytes of a file.

    Raises:
        DataError: it cannot be read, or what packs it is damaged.
    """
    try:
        stream: BufferedReader = BufferedReader(_raw(path), _BUFFER_BYTES)
        with stream:
            yield stream
    except OSError as error:  # of the disk, and of every decompressor
        if packing := compression_of(path):
            raise DataError(
                f"{name}: cannot be unpacked ({error}); {packing} is accepted, to its end; "
                "it was cut or damaged: write or download it again"
            ) from error
        raise DataError(
            f"{name}: cannot be read ({error}); a file that you may read is accepted; check its permissions"
        ) from error


def said_of(path: Path) -> str:
    """What a file is by its first bytes, for a reader that found something else in it."""
    with path.open("rb") as file:
        return _known(file.read(64))[0]


def require_some(head: bytes, name: str) -> None:
    """Refuses a file that holds nothing."""
    if not head:
        raise DataError(f"{name} is empty (0 bytes); at least one row is accepted; write it again or leave it out")


def no_rows(name: str, found: str) -> DataError:
    """Of a file that holds something, and no row."""
    return DataError(f"{name}: {found}; at least one row is accepted; write it again or leave it out")


def _known(head: bytes) -> tuple[str, str]:
    """What begins like this, and what to do where text was meant; nothing, where it may be text."""
    for start, (found, mend) in _NO_TEXT.items():
        if head.startswith(start):
            return found, mend
    for order, high in (("LE", 1), ("BE", 0)):  # of UTF-16, whose letters have a byte that is 0
        if all(head[1 - high : 8 : 2]) and len(head) >= 8 and not any(head[high:8:2]):
            return "UTF-16 (every second byte is 0)", _ICONV.format(f"UTF-16{order}")
    return ("text" if head[:1] in b'{["' else "of another kind"), ""


def _raw(path: Path) -> RawIOBase:
    packing = compression_of(path)
    if not packing:
        return path.open("rb", buffering=0)
    import pyarrow as pa

    stream: RawIOBase = pa.input_stream(str(path), compression=packing)
    return stream
