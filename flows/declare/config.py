"""From overrides to a pipeline: composes the Hydra config to plain dicts, and checks every key and type of it, once."""

import contextlib
import inspect
import json
import os
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import ClassVar, Protocol, TextIO, TypeVar, cast

import omegaconf._utils
import yaml
from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser import overrides_parser
from hydra.core.override_parser.overrides_visitor import HydraOverrideVisitor
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf._utils import split_key
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from flows.declare.defaults import DEFAULTS_OF, applies_precision, merged, paths_in, refuse_void
from flows.declare.operation import Operation
from flows.declare.peer_names import problem, value_of
from flows.declare.pipeline import Pipeline, Root, Stage, StageNode, TrainingDefaults, listed
from flows.declare.project import DATA_KEY, data_key, meant, quoted, require_global, several_files
from lineage.artifact import SOURCE, Kind, Source
from lineage.code import target_class
from lineage.errors import ConfigError, MissingValueError
from lineage.fingerprint import field_names
from lineage.store import store_path
from tasks.context import Resources
from tasks.method import LOOP_FIELDS, Method, Training
from tasks.recipe import SHORT_FORMS, unfreeze
from tasks.train.compatibility import check_compatible

CONF = Path(__file__).parents[2] / "conf"
_VALUE = re.compile(r"\w+(\.\w+)+=")  # a key that cannot be a group
_NO_SCHEDULE = "schedule=null"  # the pipeline's key, which is also the name of a group
_MISSING = "???"  # a mandatory value that is not set
_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("set", "binary", "omap", "pairs", "timestamp")}  # not in JSON
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_MERGE, _TEXT = "tag:yaml.org,2002:merge", "tag:yaml.org,2002:str"
_DEFAULTS, _HYDRA = "defaults", "hydra"  # keys of a file that are Hydra's

Tree = dict[str, object]


class TypedInt(int):
    """A whole number that was not written as Python writes it: ``1_000``. As a text, it is what was written."""

    text: str

    def __str__(self) -> str:
        return self.text


class TypedFloat(float):
    """The same of other numbers: ``1.10`` and ``6e53``, which may also be a version and a revision."""

    text: str

    def __str__(self) -> str:
        return self.text


def as_typed(value: object, text: str) -> object:
    """A parsed value that keeps its text, where it is a number with another."""
    if isinstance(value, bool) or not isinstance(value, int | float) or str(value) == text:
        return value
    number = TypedInt(value) if isinstance(value, int) else TypedFloat(value)
    number.text = text
    return number


class _Context(Protocol):
    """A node of the grammar's tree."""

    def getText(self) -> str: ...


class _Visitor(HydraOverrideVisitor):
    """Parses overrides as Hydra does; numbers keep their text, and numbers that are keys are texts."""

    def _createPrimitive(self, ctx: _Context) -> object:
        return as_typed(super()._createPrimitive(ctx), ctx.getText().strip())

    def visitDictKey(self, ctx: _Context) -> object:
        key = super().visitDictKey(ctx)
        return ctx.getText().strip() if key is None or isinstance(key, int | float) else key


overrides_parser.HydraOverrideVisitor = _Visitor

_INTERNAL = ("^", "full_key:", "object_type=", "See https", "Set the")  # beginnings of lines in Hydra's messages
_ODD_TEXT = re.compile(r"(\+{0,2}[\w.@/]+=)(?!\w+\()([^'\"\[{].*)", re.DOTALL)  # no list, mapping or function
_CHOICE = re.compile(r"\w+=[^{\[]*")  # a group choice, or a value at the root


def compose_tree(overrides: Sequence[str], config_dir: Path | None = None) -> dict[str, object]:
    """The composed configuration as plain dicts, every interpolation resolved.

    Values of keys that no YAML contains are accepted here; the typed check that follows refuses unknown keys.

    Raises:
        ConfigError: an override does not parse, a group has no such file, a mandatory value is missing.
    """
    composer, values = _composer_of(overrides, config_dir)
    return composer.tree(values)


def _composer_of(overrides: Sequence[str], config_dir: Path | None) -> "tuple[Composer, list[str]]":
    """The composer of what chooses files, and the overrides that only set values at the end."""
    others: list[str] = []
    values: list[str] = []
    for index, word in enumerate(overrides):
        # Later deletions, additions or whole nodes may affect the same field, so the order must be kept.
        is_last = all(_VALUE.match(later) or _CHOICE.fullmatch(later) for later in overrides[index:])
        (values if is_last and _sets_value(word, config_dir) else others).append(word)
    return _composer(tuple(others), config_dir, _files(config_dir)), values


def _sets_value(word: str, config_dir: Path | None) -> bool:
    """Whether an override simply sets a value: no group choice, no deletion."""
    if not _CHOICE.fullmatch(word) or word == _NO_SCHEDULE:
        return word == _NO_SCHEDULE or bool(_VALUE.match(word))
    return not any((folder / field_of(word)).is_dir() for folder in (CONF, config_dir) if folder)


@lru_cache(maxsize=16)
def _composer(overrides: tuple[str, ...], config_dir: Path | None, files: tuple[tuple[str, int], ...]) -> "Composer":
    """A cached composer, for processes that compose more than once, such as a sweep."""
    return Composer(overrides, config_dir)


def _files(config_dir: Path | None) -> tuple[tuple[str, int], ...]:
    """The YAML files of the configuration with their mtimes."""
    folders = [CONF, *([config_dir.absolute()] if config_dir else [])]
    walked = (place for folder in folders for place in os.walk(folder))  # a fifth of the time of rglob
    found = (f"{place}/{name}" for place, _, names in walked for name in names if name.endswith(".yaml"))
    return tuple((file, os.stat(file).st_mtime_ns) for file in sorted(found))


class Composer:
    """Composes configurations that differ in a few values: groups once, values on copies of the result.

    Hydra chooses the ``files`` and their order, each with its package: the key that it fills; empty: the root. They are
    merged here as OmegaConf merges them, in plain dicts: OmegaConf takes a second for a thousand stages.

    Raises:
        ConfigError: an override does not parse, a group has no such file.
    """

    def __init__(self, overrides: Sequence[str], config_dir: Path | None = None) -> None:
        if config_dir is not None and not config_dir.is_dir():
            raise ConfigError(f"--config-dir {config_dir}: no such directory")
        if config_dir:
            _refuse_shadows(config_dir)
        self._overrides, self._config_dir = list(overrides), config_dir
        with _hydra_errors():
            files, values = _chosen(overrides, config_dir)
            tree: Tree = {}
            for _, package, content in files:
                for part in reversed(package.split(".") if package else ()):
                    content = {part: content}
                _merge(tree, {key: value for key, value in content.items() if key != _HYDRA}, tree)
            for override in values:
                _apply(tree, override)
        self.files = [(path, package) for path, package, _ in files]
        self._pickled = pickle.dumps(tree)

    def tree(self, more: Sequence[str] = ()) -> dict[str, object]:
        """The configuration with further overrides, as ``compose_tree`` returns it."""
        if not all(_sets_value(word, self._config_dir) for word in more):  # a choice of a group changes the files
            return Composer([*self._overrides, *more], self._config_dir).tree()
        tree: Tree = pickle.loads(self._pickled)
        with _hydra_errors():
            for word in more:
                _apply(tree, _value(word))
            if _is_plain(tree):
                return {str(key): value for key, value in tree.items()}
            texts: dict[str, object] = {}
            config = _omegaconf(tree, texts)
            missing = sorted(OmegaConf.missing_keys(config))
            if missing:
                raise MissingValueError(f"{missing[0]}: has no value; set {missing[0]}=...")
            return {key: _unmarked(value, texts) for key, value in _resolved(config).items()}

    def declared(self) -> Tree:
        """The configuration as it was merged, interpolations and missing values included."""
        tree: Tree = pickle.loads(self._pickled)
        return tree

    def part(self, key: str) -> dict[str, object]:
        """The value of one root key, even if values elsewhere are missing."""
        with _hydra_errors():
            texts: dict[str, object] = {}
            config = _omegaconf(pickle.loads(self._pickled), texts)[key]
            return {name: _unmarked(value, texts) for name, value in _resolved(config).items()}


def _chosen(
    overrides: Sequence[str], config_dir: Path | None = None
) -> tuple[list[tuple[Path, str, Tree]], list[Override]]:
    """The chosen YAML files in the order in which they are merged, and the overrides that set or delete values.

    Of each file its package, which is the key that it fills (empty: the root), and its content.
    """
    contents: dict[str, Tree] = {}
    with _content_kept(contents), initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        assert isinstance(loader, ConfigLoaderImpl)
        cli_args = _cli_args(overrides, config_dir)
        parsed_words, repository = loader._parse_overrides_and_create_caching_repo("config", cli_args)
        found = create_defaults_list(repository, "config", parsed_words, prepend_hydra=False, skip_missing=False)
    chosen = found.overrides
    pipeline = f"pipeline/{chosen.known_choices.get('pipeline')}.yaml"
    if config_dir and (config_dir / pipeline).is_file() and "model" not in chosen.override_choices | chosen.deletions:
        return _chosen([*overrides, "model=unset"], config_dir)  # the default is the model of the quickstart
    folders = [CONF, *([config_dir.resolve()] if config_dir else [])]
    files = []
    for each in found.defaults:
        path = next(filter(Path.is_file, (folder / f"{each.config_path}.yaml" for folder in folders)))
        require_global(path, each.package or "")
        files.append((path, each.package or "", contents[os.path.realpath(path)]))
    return files, [override for override in found.config_overrides if not override.is_hydra_override()]


@contextlib.contextmanager
def _content_kept(contents: dict[str, Tree]) -> Iterator[None]:
    """Lets Hydra read the defaults list of each file only, and keeps the whole content by the file's path.

    libyaml parses, ten times as fast as OmegaConf's parser and with the same rules.
    """
    own = omegaconf._utils.get_yaml_loader
    bases = (*([yaml.CSafeLoader] if yaml.__with_libyaml__ else []), own())

    class Loader(*bases):  # type: ignore[misc]
        yaml_constructors: ClassVar = {
            tag: _keeping_text(read) if tag in _NUMBERS else read
            for tag, read in own().yaml_constructors.items() if tag not in _TAGS
        }  # fmt: skip

        def __init__(self, stream: TextIO) -> None:
            super().__init__(stream)
            self._path = os.path.realpath(stream.name)

        def get_single_data(self) -> object:
            data = super().get_single_data()
            if data is not None and not isinstance(data, dict):
                raise ConfigError(f"{self._path}: holds no mapping; write KEY: VALUE lines")
            contents[self._path] = {key: value for key, value in (data or {}).items() if key != _DEFAULTS}
            return {key: value for key, value in (data or {}).items() if key == _DEFAULTS}

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
            for key, _ in node.value:  # 2024: and on: are texts too
                if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                    key.tag = _TEXT
            read: dict[object, object] = super().construct_mapping(node, deep)
            return read

    omegaconf._utils.get_yaml_loader = lambda: Loader
    try:
        yield
    finally:
        omegaconf._utils.get_yaml_loader = own


def _keeping_text(read: Callable[[object, yaml.Node], object]) -> Callable[[object, yaml.Node], object]:
    return lambda loader, node: as_typed(read(loader, node), str(node.value))


_MARK = re.compile("\ue000([^\ue001]*)\ue001")  # of a number with its text, while OmegaConf resolves interpolations


def _omegaconf(tree: Tree, texts: dict[str, object]) -> DictConfig:
    """A tree for OmegaConf, which knows no numbers with a text: marked texts are in their place.

    Args:
        texts: text -> number, which is filled.
    """
    return OmegaConf.create(cast(Tree, _marked(tree, texts)))


def _marked(node: object, texts: dict[str, object]) -> object:
    if isinstance(node, dict):
        return {key: _marked(value, texts) for key, value in node.items()}
    if isinstance(node, list):
        return [_marked(value, texts) for value in node]
    if isinstance(node, TypedInt | TypedFloat):
        texts[node.text] = node
        return f"\ue000{node.text}\ue001"
    return node


def _unmarked(node: object, texts: Mapping[str, object]) -> object:
    if isinstance(node, dict):
        return {key: _unmarked(value, texts) for key, value in node.items()}
    if isinstance(node, list):
        return [_unmarked(value, texts) for value in node]
    if not isinstance(node, str) or "\ue000" not in node:
        return node
    whole = _MARK.fullmatch(node)
    return texts[whole[1]] if whole else _MARK.sub(r"\1", node)


def _merge(tree: Tree, more: Tree, root: Tree, *at: str) -> Tree:
    """Merges as OmegaConf does: mappings key by key, all else is replaced; ``???`` replaces no value.

    Copies what it takes: several packages may have one file, and several keys one anchor. ``tree`` is the node of
    ``root`` under the keys ``at``.
    """
    for key, value in more.items():
        if isinstance(value, dict):
            tree[key] = _merge(_mapping(tree.get(key), root, *at, key), value, root, *at, key)
        elif value != _MISSING or key not in tree:
            tree[key] = deepcopy(value) if isinstance(value, list) else value
    return tree


def _mapping(now: object, root: Tree, *at: str) -> Tree:
    """The mapping into which another one is merged; of an interpolation, a copy of the mapping that it refers to."""
    if isinstance(now, str) and "${" in now:
        texts: dict[str, object] = {}
        node: object = _omegaconf(root, texts)
        with contextlib.suppress(OmegaConfBaseException):  # it refers to what a later file adds
            for key in at:
                node = node[int(key) if isinstance(node, ListConfig) else key]  # type: ignore[index]
            now = _unmarked(OmegaConf.to_container(node), texts) if isinstance(node, DictConfig) else None
    return now if isinstance(now, dict) else {}


def _apply(tree: Tree, override: Override) -> None:
    """Sets or deletes a value; mappings are merged into those that are there, and missing parents are added."""
    key, value = override.key_or_group, override.value()
    if key.partition(".")[0] == DATA_KEY:
        key = data_key(tree, key, value)
    *parents, last = split_key(key)
    node: object = tree
    for part in parents:
        child = _child(node, part)
        if isinstance(child, str) and "${" in child:
            raise ConfigError(f"{key}: {part} refers to another value, {child}; set that one")
        if not isinstance(child, dict | list):
            if override.is_delete():
                break
            child = {}
            _set(node, part, child, key)
        node = child
    now = _child(node, last)
    if override.is_delete():
        if now is None:
            raise ConfigError(f"Could not delete from config. '{key}' does not exist.")
        if value is not None and value != now:
            raise ConfigError(f"Could not delete from config. The value of '{key}' is {now} and not {value}.")
        del node[int(last) if isinstance(node, list) else last]  # type: ignore[attr-defined]
    elif isinstance(value, dict):
        _set(node, last, _merge(_mapping(now, tree, *parents, last), value, tree, *parents, last), key)
    else:
        _set(node, last, value, key)


def _child(node: object, part: str) -> object:
    """The value under a key or, of a list, an index; None: there is none."""
    if isinstance(node, dict):
        return node.get(part)
    if isinstance(node, list) and part.isdigit() and int(part) < len(node):
        return node[int(part)]
    return None


def _set(node: object, part: str, value: object, key: str) -> None:
    if isinstance(node, dict):
        node[part] = value
    elif isinstance(node, list) and part.isdigit() and int(part) < len(node):
        node[int(part)] = value
    else:
        size = len(node) if isinstance(node, list) else 0
        raise ConfigError(f"{key}: {part} is not an index of a list of {size}; set the whole list")


@contextlib.contextmanager
def _hydra_errors() -> Iterator[None]:
    """Converts errors of Hydra and OmegaConf to ``ConfigError``."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(_first_lines(error)) from error


def _is_plain(node: object) -> bool:
    """Whether there are no missing values and no interpolations."""
    if isinstance(node, dict | list):
        return all(map(_is_plain, node.values() if isinstance(node, dict) else node))
    return not isinstance(node, str) or (node != _MISSING and "${" not in node)


def _resolved(config: DictConfig) -> dict[str, object]:
    tree = cast(Tree, OmegaConf.to_container(config, resolve=True))
    return {str(key): value for key, value in tree.items()}


@cache
def groups() -> list[str]:
    """Names of the config groups: ``pipeline``, ``model`` ..."""
    defaults = yaml.safe_load((CONF / "config.yaml").read_text())["defaults"]
    return [name for each in defaults if isinstance(each, dict) for name in each]


def field_of(word: str) -> str:
    """The key of an override: ``stages.dpo.method.beta`` for ``++stages.dpo.method.beta=0.2``."""
    return word.lstrip("+~").partition("=")[0]


def declared_sources(overrides: Sequence[str], config_dir: Path) -> tuple[dict[str, Path], Tree]:
    """Sources that the user's own files set, with the file; and what all chosen files declare, without overrides."""
    files = _chosen(overrides, config_dir)[0]
    found: dict[str, Path] = {}
    for path, package, content in files:
        if path.is_relative_to(config_dir.resolve()):
            for part in reversed(package.split(".") if package else ()):
                content = {part: content}
            sources = content.get("sources")
            found |= dict.fromkeys(map(str, sources), path) if isinstance(sources, dict) else {}
    groups_alone = [word for word in overrides if not word.startswith("~") and not _sets_value(word, config_dir)]
    return found, _composer(tuple(groups_alone), config_dir, _files(config_dir)).declared()


def composed_files(overrides: Sequence[str], config_dir: Path | None = None) -> list[tuple[Path, str]]:
    """The YAML files of a valid configuration, each with its package: the key that it fills; empty: the root."""
    return _composer_of(overrides, config_dir)[0].files


def _cli_args(overrides: Sequence[str], config_dir: Path | None) -> list[str]:
    """The overrides of a command in the form for Hydra."""
    search = [f"hydra.searchpath=[{quoted(f'file://{config_dir.resolve()}')}]"] if config_dir else []
    return [*search, *(word for override in overrides for word in _accept(override, config_dir))]


def _refuse_shadows(config_dir: Path) -> None:
    """Refuses user files with the name of a shipped file, which Hydra would silently ignore."""
    for path in sorted(config_dir.rglob("*.yaml")):
        name = path.relative_to(config_dir)
        if (CONF / name).exists():
            raise ConfigError(
                f"{path}: posttrain ships a {name} too, and that one would be used; give yours another name"
            )


def _value(word: str) -> Override:
    """Parses an override, and refuses those that no field accepts."""
    override = parsed(word)
    key = override.key_or_group
    if not key:
        raise ConfigError(f"{word}: is no override; write key=value")
    if re.split("[./]", key)[0] == "hydra":
        raise ConfigError(f"{word}: unknown key; posttrain composes with Hydra but takes none of its hydra.* settings")
    if override.is_sweep_override():
        if key.partition(".")[0] == DATA_KEY:
            raise ConfigError(f"{word}: {several_files(word.partition('=')[2].split(','))}; run --multirun tries each")
        raise ConfigError(
            f"{word}: several values for one field; one run takes one value, run --multirun tries each "
            "(quote a value that has commas)"
        )
    return override


def _accept(word: str, config_dir: Path | None) -> list[str]:
    """An override in the form for Hydra: group choices unchanged, values forced with ``++``."""
    override = _value(word)
    word, key = str(override.input_line), override.key_or_group
    options = _options(key, config_dir)
    if options:
        return _group(word, override, options)
    if override.is_delete():
        return [word]
    return ["++" + word.lstrip("+")]


@lru_cache(maxsize=1024)  # a sweep composes the same words again and again
def parsed(word: str) -> Override:
    """One override; a text that the grammar does not have is taken as it was typed, since shells remove quotes.

    Raises:
        ConfigError: it does not parse.
    """
    parser = overrides_parser.OverridesParser.create()
    try:
        return parser.parse_override(word)
    except HydraException as error:
        if text := _ODD_TEXT.fullmatch(word):
            return parser.parse_override(text[1] + quoted(text[2]))
        what = "" if "missing EQUAL" in str(error) else f" ({_first_lines(error)})"
        raise ConfigError(
            f"{word}: is no override{what}; {meant(word)}write key=value without spaces, and quote odd values"
        ) from error


def _options(group: str, config_dir: Path | None) -> list[str]:
    """The options of a group, shipped and the user's, without Hydra's copies; empty: there is no such group."""
    if "." in group:
        return []
    return sorted({path.stem for folder in (CONF, config_dir) if folder for path in (folder / group).glob("*.yaml")})


_PLACES = {"stage": "stages.NAME.method", "source": "sources.NAME", "part": "", "recipe": ""}  # groups of pipelines


def _group(word: str, override: Override, options: list[str]) -> list[str]:
    group, value = override.key_or_group, override.value()
    if group in _PLACES and override.package is None:
        place, is_pipeline = _PLACES[group], str(value) in _options("pipeline", None)
        meant = f"did you mean pipeline={value}? " if is_pipeline else ""
        where, remedy = f"{group}@{place}={value}", "choose one with pipeline=NAME"
        remedy = f"{where} puts it in the place of one, +{where} adds it" if place else remedy
        raise ConfigError(f"{word}: a {group} is a piece of a pipeline; {meant}{remedy}")
    if group == "schedule" and isinstance(value, dict):  # the pipeline's schedule, not that of learning rates
        return ["++" + word.lstrip("+")]
    if override.is_delete() or value in options:
        return [word]
    if group == "tracking" and isinstance(value, list) and value and set(map(str, value)) <= {*options}:
        first, *others = sorted(map(str, value), key=lambda each: each not in ("local", "none"))
        return [f"tracking={first}", *(f"++tracking.{each}=true" for each in others)]
    if not isinstance(value, str) and str(value) in options:  # pipeline=2024
        return [f"{word.partition('=')[0]}={quoted(str(value))}"]
    if group == "model" and isinstance(value, str) and ("/" in value or Path(value).is_dir()):
        return ["model=pretrained", f"++sources.base.path={quoted(value)}"]  # which model=DIRECTORY is short for
    hint = " (a model is also a directory that exists, or a hub id owner/name)" if group == "model" else ""
    if ours := value_of(value, str(options)):
        raise ConfigError(f"{word}: no such {group}; here it is {group}={ours}; accepted: {', '.join(options)}")
    if (own := Path("conf", group, f"{value}.yaml")).is_file():
        form = f"posttrain plan {own}, or " if group == "pipeline" else ""
        raise ConfigError(f"{word}: is not shipped, and {own} is not read by itself; write {form}--config-dir conf")
    other = next((name for name in groups() if isinstance(value, str) and value in _options(name, None)), "")
    there = f"did you mean {other}={value}? " if other else ""
    names = ", ".join(options) if other else listed(value, options)
    raise ConfigError(f"{word}: no such {group}; {there}accepted: {names}{hint}")


def _first_lines(error: Exception) -> str:
    """Hydra's message without caret lines and advice on internals."""
    lines = [line.strip() for line in str(error).splitlines()]
    return "; ".join([line.rstrip(".") for line in lines if line and not line.startswith(_INTERNAL)][:4])


T = TypeVar("T")
Node = Mapping[str, object]

_ADAPTERS: dict[type, TypeAdapter[object]] = {}  # building one takes milliseconds; a sweep checks hundreds of trees


def typed(cls: type[T], node: Node, where: str, groups: Sequence[str] = (), *, is_exact: bool = False) -> T:
    """Checks every key and type of a node against a dataclass, then builds it.

    Args:
        groups: further keys to list as accepted in messages: Hydra consumes them.
        is_exact: a number is no text; else what was typed is the text.
    """
    try:
        # Strict mode on JSON accepts a string for an enum, but not `true` for a number.
        if cls not in _ADAPTERS:
            _ADAPTERS[cls] = TypeAdapter(cls)
        return cast(T, _ADAPTERS[cls].validate_json(json.dumps(node), strict=True))
    except ValidationError as error:
        numbers = [each for detail in error.errors() if (each := _number_for_text(node, dict(detail)))]
        if numbers and not is_exact:
            return typed(cls, _with_texts(node, numbers), where, groups)
        raise ConfigError(
            "\n".join(problem(cls, dict(each), where, groups, node) for each in error.errors())
        ) from error
    except ConfigError as error:  # raised by a dataclass that checks its fields, without knowing its location
        if str(error).startswith(where):
            raise
        text = str(error).replace("stages.STAGE.method", where) if where else str(error)
        raise ConfigError(f"{where}: {text}") from error


def _number_for_text(node: object, detail: Mapping[str, object]) -> tuple[str | int, ...] | None:
    """Where a number is, for which a text is expected: what was typed is the text."""
    if detail["type"] != "string_type":
        return None
    at, loc = list[str | int](), detail["loc"]
    assert isinstance(loc, tuple)
    for part in loc:
        if (isinstance(node, Mapping) and part in node) or (isinstance(node, list | tuple) and isinstance(part, int)):
            node = node[part]
        else:  # the name of a type, of a union
            break
        at.append(part)
    return tuple(at) if isinstance(node, int | float) and not isinstance(node, bool) else None


def _with_texts(node: Node, numbers: Sequence[tuple[str | int, ...]]) -> Node:
    """A copy in which these numbers are texts."""
    copy = deepcopy(dict(node))
    for *parents, last in numbers:
        place: object = copy
        for part in parents:
            place = place[part]  # type: ignore[index]
        place[last] = str(place[last])  # type: ignore[index]
    return copy


def load_pipeline(overrides: Sequence[str], config_dir: Path | None = None) -> Pipeline:
    """Composes the configuration and checks every key and type of it, once.

    Args:
        overrides: in Hydra's grammar.
        config_dir: a directory of further groups (``model/``, ``source/``, ``pipeline/`` ...).
    """
    return pipeline_of(compose_tree(overrides, config_dir), overrides, config_dir)


def pipeline_of(tree: Node, overrides: Sequence[str], config_dir: Path | None = None) -> Pipeline:
    """Checks every key and type of a configuration that these overrides composed."""
    _refuse_ms_amp(tree)
    root = _root(tree)
    sources = {name: typed(Source, node, f"sources.{name}") for name, node in _nodes(tree, "sources").items()}
    stages = {name: _stage(name, node, root, tree) for name, node in _nodes(tree, "stages").items()}
    last = {field_of(word): word for word in overrides if not word.startswith("~")}.values()
    for name, notes in refuse_void(tree, stages, {word: _default_paths(word, config_dir) for word in last}).items():
        stages[name] = replace(stages[name], notes=(*stages[name].notes, *notes))
    pipeline = Pipeline(
        name=root.name,
        store=store_path(root.store),
        code_drift=root.code_drift,
        tracking=root.tracking,
        sources=sources,
        stages=stages,
        aliases=root.aliases,
        non_commercial_labels=root.non_commercial_labels,
        accept_label_drop=root.accept_label_drop,
        restart=root.restart,
        because=root.because,
        operation=Operation(
            tags=root.tags, schedule=root.schedule, trigger=root.trigger, retrain=root.retrain, notify=root.notify
        ),
        advice=root.advice,
        overrides=tuple(overrides),
        config_dir=config_dir,
    )
    _refuse_unread_sources(pipeline, overrides, config_dir)
    if root.gate.approval == "required" and all(each.method.produces != Kind.VERDICT for each in stages.values()):
        raise ConfigError(
            f"gate.approval=required: {root.name} has no gate that could ask for approval; leave it out, or add a gate "
            "as pipeline=cpt-sft-dpo-gated does"
        )
    return pipeline


def _root(tree: Node) -> Root:
    adapter = None if tree.get("adapter") == AUTO else tree.get("adapter")
    return typed(Root, {**tree, "adapter": adapter}, "", groups())


def stages_of(tree: Node) -> dict[str, Stage]:
    """The stages of a configuration, each checked on its own, without their connections."""
    root = _root(tree)
    return {name: _stage(name, node, root, tree) for name, node in _nodes(tree, "stages").items()}


def _nodes(tree: Node, key: str) -> dict[str, Node]:
    """The nodes under a key that ``_root`` has checked; not those that it built, in which numbers lost their text."""
    found = tree[key]
    assert isinstance(found, dict)
    return found


def _stage(name: str, node: Node, root: Root, tree: Node) -> Stage:
    where = f"stages.{name}"
    method = node.get("method")
    if not isinstance(method, Mapping) or "_target_" not in method:
        others = [other for other, stage in root.stages.items() if other != name]
        raise ConfigError(
            f"{where}: no such stage; there are: {listed(name, others)} (a new stage states {where}.method._target_)"
        )
    parts = typed(StageNode, {"inputs": {}, "resources": {}, **node}, where)
    cls = method_class(f"{where}.method._target_", str(method["_target_"]))
    recipe = {key: value for key, value in method.items() if key != "_target_"}
    recipe |= {"evaluation": merged(recipe.get("evaluation"), parts.evaluation)} if parts.evaluation else {}
    defaults = {
        "adapter": tree["adapter"], "quantization": tree["quantization"], "optimizer": tree["optimizer"],
        "schedule": tree["lr_schedule"], "save": root.save, "approval": root.gate.approval,
        "precision": root.precision if applies_precision(cls) else None,
        "images": {} if root.model and root.model.kind == "vlm" else None,
    }  # fmt: skip
    for key in defaults.keys() & (taken := set(field_names(cls))):
        if defaults[key] is not None:
            recipe[key] = merged(defaults[key], recipe[key]) if key in recipe else defaults[key]
    unfreeze(f"{where}.method", recipe)
    # The root's resources are the defaults of all stages.
    resources = typed(Resources, {**_nodes(tree, "resources"), **parts.resources}, f"{where}.resources")
    if "adapter" not in taken or recipe.get("adapter") != AUTO:
        return _built(where, cls, recipe, resources, parts, root, tree["quantization"])
    choices, refused = dict[str, Stage](), list[ConfigError]()
    few_bits = {"qlora": {"type": "lora", "quantization": "nf4"}} if resources.gpus_per_worker else {}
    # A base in 4 bits needs a GPU.
    for label, adapter in {"full": None, "lora": {"type": "lora"}, **few_bits}.items():
        try:
            stage = _built(where, cls, {**recipe, "adapter": adapter}, resources, parts, root, tree["quantization"])
            check_compatible(where, stage.method, resources)
            choices[label] = stage
        except ConfigError as error:
            refused.append(error)
    if not choices:
        raise refused[0]
    return replace(next(iter(choices.values())), choices=choices)


def _built(
    where: str, cls: type[Method], recipe: dict[str, object], resources: Resources, parts: StageNode, root: Root,
    quantization: object,
) -> Stage:  # fmt: skip
    """Builds a stage; ``quantization`` is the default of all stages."""
    recipe, taken = dict(recipe), set(field_names(cls))
    kept = _apply_training(cls, recipe, root.training) if issubclass(cls, Training) else []
    if recipe.get("adapter", False) is None and recipe.get("quantization") == quantization:
        recipe.pop("quantization", None)  # the default needs an adapter, which this stage does not have
    if isinstance(own := recipe.get("quantization"), Mapping) and isinstance(of := recipe.get("adapter"), Mapping):
        recipe["quantization"] = {"format": of["quantization"], **own} if of.get("quantization") else own
    notes = [f"{where}.method: sets {', '.join(kept)} itself, and not as the preset does"] if kept else []
    if recipe.get("precision") == "auto" and "precision" in taken:
        recipe["precision"] = resources.resolved_precision("auto")
        because = f"gpus_per_worker={resources.gpus_per_worker}"
        notes.append(f"{where}.method.precision=auto: {recipe['precision']}, because {because}")
    method = typed(cls, recipe, f"{where}.method")
    resources = resources.of_batch(getattr(method, "global_batch_size", None))
    given = frozenset(key for key, value in recipe.items() if value is not None)
    return Stage(method=method, inputs=parts.inputs, resources=resources, notes=tuple(notes), given=given)


AUTO = "auto"  # adapter=auto: the plan chooses it
_LENGTH = ("num_steps", "num_epochs")  # one of them is set


def _of_preset(cls: type[Training], recipe: Mapping[str, object], shared: TrainingDefaults) -> dict[str, object]:
    """The fields that a preset has for a stage."""
    defaults = dict(shared.every)
    if cls.name() == "SFT":
        defaults |= {**shared.sft, **(shared.sft_adapter if recipe.get("adapter") else {})}
    adapter = recipe.get("adapter")
    if isinstance(adapter, Mapping) and adapter.get("type", "lora") in ("lora", "dora"):
        is_quantized = bool(adapter.get("quantization") or recipe.get("quantization"))
        lora = {name: value for name, value in shared.adapter.items() if name == "dropout" or not is_quantized}
        if recipe.get("adapter_in") == "continue":  # dropout would move the policy from its reference
            lora.pop("dropout", None)
        if lora:
            defaults["adapter"] = merged({"type": adapter.get("type", "lora"), **lora}, defaults.get("adapter", {}))
    return defaults


def _apply_training(cls: type[Training], recipe: dict[str, object], shared: TrainingDefaults) -> list[str]:
    """Adds the fields of a preset to those of a stage; returns the fields that the stage overrides."""
    defaults = _of_preset(cls, recipe, shared)
    ignored = LOOP_FIELDS - cls.applies if cls.has_own_loop else frozenset()
    reads = getattr(cls, "reads", None)
    if cls.has_own_loop or reads is None or not reads.trained:
        ignored |= {"validation"}
    taken = set(field_names(cls)) - ignored
    for short, (setting, field) in SHORT_FORMS.items():
        if recipe.get(short) is not None and isinstance(node := defaults.get(setting), Mapping):
            defaults[setting] = {name: value for name, value in node.items() if name != field}
    kept = []
    for key, value in defaults.items():
        if key in _LENGTH and any(recipe.get(name) is not None for name in _LENGTH):
            kept += [name for name in _LENGTH if recipe.get(name) not in (None, defaults.get(name))]
        elif key in taken and key not in recipe:
            recipe[key] = value
        elif key in taken and isinstance(value, Mapping):
            recipe[key] = merged(value, recipe[key])
        elif key in taken and recipe[key] != value:
            kept.append(key)
    return kept


def _refuse_ms_amp(tree: Node) -> None:
    stages = tree.get("stages")
    nodes = [each for each in stages.values() if isinstance(each, Mapping)] if isinstance(stages, Mapping) else []
    methods = [method for node in nodes if isinstance(method := node.get("method"), Mapping)]
    for node in (tree, *methods):
        found = node.get("precision")
        if str(found).lower().replace("-", "_") in ("ms_amp", "msamp"):
            raise ConfigError(
                f"precision={found}: MS-AMP is abandoned, and runs with no current torch; set precision=fp8, which is "
                "torchao's recipe"
            )


def method_class(where: str, target: str) -> type[Method]:
    """Imports the method class that a stage's ``_target_`` names.

    Raises:
        ConfigError: it cannot be imported, or is not a complete method.
    """
    cls = target_class(target, where, (Method,), "is no tasks.method.Method; derive the class from it")
    assert issubclass(cls, Method)
    lacking = [name for name in ("consumes", "produces") if not hasattr(cls, name)]
    if inspect.isabstract(cls) or lacking:
        raise ConfigError(f"{where}={target}: lacks {', '.join(lacking) or 'run'}; see docs/add_a_method.md")
    return cls


def _default_paths(word: str, config_dir: Path | None) -> list[str]:
    """The defaults of all stages that an override sets: ``optimizer.name`` for ``optimizer=lion``."""
    key = field_of(word)
    root = "lr_schedule" if key == "schedule" else key
    if not any(f"{root}.".startswith(f"{each}.") for each in (*DEFAULTS_OF, "resources")):
        return []
    value = _value(word).value()
    if not _options(key, config_dir):
        return paths_in(root, value)
    if value == "default":  # of optimizer and schedule: that of each method
        return []
    files = [folder / key / f"{value}.yaml" for folder in (CONF, config_dir) if folder]
    node = next((yaml.safe_load(each.read_text(encoding="utf-8")) for each in files if each.is_file()), None) or {}
    node.pop(_DEFAULTS, None)
    return paths_in(root, node.get(root, node))  # of a file with the package _global_, under its key


def _refuse_unread_sources(pipeline: Pipeline, overrides: Sequence[str], config_dir: Path | None) -> None:
    """Refuses a source that an override or a file of the user's sets, and that no stage reads.

    What shipped files declare may go unread, as where stages are deleted; what the user's files declare, only there.
    """
    unread = pipeline.sources.keys() - pipeline.read_sources()
    if not unread:
        return
    for word in overrides:
        name = _source_named(word)
        if name in unread or (field_of(word) == "model" and "base" in unread and (name := "base")):
            raise ConfigError(f"{word.lstrip('+')}: {_not_read(str(name), pipeline)}")
    if config_dir is None:
        return
    own, declared = declared_sources(overrides, config_dir)
    stages = cast(Tree, declared.get("stages") or {})
    inputs = [each.get("inputs") for each in stages.values() if isinstance(each, dict)]
    refs = {str(ref) for each in inputs if isinstance(each, dict) for ref in each.values()}
    read = {ref.removeprefix(SOURCE) for ref in refs if ref.startswith(SOURCE) or ref not in pipeline.stages}
    for name in sorted(unread & own.keys() - read):
        raise ConfigError(f"{own[name]}: sources.{name}: {_not_read(name, pipeline)}")


def _not_read(name: str, pipeline: Pipeline) -> str:
    read = listed(name, pipeline.read_sources())
    if name in pipeline.stages:
        path = pipeline.sources[name].path
        model = f"; to train the model in {path}, set model={path}" if name == "base" else ""
        return (
            f"no stage reads this source, since inputs named {name} are the output of stages.{name}{model}; "
            f"inputs named source:{name} would read it; read are: {read}"
        )
    return f"no stage reads this source; read are: {read}"


def _source_named(override: str) -> str | None:
    key = field_of(override).split(".")
    key = key[0].rpartition("@")[2].split(".") + key[1:]  # source@sources.NAME
    return key[1] if key[0] == "sources" and len(key) > 1 else None
