"""The digest of all that decides what a deployed run does, beside its overrides and its data."""

from collections.abc import Iterator, Mapping

from flows.declare.compose import CONF, Composer
from flows.declared import split_words
from flows.deploy.preset import Preset
from lineage.code import code_digest
from lineage.digest import digest_file, digest_of
from lineage.errors import ConfigError
from lineage.fingerprint import short

_PACKAGES = ("lineage", "tasks", "flows")


def deployed_code(option: str, preset: Preset) -> str:
    """Of our packages and their YAML, the user's groups, and the modules of this pipeline's own methods.

    Short, as people compare it. A commit would not do: it says nothing of files that are not committed.
    """
    root, config_dir = CONF.parent, preset.config_dir
    files = {
        path.relative_to(root).as_posix(): path for package in _PACKAGES for path in (root / package).rglob("*.py")
    }
    files |= {path.relative_to(root).as_posix(): path for path in CONF.rglob("*.yaml")}
    if config_dir:
        files |= {f"--config-dir/{path.relative_to(config_dir)}": path for path in config_dir.rglob("*.yaml")}
    digests = {name: digest_file(path) for name, path in sorted(files.items())}
    return short(digest_of(digests | {module: code_digest(module) for module in sorted(_modules(option, preset))}))


def _modules(option: str, preset: Preset) -> Iterator[str]:
    """Where the methods lie that are not ours; of a pipeline that does not compose, none."""
    try:
        stages = Composer(*split_words(preset.words(option))).part("stages")
    except ConfigError:
        return
    for stage in stages.values():
        method = stage.get("method") if isinstance(stage, Mapping) else None
        target = method.get("_target_") if isinstance(method, Mapping) else None
        if isinstance(target, str) and "." in target and target.partition(".")[0] not in _PACKAGES:
            yield target.rpartition(".")[0]
