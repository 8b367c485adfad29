"""What an override may name, as a pattern of the parameter's schema: Prefect refuses the rest when a run is made."""

import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

import yaml

from flows.declare.compose import CONF, Composer
from flows.declare.config import Root, method_class
from flows.declared import split_words
from flows.deploy.preset import Preset
from lineage.artifact import Source
from lineage.errors import ConfigError
from tasks.context import Resources

# A tree of keys: what may follow a name after a dot. Two names stand for others.
Keys = Mapping[str, "Keys"]
_ANY = "*"  # one name, such as that of a new alias; as in a method's slots
_DEEP = "**"  # any path of names
_SPELLED = {_ANY: r"[^.=@~+]+", _DEEP: r"[^=@~+]+"}


def override_pattern(preset: Preset) -> str:
    """A regular expression for overrides of the keys that any pipeline has, whatever their values.

    It is of the kind that Python, JavaScript and Rust read alike, and is searched for from the start.
    """
    keys: Keys = {**keys_of(Root), "stages": {}, "sources": {}}
    for words in [*(preset.words(each) for each in preset.files()), *_model_words(preset)]:
        keys = _merged(keys, _declared(words))
    if not preset.allow_code:
        keys = _without_code(keys)
    alone, placed = _groups(preset.config_dir)
    return rf"^(\+?\+?|~)({_any_of(alone)}|({_any_of(placed)}@)?{_path(keys)})(=|$)"


def keys_of(cls: type) -> Keys:
    """The fields of a dataclass, with those of the dataclasses that they hold."""
    hints = get_type_hints(cls)
    return {field.name: _below(hints[field.name]) for field in fields(cls)}


def _below(hint: object) -> Keys:
    if isinstance(hint, type) and is_dataclass(hint):
        return keys_of(hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        below = _below(arguments[1])
        return {_DEEP: {}} if arguments[1] is object else {_ANY: below}
    if origin in (typing.Union, types.UnionType):
        keys: Keys = {}
        for each in arguments:
            keys = _merged(keys, _below(each))
        return keys
    return {}


def _declared(words: list[str]) -> Keys:
    """The stages and sources of one pipeline; of one that does not compose, none."""
    try:
        composer = Composer(*split_words(words))
        stages, sources = composer.part("stages"), composer.part("sources")
    except ConfigError:
        return {}
    return {
        "stages": {name: _stage_keys(name, stage) for name, stage in stages.items()},
        "sources": dict.fromkeys(sources, keys_of(Source)),
    }


def _stage_keys(name: str, stage: object) -> Keys:
    node = stage if isinstance(stage, Mapping) else {}
    stated, inputs = node.get("method"), node.get("inputs")
    target = stated.get("_target_") if isinstance(stated, Mapping) else None
    keys: dict[str, Keys] = {"resources": keys_of(Resources), "inputs": {}, "method": {_DEEP: {}}}
    try:
        cls = method_class(f"stages.{name}.method._target_", str(target))
    except ConfigError:  # what it takes is seen when it can be imported
        return {**keys, "inputs": {_ANY: {}}}
    slots = {*cls.consumes, *(inputs if isinstance(inputs, Mapping) else [])}  # "*" among them: of any name
    return {
        **keys,
        "inputs": {slot: {} for slot in slots},
        "method": {"_target_": {}, **keys_of(cls)},
    }


def _model_words(preset: Preset) -> list[list[str]]:
    """Each model with the first pipeline: it brings a stage or a source ``base``."""
    folders = [CONF, *([preset.config_dir] if preset.config_dir else [])]
    models = sorted({path.stem for folder in folders for path in (folder / "model").glob("*.yaml")})
    return [preset.words(next(iter(preset.files())), [f"model={each}"]) for each in models]


def _groups(config_dir: Path | None) -> tuple[list[str], list[str]]:
    """The groups that a run chooses of by name alone, and those that fill some place of the pipeline.

    Which pipeline runs is what the deployment is; it is no choice.
    """
    defaults = yaml.safe_load((CONF / "config.yaml").read_text())["defaults"]
    alone = [next(iter(each)) for each in defaults if isinstance(each, Mapping)]
    folders = [CONF, *([config_dir] if config_dir else [])]
    placed = {path.parent.relative_to(folder).as_posix() for folder in folders for path in folder.rglob("*/*.yaml")}
    return [name for name in alone if name != "pipeline"], sorted(placed - {"pipeline"})


def _without_code(keys: Keys) -> Keys:
    """Without those that make a run call what they name; what ``*`` lets through is refused when the run starts."""
    return {name: _without_code(below) for name, below in keys.items() if name not in ("_target_", "allow_code")}


def _merged(one: Keys, other: Keys) -> Keys:
    return {name: _merged(one.get(name, {}), other.get(name, {})) for name in {**one, **other}}


def _path(keys: Keys) -> str:
    """Names that are followed by the same stand together, which keeps the pattern short."""
    names: dict[str, list[str]] = {}
    for name, below in keys.items():
        names.setdefault(rf"(\.{_path(below)})?" if below else "", []).append(_SPELLED.get(name, name))
    return _any_of([_any_of(sorted(each)) + rest for rest, each in sorted(names.items())])


def _any_of(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"({'|'.join(words)})"
