"""Composition of the Hydra config: groups, overrides, unknown keys, and the location of the store."""

import contextlib
import pickle
import re
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from pathlib import Path

import omegaconf._utils
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flows.declare.pipeline import nearest
from lineage.errors import ConfigError, MissingValueError

CONF = Path(__file__).parents[2] / "conf"

_VALUE = re.compile(r"\w+(\.\w+)+=")  # a key that can be no group's

_NO_SCHEDULE = "schedule=null"  # of the pipeline, whose key is also the name of a group

_MISSING = "???"  # a mandatory value that is not set

_CHOICE = re.compile(r"\w+=[^{\[]*")  # of a group, or a value at the root


def compose_tree(overrides: Sequence[str], config_dir: Path | None = None) -> dict[str, object]:
    """The composed configuration as plain dicts, every interpolation resolved.

    A value may be set whether or not any YAML states its key: the typed border that follows
    refuses the keys that do not exist, and knows which is the nearest.

    Raises:
        ConfigError: an override does not parse, a group has no such file, a mandatory value is missing.
    """
    others: list[str] = []
    values: list[str] = []
    for index, word in enumerate(overrides):
        # A later deletion or addition, or a whole node, may be of the same field: the order decides.
        is_last = all(_VALUE.match(later) or _CHOICE.fullmatch(later) for later in overrides[index:])
        (values if is_last and _sets_value(word, config_dir) else others).append(word)
    return _composer(tuple(others), config_dir, _files(config_dir)).tree(values)


def _sets_value(word: str, config_dir: Path | None) -> bool:
    """Whether an override sets a value, written plainly: it is no choice of a group, and deletes nothing."""
    if not _CHOICE.fullmatch(word) or word == _NO_SCHEDULE:
        return word == _NO_SCHEDULE or bool(_VALUE.match(word))
    return not any((folder / field_of(word)).is_dir() for folder in (CONF, config_dir) if folder)


@lru_cache(maxsize=16)
def _composer(overrides: tuple[str, ...], config_dir: Path | None, files: tuple[tuple[Path, int], ...]) -> "Composer":
    """Of a process that composes more than once: a sweep, or several commands."""
    return Composer(overrides, config_dir)


def _files(config_dir: Path | None) -> tuple[tuple[Path, int], ...]:
    """The YAML files that a configuration is composed of, and when each was last written."""
    folders = [CONF, *([config_dir] if config_dir else [])]
    found = sorted(path for folder in folders for path in folder.rglob("*.yaml"))
    return tuple((path.absolute(), path.stat().st_mtime_ns) for path in found)


class Composer:
    """Composes configurations that differ in a few values: the groups once, each value on a copy.

    Raises:
        ConfigError: an override does not parse, a group has no such file.
    """

    def __init__(self, overrides: Sequence[str], config_dir: Path | None = None) -> None:
        if config_dir is not None and not config_dir.is_dir():
            raise ConfigError(f"--config-dir {config_dir}: no such directory")
        if config_dir:
            _refuse_shadows(config_dir)
        self._overrides, self._config_dir = list(overrides), config_dir
        with _told(), _libyaml(), initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
            self._config = compose("config", overrides=_words(overrides, config_dir))
        self._pickled = pickle.dumps(self._config)  # copied so in a third of deepcopy's time

    def tree(self, more: Sequence[str] = ()) -> dict[str, object]:
        """The configuration with further overrides behind the first; as ``compose_tree`` gives it."""
        if not all(
            _sets_value(word, self._config_dir) for word in more
        ):  # a choice of a group changes which files are read
            return Composer([*self._overrides, *more], self._config_dir).tree()
        with _told():
            config = pickle.loads(self._pickled)
            for word in more:
                override = _value(word)
                OmegaConf.update(config, override.key_or_group, override.value(), merge=True, force_add=True)
            plain = _plain(config, resolve=False)
            if not _is_plain(plain):  # else no key is missing, which OmegaConf takes half a second to find out
                missing = sorted(OmegaConf.missing_keys(config))
                if missing:
                    raise MissingValueError(f"{missing[0]}: has no value; state {missing[0]}=...")
                return _plain(config)
            return plain

    def part(self, key: str) -> dict[str, object]:
        """What one key of the root holds, whether or not values elsewhere are missing."""
        with _told():
            return _plain(self._config[key])


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """What Hydra and its parts find wrong, as the user's error."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(_first_lines(error)) from error


@contextlib.contextmanager
def _libyaml() -> Iterator[None]:
    """Reads YAML in C: ten times as fast as the scanner and parser of OmegaConf's loader, whose rules stay."""
    if not yaml.__with_libyaml__:
        yield
        return
    own = omegaconf._utils.get_yaml_loader
    loader = type("Loader", (yaml.CSafeLoader, own()), {})
    omegaconf._utils.get_yaml_loader = lambda: loader
    try:
        yield
    finally:
        omegaconf._utils.get_yaml_loader = own


def _is_plain(node: object) -> bool:
    """Whether no value is missing, and none is an interpolation."""
    if isinstance(node, dict | list):
        return all(map(_is_plain, node.values() if isinstance(node, dict) else node))
    return not isinstance(node, str) or (node != _MISSING and "${" not in node)


def _plain(config: DictConfig, *, resolve: bool = True) -> dict[str, object]:
    tree = OmegaConf.to_container(config, resolve=resolve)
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


@cache
def groups() -> list[str]:
    """What a configuration is chosen from: ``pipeline``, ``model`` ..."""
    defaults = yaml.safe_load((CONF / "config.yaml").read_text())["defaults"]
    return [name for each in defaults if isinstance(each, dict) for name in each]


def field_of(word: str) -> str:
    """What an override is of: ``stages.dpo.method.beta`` of ``++stages.dpo.method.beta=0.2``."""
    return word.lstrip("+~").partition("=")[0]


def composed_files(overrides: Sequence[str], config_dir: Path | None = None) -> list[tuple[Path, str]]:
    """The YAML files of a configuration that composes, each with its package: the key that it fills, empty for all."""
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        chosen = loader.compute_defaults_list("config", _words(overrides, config_dir), RunMode.RUN).defaults
    places = [(f"{each.config_path}.yaml", each.package or "") for each in chosen]
    return [
        (folder / name, package)
        for name, package in places
        for folder in (CONF, *([config_dir.resolve()] if config_dir else []))
        if (folder / name).is_file()  # Hydra's own lie in neither
    ]


def _words(overrides: Sequence[str], config_dir: Path | None) -> list[str]:
    """What Hydra is given for the overrides of a command."""
    loader = GlobalHydra.instance().config_loader()
    search = [f"hydra.searchpath=[{_quoted(f'file://{config_dir.resolve()}')}]"] if config_dir else []
    return [*search, *(word for override in overrides for word in _accept(override, loader, config_dir))]


def _refuse_shadows(config_dir: Path) -> None:
    """Hydra would take the shipped file of a name and pass the user's over in silence."""
    for path in sorted(config_dir.rglob("*.yaml")):
        name = path.relative_to(config_dir)
        if (CONF / name).exists():
            raise ConfigError(
                f"{path}: posttrain ships a {name} too, and that one would be used; give yours another name"
            )


def _value(word: str) -> Override:
    """One override, refused where no field could have it."""
    override = parsed(word)
    key = override.key_or_group
    if not key:
        raise ConfigError(f"{word}: is no override; write key=value")
    if key.split(".")[0] == "hydra":
        raise ConfigError(f"{word}: unknown key; posttrain composes with Hydra but takes none of its hydra.* settings")
    if override.is_sweep_override():
        raise ConfigError(
            f"{word}: several values for one field; one run takes one value, run --multirun tries each "
            "(quote a value that has commas)"
        )
    return override


def _accept(word: str, loader: ConfigLoader, config_dir: Path | None) -> list[str]:
    """One override as Hydra is to see it: a group choice as it is, a value forced in."""
    override = _value(word)
    key = override.key_or_group
    options = _options(key, loader, config_dir)
    if options:
        return _group(word, override, options)
    if override.is_delete():
        return [word]
    return ["++" + word.lstrip("+")]


def parsed(word: str) -> Override:
    """One override.

    Raises:
        ConfigError: it does not parse.
    """
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException as error:
        raise ConfigError(
            f"{word}: is no override ({_first_lines(error)}); write key=value, quote odd values"
        ) from error


def _options(group: str, loader: ConfigLoader, config_dir: Path | None) -> list[str]:
    """The files of a group, shipped and the user's; empty where there is no such group."""
    if "." in group:
        return []
    shipped = loader.get_group_options(group, ObjectType.CONFIG)
    own = sorted(path.stem for path in (config_dir / group).glob("*.yaml")) if config_dir else []
    return sorted({*shipped, *own})


def _group(word: str, override: Override, options: list[str]) -> list[str]:
    group, value = override.key_or_group, override.value()
    if group == "schedule" and isinstance(value, dict):  # of the pipeline, not of learning rates
        return ["++" + word.lstrip("+")]
    if override.is_delete() or value in options:
        return [word]
    if group == "model" and isinstance(value, str) and ("/" in value or Path(value).is_dir()):
        # Any directory or hub id is a model: short for the two overrides that say so.
        return ["model=pretrained", f"++sources.base.path={_quoted(value)}"]
    hint = " (a model is also a directory that exists, or a hub id owner/name)" if group == "model" else ""
    raise ConfigError(f"{word}: no such {group}; accepted: {', '.join(options)}{nearest(str(value), options)}{hint}")


def _quoted(value: str) -> str:
    return "'" + value.replace("\\", r"\\").replace("'", r"\'") + "'"


def _first_lines(error: Exception) -> str:
    """Hydra's message without its caret art and its advice on internals."""
    lines = [line.strip() for line in str(error).splitlines()]
    kept = [
        line
        for line in lines
        if line and not line.startswith(("^", "full_key:", "object_type=", "See https", "Set the"))
    ]
    return "; ".join(kept[:4])
