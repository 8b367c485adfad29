"""The border of Hydra: overrides in, a checked ``Pipeline`` out. No ``DictConfig`` passes it."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, Literal

from flows.declare.compose import compose_tree, groups
from flows.declare.operation import Alias, Operation, Retrain, Schedule, Tracking, Trigger
from flows.declare.pipeline import CodeDrift, Pipeline, Stage, nearest
from flows.declare.sweep import Sweep
from flows.declare.target import target_class
from flows.declare.typed import Node, typed
from lineage.artifact import SOURCE, Source
from lineage.errors import ConfigError
from lineage.store import store_path
from lineage.verdict import Approval
from tasks.context import Precision, Resources
from tasks.method import LOOP_FIELDS, Adapter, Method, Optimizer, Quantization, Training
from tasks.method import Schedule as LearningRate


@dataclass(frozen=True, kw_only=True)
class StageNode:
    """A stage as YAML states it, before its method's class is known."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True}

    method: dict[str, object]
    inputs: dict[str, str]
    resources: dict[str, object]


@dataclass(frozen=True, kw_only=True)
class GateDefaults:
    """What all gates of a pipeline share."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True}

    approval: Approval


@dataclass(frozen=True, kw_only=True)
class Root:
    """The keys of ``conf/config.yaml`` with everything it composes.

    Args:
        adapter, quantization, optimizer, lr_schedule, save, precision, gate: what every method with such a field takes
            from here, unless its stage states it.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True}

    name: str
    store: str
    code_drift: CodeDrift
    tracking: Tracking
    sources: dict[str, dict[str, object]]
    stages: dict[str, dict[str, object]]
    resources: Resources
    adapter: Adapter | None
    quantization: Quantization | None
    optimizer: Optimizer | None
    lr_schedule: LearningRate | None
    save: Literal["adapter"] | None
    precision: Precision | None
    gate: GateDefaults
    aliases: dict[str, Alias]
    non_commercial_labels: tuple[str, ...]
    accept_label_drop: tuple[str, ...]
    restart: tuple[str, ...]
    tags: tuple[str, ...]
    schedule: Schedule | None = None
    trigger: Trigger | None
    retrain: Retrain | None
    notify: str | None
    sweep: Sweep


def load_pipeline(overrides: Sequence[str], config_dir: Path | None = None) -> Pipeline:
    """Composes the configuration and checks every key and type of it, once.

    Args:
        overrides: in Hydra's grammar.
        config_dir: a directory of further groups (``model/``, ``source/``, ``pipeline/`` ...).

    Raises:
        ConfigError: names what was found, what is accepted, what to do.
    """
    return pipeline_of(compose_tree(overrides, config_dir), overrides, config_dir)


def pipeline_of(tree: Node, overrides: Sequence[str], config_dir: Path | None = None) -> Pipeline:
    """Checks every key and type of a configuration that these overrides composed.

    Raises:
        ConfigError: names what was found, what is accepted, what to do.
    """
    _refuse_ms_amp(tree)
    root = typed(Root, tree, "", groups())
    sources = {name: typed(Source, node, f"sources.{name}") for name, node in root.sources.items()}
    stages = {name: _stage(name, node, root, tree) for name, node in root.stages.items()}
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
        operation=Operation(
            tags=root.tags, schedule=root.schedule, trigger=root.trigger, retrain=root.retrain, notify=root.notify
        ),
    )
    _refuse_unknown_sources(pipeline, overrides, config_dir)
    return pipeline


def stages_of(tree: Node) -> dict[str, Stage]:
    """The stages of a configuration, each with its own keys and types checked, and nothing between them.

    Raises:
        ConfigError: names what was found, what is accepted, what to do.
    """
    root = typed(Root, tree, "", groups())
    return {name: _stage(name, node, root, tree) for name, node in root.stages.items()}


def _stage(name: str, node: Node, root: Root, tree: Node) -> Stage:
    where = f"stages.{name}"
    method = node.get("method")
    if not isinstance(method, Mapping) or "_target_" not in method:
        others = [other for other, stage in root.stages.items() if other != name]
        raise ConfigError(
            f"{where}: no such stage; there are: {', '.join(others)}{nearest(name, others)} "
            f"(a new stage states {where}.method._target_)"
        )
    parts = typed(StageNode, {"inputs": {}, "resources": {}, **node}, where)
    cls = method_class(f"{where}.method._target_", str(parts.method["_target_"]))
    recipe = {key: value for key, value in parts.method.items() if key != "_target_"}
    defaults = {
        "adapter": tree["adapter"], "quantization": tree["quantization"], "optimizer": tree["optimizer"],
        "schedule": tree["lr_schedule"], "save": root.save, "approval": root.gate.approval,
        "precision": root.precision if _applies_precision(cls) else None,
    }  # fmt: skip
    taken = {field.name for field in fields(cls)}
    for key in defaults.keys() & taken:
        if defaults[key] is not None:
            recipe[key] = _merged(defaults[key], recipe[key]) if key in recipe else defaults[key]
    if recipe.get("adapter", False) is None and recipe.get("quantization") == tree["quantization"]:
        recipe.pop("quantization", None)  # of all stages; this one has no adapter
    shared = tree["resources"]
    assert isinstance(shared, dict)
    # What a stage does not state about its resources, the root states for all.
    resources = typed(Resources, {**shared, **parts.resources}, f"{where}.resources")
    notes: tuple[str, ...] = ()
    if recipe.get("precision") == "auto" and "precision" in taken:
        recipe["precision"] = resources.resolved_precision("auto")
        because = f"gpus_per_worker={resources.gpus_per_worker}"
        notes = (f"{where}.method.precision=auto: {recipe['precision']}, because {because}",)
    return Stage(method=typed(cls, recipe, f"{where}.method"), inputs=parts.inputs, resources=resources, notes=notes)


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


def _applies_precision(cls: type[Method]) -> bool:
    """False for a method whose own loop computes in fp32, whatever the precision of the other stages is."""
    return not (issubclass(cls, Training) and cls.has_own_loop and "precision" in LOOP_FIELDS - cls.applies)


def _merged(shared: object, own: object) -> object:
    """A setting of one stage, completed by that of all stages, unless it names another optimizer, adapter ..."""
    if not isinstance(shared, Mapping) or not isinstance(own, Mapping):
        return own
    if any(own.get(key, shared.get(key)) != shared.get(key) for key in ("name", "type", "format")):
        return own
    return {**shared, **own}


def method_class(where: str, target: str) -> type[Method]:
    """The class that a stage's ``_target_`` names; its module is imported, where its source has such a class.

    Raises:
        ConfigError: it cannot be imported, or is no complete method.
    """
    cls = target_class(target, where, (Method,), "is no tasks.method.Method; derive the class from it")
    assert issubclass(cls, Method)
    lacking = [name for name in ("consumes", "produces") if not hasattr(cls, name)]
    if inspect.isabstract(cls) or lacking:
        raise ConfigError(f"{where}={target}: lacks {', '.join(lacking) or 'run'}; see docs/add_a_method.md")
    return cls


def _refuse_unknown_sources(pipeline: Pipeline, overrides: Sequence[str], config_dir: Path | None) -> None:
    """An override of a source that no stage reads and no YAML states is a typo."""
    used = {ref.removeprefix(SOURCE) for stage in pipeline.stages.values() for ref in stage.inputs.values()}
    unread = [override for override in overrides if _source_named(override) not in {None, *used}]
    if not unread:
        return
    stated = compose_tree([word for word in overrides if word not in unread], config_dir)["sources"]
    assert isinstance(stated, dict)
    for override in unread:
        name = _source_named(override)
        if name not in stated:
            names = sorted(used & pipeline.sources.keys())
            raise ConfigError(
                f"sources.{name}: no stage reads this source; read are: {', '.join(names)}{nearest(str(name), names)}"
            )


def _source_named(override: str) -> str | None:
    key = override.lstrip("+~").split("=")[0].split(".")
    return key[1] if key[0] == "sources" and len(key) > 1 else None
