"""Digests of bytes: of a file, of a directory."""

import hashlib
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path

from lineage.fingerprint import canonical_json

# A smaller file is read again each time: that costs nothing, and no clock can hide a change of it.
_CACHED_BYTES = 16 * 2**20


class DigestCache:
    """Digests of large files by path, size, time of change and inode, so that a plan need not read them again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._known: dict[str, str] = json.loads(path.read_text())
        except (OSError, ValueError):  # none yet, or damaged: it is only a cache
            self._known = {}

    def digest(self, file: Path, algorithm: str = "sha256") -> str:
        """Digest of a file's bytes, in hex."""
        status = file.stat()
        if status.st_size < _CACHED_BYTES:
            return digest_file(file, algorithm)
        key = f"{file.absolute()}:{status.st_size}:{status.st_mtime_ns}:{status.st_ino}"
        if algorithm != "sha256":
            key = f"{algorithm}:{key}"
        if key not in self._known:
            self._known[key] = digest_file(file, algorithm)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            draft = self._path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
            draft.write_text(json.dumps(self._known))
            draft.replace(self._path)
        return self._known[key]


def digest_file(path: Path, algorithm: str = "sha256") -> str:
    """Digest of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def digest_files(directory: Path, cache: DigestCache | None = None) -> dict[str, str]:
    """Relative POSIX path -> SHA-256, of every file below a directory, in order of path.

    Args:
        cache: of large files that were not written since; None: every byte is read.
    """
    digest = cache.digest if cache else digest_file
    return {name: digest(directory / name) for name in file_names(directory)}


def digest_of(files: Mapping[str, str]) -> str:
    """One digest for a directory, from the digests of its files."""
    return hashlib.sha256(canonical_json(dict(files)).encode()).hexdigest()


def file_names(directory: Path) -> list[str]:
    """Relative POSIX paths of every file below a directory, in order."""
    return [path.relative_to(directory).as_posix() for path in sorted(directory.rglob("*")) if path.is_file()]
