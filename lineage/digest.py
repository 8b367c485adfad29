"""Digests of bytes: of a file, of a directory, of a pinned source."""

import hashlib
import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import replace
from glob import glob
from pathlib import Path

from lineage.artifact import Kind, Source
from lineage.errors import ConfigError
from lineage.fingerprint import canonical_json

QUICKSTART = "quickstart:"
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

    def digest(self, file: Path) -> str:
        """SHA-256 of a file's bytes."""
        status = file.stat()
        if status.st_size < _CACHED_BYTES:
            return digest_file(file)
        key = f"{file.absolute()}:{status.st_size}:{status.st_mtime_ns}:{status.st_ino}"
        if key not in self._known:
            self._known[key] = digest_file(file)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            draft = self._path.with_suffix(f".{os.getpid()}")
            draft.write_text(json.dumps(self._known))
            draft.replace(self._path)
        return self._known[key]


def digest_file(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_files(directory: Path) -> dict[str, str]:
    """Relative POSIX path -> SHA-256, of every file below a directory, in order of path."""
    return {name: digest_file(directory / name) for name in _names(directory)}


def digest_of(files: Mapping[str, str]) -> str:
    """One digest for a directory, from the digests of its files."""
    return hashlib.sha256(canonical_json(dict(files)).encode()).hexdigest()


def pin(name: str, source: Source, cache: DigestCache) -> tuple[Source, str]:
    """Pins a source to what it is now, and gives its fingerprint.

    Returns:
        The source, a hub id's revision resolved to a commit; and the fingerprint: the digest of the
        bytes, or of the pinned revision.

    Raises:
        ConfigError: there is no such file, directory or hub repository.
    """
    if source.path.startswith(QUICKSTART):
        # These rows come from the interpreter's own documentation, so the interpreter is their revision.
        pinned = replace(source, revision=f"{sys.implementation.name}-{platform.python_version()}-{sys.platform}")
        return pinned, _identity(pinned, pinned.path)
    matches = local_paths(source.path)
    if matches:
        # Absolute, for a worker that was started elsewhere; the identity is the content alone.
        pinned = replace(
            source, revision=None, path=os.path.abspath(os.path.expanduser(os.path.expandvars(source.path)))
        )
        return pinned, _identity(pinned, digest_of(_digest_paths(matches, cache)))
    if _is_hub_id(source.path):
        pinned = replace(source, revision=_hub_commit(name, source))
        return pinned, _identity(pinned, pinned.path)
    raise ConfigError(
        f"sources.{name}.path={source.path}: no such file or directory from {Path.cwd()}, and it is no hub id "
        f"(owner/name); give a path that exists, or a hub id"
    )


def local_paths(path: str) -> list[Path]:
    """The files and directories of this machine that a path or a glob names; empty for a hub id."""
    expanded = os.path.expanduser(os.path.expandvars(path))
    return [Path(expanded)] if os.path.exists(expanded) else [Path(match) for match in sorted(glob(expanded))]


def _identity(source: Source, content: str) -> str:
    identity = {"kind": source.kind, "content": content, "revision": source.revision, "split": source.split}
    return hashlib.sha256(canonical_json(identity).encode()).hexdigest()


def _digest_paths(paths: list[Path], cache: DigestCache) -> dict[str, str]:
    """By place in the order of reading, not by name: moving or renaming a file changes no model."""
    digests: dict[str, str] = {}
    for place, path in enumerate(paths):
        names = [""] if path.is_file() else _names(path)
        digests |= {f"{place}/{name}": cache.digest(path / name if name else path) for name in names}
    return digests


def _names(directory: Path) -> list[str]:
    return [path.relative_to(directory).as_posix() for path in sorted(directory.rglob("*")) if path.is_file()]


def _is_hub_id(path: str) -> bool:
    owner, _, name = path.partition("/")
    return (
        bool(owner and name)
        and "/" not in name
        and not path.startswith((".", "~", "/"))
        and not path.endswith(".jsonl")
    )


def _hub_commit(name: str, source: Source) -> str:
    """The commit that a hub id's revision names now; a full commit needs no network."""
    if source.revision and len(source.revision) == 40 and all(digit in "0123456789abcdef" for digit in source.revision):
        return source.revision
    from huggingface_hub import HfApi

    repo_type = "model" if source.kind == Kind.CHECKPOINT else "dataset"
    try:
        info = HfApi().repo_info(source.path, revision=source.revision, repo_type=repo_type, timeout=20)
    except Exception as error:  # the hub's own, its HTTP library's, and of being offline: no common base
        cause = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise ConfigError(
            f"sources.{name}.path={source.path}: no such file here, and the hub gave no {repo_type} of that id "
            f"at revision {source.revision or 'main'} ({cause}); "
            f"check the id, log in with `hf auth login` for a private one, or give a commit as sources.{name}.revision"
        ) from error
    return str(info.sha)
