"""The digest of all that decides what a deployed run does, beside its overrides and its data."""

from collections.abc import Iterable, Iterator, Mapping

from flows.declare.compose import CONF, Composer
from flows.declared import split_words
from flows.deploy.preset import Preset
from lineage.code import code_digest
from lineage.digest import digest_file, digest_of
from lineage.errors import ConfigError
from lineage.fingerprint import short
from lineage.source_checks import PYTHON, code_of, python_function

_PACKAGES = ("lineage", "tasks", "flows")


def deployed_code(option: str, preset: Preset) -> str:
    """Of our packages and their YAML, the user's groups, and this pipeline's own methods and reward functions.

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
    methods = list(_methods(option, preset))
    digests |= {module: code_digest(module) for module in sorted(_modules(methods))}
    digests |= {path: code_of(python_function(path)) for path in sorted(_reward_functions(methods))}
    return short(digest_of(digests))


def _methods(option: str, preset: Preset) -> Iterator[Mapping[str, object]]:
    """The methods of a pipeline's stages, as declared; of a pipeline that does not compose, none."""
    try:
        stages = Composer(*split_words(preset.words(option))).part("stages")
    except ConfigError:
        return
    for stage in stages.values():
        method = stage.get("method") if isinstance(stage, Mapping) else None
        if isinstance(method, Mapping):
            yield method


def _modules(methods: Iterable[Mapping[str, object]]) -> Iterator[str]:
    """Where the methods lie that are not ours."""
    for method in methods:
        target = method.get("_target_")
        if isinstance(target, str) and "." in target and target.partition(".")[0] not in _PACKAGES:
            yield target.rpartition(".")[0]


def _reward_functions(methods: Iterable[Mapping[str, object]]) -> Iterator[str]:
    """The Python functions that score answers."""
    for method in methods:
        rewards = method.get("rewards")
        for reward in rewards.values() if isinstance(rewards, Mapping) else ():
            path = reward.get("function") if isinstance(reward, Mapping) else None
            if isinstance(path, str) and path.startswith(PYTHON):
                yield path
