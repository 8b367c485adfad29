"""Digests of bytes: of a file, of a directory, of a pinned source."""

import hashlib
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


def digest_file(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_files(directory: Path) -> dict[str, str]:
    """Relative POSIX path -> SHA-256, of every file below a directory, in order of path."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): digest_file(path) for path in files}


def digest_of(files: Mapping[str, str]) -> str:
    """One digest for a directory, from the digests of its files."""
    return hashlib.sha256(canonical_json(dict(files)).encode()).hexdigest()


def pin(name: str, source: Source) -> tuple[Source, str]:
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
        digests = {key: digest for path in matches for key, digest in _digest_path(path).items()}
        pinned = replace(source, revision=None)
        return pinned, _identity(pinned, digest_of(digests))
    if _is_hub_id(source.path):
        pinned = replace(source, revision=_hub_commit(name, source))
        return pinned, _identity(pinned, pinned.path)
    raise ConfigError(
        f"sources.{name}.path={source.path}: no such file or directory from {Path.cwd()}, and it is no hub id "
        f"(owner/name); give a path that exists, or a hub id"
    )


def _identity(source: Source, content: str) -> str:
    identity = {"kind": source.kind, "content": content, "revision": source.revision, "split": source.split}
    return hashlib.sha256(canonical_json(identity).encode()).hexdigest()


def local_paths(path: str) -> list[Path]:
    """The files and directories of this machine that a path or a glob names; empty for a hub id."""
    expanded = os.path.expanduser(os.path.expandvars(path))
    return [Path(expanded)] if os.path.exists(expanded) else [Path(match) for match in sorted(glob(expanded))]


def _digest_path(path: Path) -> dict[str, str]:
    # A file is known by its bytes, not by where it lies: moving it changes no model.
    return {path.name: digest_file(path)} if path.is_file() else digest_files(path)


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
