"""What a model's directory may hold: files of its own, since they are read, digested and copied into each output."""

import json
import os
from pathlib import Path

from lineage.errors import ConfigError


def require_own_files(directory: Path) -> None:
    """That all files of a model lie in its directory: those that links lead to, and those that an index names.

    A snapshot of a hub cache consists of links to the cache's own ``blobs/`` of that model; these are accepted.

    Raises:
        ConfigError: a link leads out of the directory or to a directory, or an index names a file that is elsewhere.
    """
    root = directory.resolve()
    own = [root, *([root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [])]
    for folder, folders, files in os.walk(root):
        for path in (Path(folder, name) for name in sorted([*folders, *files])):
            target = path.resolve() if path.is_symlink() else path
            if (target != path and target.is_dir()) or not any(target.is_relative_to(each) for each in own):
                raise ConfigError(
                    f"{path} is a link to {target}; a model's directory of files, and of links to files in it, is "
                    "accepted; replace the link by a copy (cp -rL copies what links lead to)"
                )
    for index in sorted(root.glob("*.index.json")):
        try:
            names = {os.fspath(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{index} is no index of weights ({type(error).__name__}: {error}); JSON with a weight_map to files is "
                "accepted; save the model again with model.save_pretrained"
            ) from error
        for name in sorted(names):
            if not Path(os.path.normpath(root / name)).is_relative_to(root):
                raise ConfigError(f"{index} names {name}, which is not in {root}; files in it are accepted; mend it")
