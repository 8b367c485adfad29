"""What DVC says of a file or directory that it tracks: the hash in the ``.dvc`` file beside it."""

import hashlib
import json
from pathlib import Path

import yaml

from lineage.digest import DigestCache, file_names


def tracked_hash(path: Path, cache: DigestCache) -> str | None:
    """DVC's hash of a tracked file or directory, or None: it is not tracked, or was changed since ``dvc add``.

    Of a directory it is the MD5 of the listing of its files, with the suffix ``.dir``.
    """
    try:
        stated = yaml.safe_load(path.with_name(path.name + ".dvc").read_text())["outs"][0]["md5"]
    except (OSError, ValueError, yaml.YAMLError, KeyError, IndexError, TypeError):
        return None
    return str(stated) if stated == _dvc_hash(path, cache) else None


def _dvc_hash(path: Path, cache: DigestCache) -> str:
    if path.is_file():
        return cache.digest(path, "md5")
    listing = [{"md5": cache.digest(path / name, "md5"), "relpath": name} for name in file_names(path)]
    listing.sort(key=lambda entry: entry["relpath"])
    return hashlib.md5(json.dumps(listing, sort_keys=True).encode()).hexdigest() + ".dir"
