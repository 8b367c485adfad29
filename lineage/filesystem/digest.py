"""Digests of files and directories."""

import ctypes
import hashlib
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from errno import EINVAL
from fcntl import F_GETFL, F_SETFL, fcntl
from io import FileIO
from mmap import PAGESIZE, mmap
from pathlib import Path

from lineage.filesystem.files import atomic_write
from lineage.fingerprint import digest_json, short

# Smaller files are read each time: that is cheap, and misses no change.
_CACHED_BYTES = 16 * 2**20
_PIECE_BYTES = 8 * 2**20
_TICK_NANOSECONDS = 2 * 10**9  # coarsest time stamp of a file system


class DigestCache:
    """A cache of the digests of large files, so that a plan need not read them again.

    A file counts as unchanged while its path, size, inode, mtime and ctime are (mtime alone can be set back). A new
    hard link or other permissions change ctime too, which costs one reading. A file written in the last two seconds is
    not cached: it may change again within the same tick of the file system's clock.

    Args:
        path: JSON file that keeps the cache between commands; None: it is kept in memory only.
        rereads: read every file, and keep its digest for the caches after this one.
    """

    def __init__(self, path: Path | None, *, rereads: bool = False) -> None:
        self._path, self._rereads = path, rereads
        self._known = self._read()
        self._writing = threading.Lock()

    def digest(self, file: Path, algorithm: str = "sha256") -> str:
        """Digest of a file's bytes, in hex."""
        status = file.stat()
        if status.st_size < _CACHED_BYTES:
            return digest_file(file, algorithm)
        key = _key(file, status)
        if algorithm != "sha256":
            key = f"{algorithm}:{key}"
        if key in self._known and not self._rereads:
            return self._known[key]
        is_settled = time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > _TICK_NANOSECONDS
        digest = digest_file(file, algorithm)
        if is_settled and self._known.get(key) != digest:
            self._remember(key, digest)
        return digest

    def knows(self, file: Path) -> bool:
        """Whether the digest of a large file is cached."""
        return _key(file, file.stat()) in self._known

    def _read(self) -> dict[str, str]:
        if self._path is None:
            return {}
        try:
            return dict(json.loads(self._path.read_text()))
        except (OSError, ValueError, TypeError):  # none yet, or damaged: it is only a cache
            return {}

    def _remember(self, key: str, digest: str) -> None:
        """Merges with what other processes wrote; of two simultaneous writes one is lost and computed again later."""
        with self._writing:
            self._known = {**self._read(), **self._known, key: digest}
            if self._path is None:
                return
            with suppress(OSError):  # a read-only store
                atomic_write(self._path, json.dumps(self._known))


def digest_file(path: Path, algorithm: str = "sha256") -> str:
    """Digest of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def write_digested(path: Path, parts: Iterable[bytes | memoryview]) -> str:
    """Writes a new file, flushes it to the disk, and returns the digest of its bytes, which are read once.

    A piece is digested while it is written. It goes to the disk past the page cache where the file system lets it: a
    copy of each page would take CPU time from a training that runs meanwhile. So would one of what begins at a page.

    Raises:
        OSError: the disk is full or not reachable.
    """
    digest = hashlib.sha256()
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1) as beside:
        _set_direct(file, on=True)
        for piece in _pieces(parts):
            digested = beside.submit(digest.update, piece)  # hashlib and the write release the GIL
            _write_whole(file, piece)
            digested.result()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _pieces(parts: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    """The bytes of the parts in pieces that begin at a page of memory, each but the last of whole pages."""
    memory, filled = memoryview(mmap(-1, _PIECE_BYTES)), 0
    for part in parts:
        left = memoryview(part).cast("B")
        while left:
            taken = min(len(left), _PIECE_BYTES) // PAGESIZE * PAGESIZE
            if taken and not filled % PAGESIZE and _begins_at_page(left):
                if filled:
                    yield memory[:filled]
                filled = 0
                yield left[:taken]
            else:
                taken = min(len(left), _PIECE_BYTES - filled)
                memory[filled : filled + taken] = left[:taken]
                filled = (filled + taken) % _PIECE_BYTES
                if not filled:
                    yield memory
            left = left[taken:]
    if filled:
        yield memory[:filled]


def _begins_at_page(part: memoryview) -> bool:
    return not part.readonly and ctypes.addressof(ctypes.c_char.from_buffer(part)) % PAGESIZE == 0


def _write_whole(file: FileIO, piece: memoryview) -> None:
    if len(piece) % PAGESIZE:  # the last, and no multiple of a disk's blocks
        _set_direct(file, on=False)
    while piece:
        try:
            piece = piece[file.write(piece) :]
        except OSError as error:
            if error.errno != EINVAL or not _set_direct(file, on=False):
                raise


def _set_direct(file: FileIO, *, on: bool) -> bool:
    """Sets whether writes go past the page cache; whether that was the other way before."""
    flags, direct = fcntl(file, F_GETFL), getattr(os, "O_DIRECT", 0)
    changed = flags | direct if on else flags & ~direct
    with suppress(OSError):  # a file system without
        fcntl(file, F_SETFL, changed)
    return bool(changed != flags)


def _key(file: Path, status: os.stat_result) -> str:
    return f"{file.absolute()}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}:{status.st_ino}"


_SMALL_BYTES = 2**20  # of all files: read in less time than threads start


def digest_all(files: Sequence[Path], cache: DigestCache | None = None) -> list[str]:
    """SHA-256 of each file, in parallel: hashlib releases the GIL.

    Args:
        cache: digests of large unchanged files; None: every byte is read.
    """
    digest = cache.digest if cache else digest_file
    if len(files) < 100 and sum(each.stat().st_size for each in files) < _SMALL_BYTES:
        return [digest(each) for each in files]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(digest, files))


def digest_files(
    directory: Path, cache: DigestCache | None = None, known: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Relative POSIX path -> SHA-256, of every file below a directory, in order of path.

    Args:
        cache: as in ``digest_all``.
        known: digests of files that are not read again.
    """
    names, known = file_names(directory), known or {}
    unread = [name for name in names if name not in known]
    found = dict(zip(unread, digest_all([directory / name for name in unread], cache), strict=True))
    return {name: known[name] if name in known else found[name] for name in names}


def damage_of(recorded: Mapping[str, str], found: Mapping[str, str], directory: str = "") -> list[str]:
    """How files differ from the recorded ones, one phrase per file.

    Args:
        recorded, found: name -> SHA-256.
        directory: put before each name.
    """
    names = (name for name in sorted(recorded.keys() | found.keys()) if recorded.get(name) != found.get(name))
    return [f"{directory}{name} {_difference(recorded.get(name), found.get(name))}" for name in names]


def _difference(recorded: str | None, found: str | None) -> str:
    if found is None:
        return "is missing"
    return f"has SHA-256 {short(found)}, recorded is {short(recorded)}" if recorded else "was added"


def digest_of(files: Mapping[str, str]) -> str:
    """One digest for a directory, from the digests of its files."""
    return digest_json(dict(files))


def file_names(directory: Path) -> list[str]:
    """Relative POSIX paths of every file below a directory, in order."""
    return [path.relative_to(directory).as_posix() for path in sorted(directory.rglob("*")) if path.is_file()]
