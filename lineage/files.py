"""Files of the record: written whole or not at all, flushed to the disk, appended and read line by line."""

import contextlib
import json
import os
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from lineage.errors import ArtifactError

Parsed = TypeVar("Parsed")


def atomic_write(path: Path, text: str) -> None:
    """Replaces a file, so that a reader sees the old content or the new one; creates its folder.

    A power failure may still lose the new content: ``flush`` prevents that.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        draft.write_bytes(text.encode("utf-8", "surrogatepass"))
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):  # a full disk keeps no half a file
            draft.unlink()
        raise


def append_jsonl(path: Path, *records: Mapping[str, object], flush: bool = True) -> None:
    """Appends a line per record, after it has removed half a line that a killed process left; the caller holds a lock.

    Args:
        flush: waits until the lines are on the disk, where a power failure does not take them.
    """
    with path.open("a+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        if size and file.read(1) != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
        file.write("".join(map(_line, records)).encode("utf-8", "surrogatepass"))
        if flush:
            file.flush()
            os.fsync(file.fileno())


def read_jsonl(path: Path, parse: Callable[..., Parsed], otherwise: str | None = None) -> list[Parsed]:
    """Parses each whole line of a file, which may not exist; a line without an end was never acknowledged.

    Args:
        parse: takes the fields of an object by name.
        otherwise: what is wrong with a damaged line, such as ``is no event``; None: damaged lines are skipped.

    Raises:
        ArtifactError: a line is damaged.
    """
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return []
    return parse_jsonl(content, parse, f"{path}:{{}}: {otherwise}" if otherwise else None)


def parse_jsonl(content: bytes, parse: Callable[..., Parsed], otherwise: str | None = None) -> list[Parsed]:
    """The same of bytes.

    Args:
        otherwise: what a refusal begins with, with ``{}`` for the number of the line.
    """
    found = []
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            found.append(parse(**json.loads(line)))
        except (ValueError, TypeError, KeyError) as error:
            if otherwise:
                raise ArtifactError(f"{otherwise.format(number)} ({error}); mend or delete that line") from error
    return found


def replace_jsonl(path: Path, records: Iterable[Mapping[str, object]]) -> None:
    """Replaces the lines of a file."""
    atomic_write(path, "".join(map(_line, records)))


def _line(record: Mapping[str, object]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


_AT_ONCE = 16  # waits that a disk joins into few: of 2,000 small files 0.5 s, and 9 s one after another


def flush(paths: Iterable[Path]) -> None:
    """Files with their bytes, and directories with the names in them.

    Raises:
        OSError: one is gone, or does not get to the disk.
    """
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(_flush, paths))


def flush_tree(directory: Path) -> None:
    """A directory, and every file and directory below it; raises as ``flush``."""
    flush((directory, *(path for path in directory.rglob("*") if path.is_file() or path.is_dir())))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
