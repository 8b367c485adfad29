"""Files of the record: atomic writes, flushes to the disk, JSON Lines."""

import contextlib
import json
import os
import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from lineage.errors import ArtifactError, ConfigError
from lineage.secrets import redacted

Parsed = TypeVar("Parsed")

URL = re.compile(r"[a-z][a-z0-9+.-]*://")
_CUT_URL = re.compile(r"(?:s3|gs|gcs|az|abfss?|hdfs|https?):/")  # as a library of paths leaves one


def user_cache(name: str) -> Path:
    """A file of what commands of this user need not compute again; it may be deleted at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "posttrain", name)


def local_path(configured: str, name: str = "", instead: str = "") -> Path:
    """The path of a setting or option that names a file or directory of this machine; for argparse too.

    Args:
        name: of the setting, for the message.
        instead: what works.

    Raises:
        ConfigError: it is a URL, which would become a folder with that name.
    """
    scheme, shown = URL.match(configured.lower()) or _CUT_URL.match(configured.lower()), redacted(configured)
    if not scheme:
        path = Path(os.path.expanduser(configured))
        if configured.startswith("~") and str(path).startswith("~") and not path.exists():
            raise ConfigError(f"{name}{shown}: this machine has no account of that name; write the path without ~")
        return path
    if scheme[0] == "file://":
        raise ConfigError(f"{name}{shown}: is a URL; the path without file:// is accepted: {shown[len('file://') :]}")
    raise ConfigError(
        f"{name}{shown}: is a URL, and this is a path of this machine; name a file or directory"
        + (f"; {instead}" if instead else ", and copy it there or from there with the tools of the storage")
    )


def atomic_write(path: Path, text: str) -> None:
    """Replaces a file atomically; creates its folder.

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
        with contextlib.suppress(OSError):  # after a full disk
            draft.unlink()
        raise


def refuse_edited(path: Path, text: str) -> None:
    """Refuses to replace a file that has other content, which its user may have edited."""
    if path.is_file() and path.read_text(encoding="utf-8", errors="replace") != text:
        raise ConfigError(f"{path}: is there already, and may have been edited; delete it, or name another with --out")


def append_jsonl(path: Path, *records: Mapping[str, object], flush: bool = True) -> None:
    """Appends one line per record, and first removes a partial line of a killed process; the caller holds a lock.

    Args:
        flush: waits until the lines are on the disk.
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
    """Parses each complete line of a file, which may not exist; a last line without a newline is skipped.

    Args:
        parse: takes the fields of an object by name.
        otherwise: the error text for a damaged line, such as ``is not an event``; None: damaged lines are skipped.

    Raises:
        ArtifactError: a line is damaged.
    """
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return []
    return parse_jsonl(content, parse, f"{path}:{{}}: {otherwise}" if otherwise else None)


def parse_jsonl(content: bytes, parse: Callable[..., Parsed], otherwise: str | None = None) -> list[Parsed]:
    """``read_jsonl`` for content in memory.

    Args:
        otherwise: start of the error message, with ``{}`` for the line number.
    """
    found = []
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            found.append(parse(**json.loads(line)))
        except (ValueError, TypeError, KeyError) as error:
            if otherwise:
                raise ArtifactError(f"{otherwise.format(number)} ({error}); correct or delete that line") from error
    return found


def replace_jsonl(path: Path, records: Iterable[Mapping[str, object]]) -> None:
    """Replaces the lines of a file."""
    atomic_write(path, "".join(map(_line, records)))


def _line(record: Mapping[str, object]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


_NUM_FLUSHES = 16  # concurrent fsyncs, which a disk merges: 2,000 small files take 0.5 s, one after another 9 s


def flush(paths: Iterable[Path]) -> None:
    """Flushes files and directories to the disk (OSError: a path is missing, or the disk failed)."""
    with ThreadPoolExecutor(_NUM_FLUSHES) as pool:
        list(pool.map(_flush, paths))


def flush_tree(directory: Path) -> None:
    """Flushes a directory and everything below it; raises as ``flush``."""
    flush((directory, *(path for path in directory.rglob("*") if path.is_file() or path.is_dir())))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
