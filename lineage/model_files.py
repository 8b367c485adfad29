"""What a model's directory may hold: sound files of its own, since they are read, and copied into each output."""

import json
import os
from collections.abc import Callable
from pathlib import Path

from lineage.errors import ConfigError

_WEIGHTS, _INDEX = ".safetensors", ".index.json"
_READ = (
    "config.json", "generation_config.json", "tokenizer*.json", "special_tokens_map.json", "added_tokens.json",
    "adapter_config.json", f"*{_INDEX}", f"*{_WEIGHTS}",
)  # fmt: skip


def require_own_files(directory: Path) -> None:
    """That all of a model lies in its directory: what links lead to too.

    A snapshot of a hub cache consists of links to the cache's own ``blobs/`` of that model; these are accepted.

    Raises:
        ConfigError: a link leads out of the directory or to a directory, or what is there is no file, such as a pipe.
    """
    root = directory.resolve()
    own = [root, *([root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [])]
    for folder, folders, files in os.walk(root):
        for path in (Path(folder, name) for name in sorted([*folders, *files])):
            target = Path(os.path.realpath(path)) if path.is_symlink() else path
            is_wrong = target.is_dir() if target != path else path.name in files and not path.is_file()
            if is_wrong or not any(target.is_relative_to(each) for each in own):
                raise ConfigError(
                    f"{path} is {f'a link to {target}' if target != path else 'no file'}; a model's directory of "
                    "files, and of links to files in it, is accepted; replace it by a copy (cp -rL copies what links "
                    "lead to)"
                )


def require_sound(directory: Path, passed: Callable[[Path], bool] | None = None) -> None:
    """Refuses a model whose settings, tokenizer or headers of weights cannot be read, or with weights elsewhere.

    Args:
        passed: files that need not be read again.

    Raises:
        ConfigError: names the file.
    """
    from safetensors import SafetensorError, safe_open

    for path in sorted({path for name in _READ for path in directory.glob(name)}):
        if passed and path.is_file() and passed(path):
            continue
        try:
            if path.suffix == _WEIGHTS:
                with safe_open(path, framework="numpy"):  # which reads the header, and compares it with the size
                    continue
            if not isinstance(found := json.loads(path.read_bytes()), dict):
                raise ValueError("no JSON object")
            names = {os.fspath(name) for name in found["weight_map"].values()} if path.name.endswith(_INDEX) else ()
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
            raise ConfigError(
                f"{path}: cannot be read as a part of a model ({type(error).__name__}: {error}); a file as "
                "save_pretrained writes it is accepted; it was cut or damaged: write or download it again"
            ) from error
        for name in sorted(names):
            if os.path.normpath(name).startswith(("/", "..")):
                raise ConfigError(f"{path} names {name}, which is not in its directory; files in it are accepted")
