"""Digests of bytes: of a file, of a directory."""

import hashlib
import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from lineage.fingerprint import canonical_json

# A smaller file is read again each time: that costs nothing, and no clock can hide a change of it.
_CACHED_BYTES = 16 * 2**20
_TICK_NANOSECONDS = 2 * 10**9  # of the coarsest clock of a file system


class DigestCache:
    """Digests of large files, so that a plan need not read them again.

    A file is taken to be unchanged while its path, size, inode and both its times are: that of its last change can be
    set back, the one at which the inode changed cannot. A new hard link or other permissions move the latter too, which
    costs one reading. What was written in the last two seconds may be written again within the same tick of its file
    system's clock, and is not remembered.

    Args:
        path: of the JSON that is kept from one command to the next; None: nothing is kept.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
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
        if key in self._known:
            return self._known[key]
        is_settled = time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > _TICK_NANOSECONDS
        digest = digest_file(file, algorithm)
        if is_settled:
            self._remember(key, digest)
        return digest

    def knows(self, file: Path) -> bool:
        """Whether a large file was read before, and not written since."""
        return _key(file, file.stat()) in self._known

    def _read(self) -> dict[str, str]:
        if self._path is None:
            return {}
        try:
            return dict(json.loads(self._path.read_text()))
        except (OSError, ValueError, TypeError):  # none yet, or damaged: it is only a cache
            return {}

    def _remember(self, key: str, digest: str) -> None:
        """Keeps what other processes wrote meanwhile; of two that write at once one is lost, and made again."""
        with self._writing:
            self._known = {**self._read(), **self._known, key: digest}
            if self._path is None:
                return
            with suppress(OSError):  # a store that is only read
                self._path.parent.mkdir(parents=True, exist_ok=True)
                draft = self._path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
                draft.write_text(json.dumps(self._known))
                draft.replace(self._path)


def digest_file(path: Path, algorithm: str = "sha256") -> str:
    """Digest of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def _key(file: Path, status: os.stat_result) -> str:
    return f"{file.absolute()}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}:{status.st_ino}"


def digest_all(files: Sequence[Path], cache: DigestCache | None = None) -> list[str]:
    """SHA-256 of each file, on all CPUs at once: Python's lock is free while one is hashed.

    Args:
        cache: of large files that were not written since; None: every byte is read.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(cache.digest if cache else digest_file, files))


def digest_files(directory: Path, cache: DigestCache | None = None) -> dict[str, str]:
    """Relative POSIX path -> SHA-256, of every file below a directory, in order of path.

    Args:
        cache: as in ``digest_all``.
    """
    names = file_names(directory)
    return dict(zip(names, digest_all([directory / name for name in names], cache), strict=True))


def digest_of(files: Mapping[str, str]) -> str:
    """One digest for a directory, from the digests of its files."""
    return hashlib.sha256(canonical_json(dict(files)).encode()).hexdigest()


def file_names(directory: Path) -> list[str]:
    """Relative POSIX paths of every file below a directory, in order."""
    return [path.relative_to(directory).as_posix() for path in sorted(directory.rglob("*")) if path.is_file()]
