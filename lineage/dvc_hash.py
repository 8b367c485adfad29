"""DVC's name for the content of a file or directory, as ``.dvc`` files and ``dvc.lock`` state it."""

import hashlib
import json
from pathlib import Path

import yaml

from lineage.digest import DigestCache, file_names


def tracked_hash(path: Path, cache: DigestCache) -> str | None:
    """DVC's hash of a tracked file or directory, or None: it is not tracked, or was changed since ``dvc add``."""
    try:
        stated = yaml.safe_load(path.with_name(path.name + ".dvc").read_text())["outs"][0]["md5"]
    except (OSError, ValueError, yaml.YAMLError, KeyError, IndexError, TypeError):
        return None
    return str(stated) if stated == dvc_hash(path, cache) else None


def dvc_hash(path: Path, cache: DigestCache) -> str:
    """The MD5 of a file; of a directory that of the listing of its files, with the suffix ``.dir``."""
    if path.is_file():
        return cache.digest(path, "md5")
    listing = [{"md5": cache.digest(path / name, "md5"), "relpath": name} for name in file_names(path)]
    listing.sort(key=lambda entry: entry["relpath"])
    return hashlib.md5(json.dumps(listing, sort_keys=True).encode()).hexdigest() + ".dir"
