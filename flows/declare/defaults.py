"""Defaults of all stages, such as ``adapter``: how a stage takes them, and the overrides that no stage takes."""

from collections.abc import Mapping, Sequence

from flows.declare.peer_names import value_text
from flows.declare.pipeline import Stage, TrainingDefaults
from flows.declare.project import Node, node_of
from lineage.errors import ConfigError
from lineage.fingerprint import field_names
from tasks.method import LOOP_FIELDS, Method, Training
from tasks.recipe import SHORT_FORMS

# Defaults of all stages: key -> field of the methods that have it.
DEFAULTS_OF = {
    "adapter": "adapter", "quantization": "quantization", "optimizer": "optimizer", "lr_schedule": "schedule",
    "save": "save", "precision": "precision", "gate.approval": "approval",
    **{f"training.{name}": "" for name in field_names(TrainingDefaults)}, "training.adapter": "adapter",
}  # fmt: skip
# What stages that run no model take of the resources.
_OF_ROWS = {"cpus_per_worker", "launcher", "rows", "num_nodes", "max_failures", "wait_minutes", "hang_minutes"}


def applies_precision(cls: type[Method]) -> bool:
    """False for a method with its own loop that always computes in fp32."""
    return not (issubclass(cls, Training) and cls.has_own_loop and "precision" in LOOP_FIELDS - cls.applies)


def merged(shared: object, own: object) -> object:
    """A stage's setting merged over the default, unless it selects another optimizer, adapter ..."""
    if not isinstance(shared, Mapping) or not isinstance(own, Mapping):
        return own
    if any(own.get(key, shared.get(key)) != shared.get(key) for key in ("name", "type", "format")):
        return own
    return {**shared, **own}


def refuse_void(
    tree: Node, stages: Mapping[str, Stage], overrides: Mapping[str, Sequence[str]]
) -> dict[str, list[str]]:
    """Refuses an override of a default where each stage that has the field sets another value itself.

    Where an override of the stage's own field follows, both are kept: the two were chosen together.
    Of a group, such as ``resources=fsdp``, of which stages take a part, the rest is a note: stage -> notes.

    Args:
        tree, stages: the configuration, and its stages.
        overrides: override -> the defaults that it sets, each as ``optimizer.name``.
    """
    notes, names = dict[str, list[str]](), [word.partition("=")[0].lstrip("+") for word in overrides]
    for index, (word, paths) in enumerate(overrides.items()):
        own, is_read = list[tuple[str, str, str]](), False
        for path in paths:
            taking = {name: place for name, each in stages.items() if (place := _place(each, path))}
            found = {name: _own_setting(name, tree, path, place) for name, place in taking.items()}
            is_read |= not all(found.values())
            if all(found.values()):
                own += [
                    (name, *each)
                    for name, each in found.items()
                    if each and each[0].partition("=")[0] not in names[index:]
                ]
            if path.startswith("training.") and not found:
                raise ConfigError(f"{word}: no stage reads {path}; stages.NAME.method.FIELD sets a field of one stage")
        if own and not is_read:
            settings, remedies = (", ".join(each[1] for each in own), " ".join(each[2] for each in own))
            raise ConfigError(f"{word}: changes nothing, since {settings} is set; for that stage set {remedies}")
        for name, setting, _ in own:
            notes.setdefault(name, []).append(f"{setting} is set, and not as {word} does")
    return notes


def paths_in(prefix: str, value: object) -> list[str]:
    """The paths of all values in a node: ``resources.sharding``."""
    if isinstance(value, Mapping):
        return [path for key, each in value.items() for path in paths_in(f"{prefix}.{key}", each)]
    return [prefix]


def _place(stage: Stage, path: str) -> list[str]:
    """Where a stage has the field of a default: ``method``, ``schedule``, ``name`` for ``lr_schedule.name``, or not."""
    cls, methods = type(stage.method), [stage.method, *(each.method for each in stage.choices.values())]
    key = next((each for each in DEFAULTS_OF if f"{path}.".startswith(f"{each}.")), "resources")
    names = [*filter(None, (DEFAULTS_OF.get(key), *path[len(key) + 1 :].split(".")))]
    if key == "resources":
        return ["resources", *names] if cls.uses_gpu or names[0] in _OF_ROWS else []
    is_of_others = "sft" in key and cls.name() != "SFT"
    if is_of_others or ("training.adapter" in path and not any(getattr(each, "adapter", None) for each in methods)):
        return []
    is_taken = names[0] in field_names(cls) and (names[0] != "precision" or applies_precision(cls))
    return ["method", *names] if is_taken else []


def _own_setting(name: str, tree: Node, path: str, place: Sequence[str]) -> tuple[str, str] | None:
    """What a stage sets in place of a default, and the override that replaces it; None: it takes it, or sets the same.

    Args:
        place: of the field in the stage.
    """
    (part, first, *rest), at = place, path.split(".")
    default, node = _at(tree, at), node_of(_at(tree, ["stages", name, part]))
    short = next((key for key, field in SHORT_FORMS.items() if field == (first, *rest) and node.get(key)), None)
    first, rest = (short, []) if short else (first, rest)
    if first not in node:
        return None
    own, where = node[first], f"stages.{name}.{part}.{first}"
    whole = _at(tree, at[: -len(rest)]) if rest else default
    is_merged = isinstance(own, Mapping) and (path.startswith("training.") or merged(whole, own) is not own)
    if rest and is_merged and _at(own, rest[:1]) is None:
        return None
    for each in rest:
        if isinstance(own, Mapping) and each in own:
            own, where = own[each], f"{where}.{each}"
    if isinstance(own, Mapping) and (kind := next((each for each in ("type", "name", "format") if each in own), "")):
        own, where = own[kind], f"{where}.{kind}"
    remedy = f"stages.{name}.{'.'.join(place)}={value_text(default)}"
    return None if own == default else (f"{where}={value_text(own)}", remedy)


def _at(node: object, names: Sequence[str]) -> object:
    """The value under keys; None: there is none."""
    for each in names:
        node = node.get(each) if isinstance(node, Mapping) else None
    return node
