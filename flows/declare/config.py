"""Builds the pipeline's dataclasses from the composed config: every key and type is checked, once."""

import ast
import importlib
import inspect
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar, cast, get_args

from pydantic import TypeAdapter, ValidationError

from flows.declare.compose import compose_tree, declared_sources, field_of, groups
from flows.declare.operation import Alias, Operation, Retrain, Schedule, Tracking, Trigger, strict
from flows.declare.peer_names import FIELDS, value_of
from flows.declare.pipeline import Advise, CodeDrift, Pipeline, Stage, listed
from flows.declare.sweep import Sweep
from lineage.artifact import SOURCE, Source
from lineage.code import full_name, parsed, source_file
from lineage.errors import ConfigError
from lineage.fingerprint import field_names
from lineage.record.verdict import Approval
from lineage.store import store_path
from tasks.context import Precision, Resources
from tasks.method import LOOP_FIELDS, Adapter, Method, Optimizer, Quantization, Training
from tasks.method import Schedule as LearningRate
from tasks.recipe import SHORT_FORMS
from tasks.train.compatibility import check_compatible

T = TypeVar("T")
Node = Mapping[str, object]

_ADAPTERS: dict[type, TypeAdapter[object]] = {}  # building one takes milliseconds; a sweep checks hundreds of trees


def typed(cls: type[T], node: Node, where: str, groups: Sequence[str] = ()) -> T:
    """Checks every key and type of a node against a dataclass, then builds it.

    Args:
        groups: further keys to list as accepted in messages: Hydra consumes them.
    """
    try:
        # Strict mode on JSON accepts a string for an enum, but not `true` for a number.
        if cls not in _ADAPTERS:
            _ADAPTERS[cls] = TypeAdapter(cls)
        return cast(T, _ADAPTERS[cls].validate_json(json.dumps(node), strict=True))
    except ValidationError as error:
        if numbers := [each for detail in error.errors() if (each := _number_for_text(node, dict(detail)))]:
            return typed(cls, _with_texts(node, numbers), where, groups)
        problems = [_problem(cls, dict(detail), where, groups) for detail in error.errors()]
        raise ConfigError("\n".join(problems)) from error
    except ConfigError as error:  # raised by a dataclass that checks its fields, without knowing its location
        if str(error).startswith(where):
            raise
        raise ConfigError(f"{where}: {error}") from error


def _number_for_text(node: object, detail: Mapping[str, object]) -> tuple[str | int, ...] | None:
    """Where a number is, for which a text is expected: what was typed is the text."""
    if detail["type"] != "string_type":
        return None
    at: list[str | int] = []
    loc = detail["loc"]
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


def _problem(cls: type, detail: dict[str, object], where: str, groups: Sequence[str]) -> str:
    loc = detail["loc"]
    assert isinstance(loc, tuple)
    path = ".".join(part for part in (where, *map(str, loc)) if part)
    if detail["type"] == "unexpected_keyword_argument":
        accepted = [field.name for field in fields(_class_at(cls, loc[:-1]))]
        accepted = list(dict.fromkeys([*accepted, *groups])) if len(loc) == 1 else accepted
        peers = "" if str(loc[-1]) in accepted else FIELDS.get(str(loc[-1]), "")
        if peers:
            return f"{path}: unknown key; here it is {peers}; accepted: {', '.join(accepted)}"
        return f"{path}: unknown key; accepted: {listed(loc[-1], accepted)}"
    if detail["type"] in ("missing", "missing_argument"):
        return f"{path}: is not set and has no default; set {path}=..."
    form = _form(cls, detail, loc)
    hint = f"; write {path}={form}" if form else ""
    if ours := value_of(detail["input"], str(detail["msg"])):
        hint = f"; here it is {path}={ours}"
    if detail["type"] == "string_type" and isinstance(detail["input"], bool):
        hint = f"; where the text is meant, write '{path}=\"{json.dumps(detail['input'])}\"'"
    return f"{path}={json.dumps(detail['input'])}: {str(detail['msg'])[0].lower()}{str(detail['msg'])[1:]}{hint}"


def _form(cls: type, detail: dict[str, object], loc: tuple[int | str, ...]) -> str:
    """How to write the expected list or object in an override; empty: neither was expected."""
    if detail["type"] in ("list_type", "tuple_type"):
        return f"[{detail['input'] if isinstance(detail['input'], str | int | float) else '...'}]"
    if detail["type"] == "dataclass_type":
        return f"{{{', '.join(f'{field.name}: ...' for field in fields(_class_at(cls, loc)))}}}"
    return ""


def _class_at(cls: type, loc: tuple[int | str, ...]) -> type:
    """The dataclass at a location inside ``cls``."""
    for part in loc:
        hints = {field.name: field.type for field in fields(cls)}
        cls = next(_dataclasses(hints.get(str(part))), cls)
    return cls


def _dataclasses(hint: object) -> Iterator[type]:
    """The dataclasses in a type: ``Rule`` in ``Mapping[str, Rule] | None``."""
    if isinstance(hint, type) and is_dataclass(hint):
        yield hint
    for part in get_args(hint):
        yield from _dataclasses(part)


def target_class(path: str, where: str, bases: tuple[type, ...], refusal: str) -> type:
    """Imports the class ``package.module.Class``.

    A module is imported only if its source defines or imports a class of that name that derives from one of ``bases``;
    this is checked by parsing the source files, without importing them.

    Args:
        refusal: error message for a class that derives from none of them.

    Raises:
        ConfigError: there is no such class, it derives from none of ``bases``, or its module cannot be imported.
    """
    module, _, name = path.rpartition(".")
    if module not in sys.modules:
        source_file.cache_clear()  # it may have been created since
        try:
            file = source_file(module)  # an empty name is a ValueError
            derives = _derives(module, name, bases, seen=set())
        except (ValueError, OSError, SyntaxError) as error:
            raise _not_importable(path, where, error) from error
        if file is None:
            raise _not_importable(path, where, ImportError(f"there is no Python source of a module {module}"))
        if not derives:
            raise ConfigError(f"{where}={path}: {refusal} ({file} was read, and not imported)")
    found = dotted(path, where)
    if not (isinstance(found, type) and issubclass(found, bases)):
        raise ConfigError(f"{where}={path}: {refusal}")
    return found


def dotted(path: str, where: str) -> object:
    """Imports what a dotted path names.

    Raises:
        ConfigError: it cannot be imported.
    """
    module, _, name = path.rpartition(".")
    try:
        found: object = getattr(importlib.import_module(module), name)
    except Exception as error:  # importing a user's module may raise anything
        raise _not_importable(path, where, error) from error
    return found


def _not_importable(path: str, where: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"{where}={path}: cannot be imported ({error}); give package.module.Class, "
        "of a package that is installed, in this folder, or on PYTHONPATH"
    )


def _derives(module: str, name: str, bases: tuple[type, ...], seen: set[tuple[str, str]]) -> bool:
    if module in sys.modules:
        found = getattr(sys.modules[module], name, None)
        return isinstance(found, type) and issubclass(found, bases)
    file = source_file(module) if module and (module, name) not in seen else None
    if file is None or file.suffix != ".py":
        return False
    seen.add((module, name))
    origins = (origin.rpartition(".") for origin in _origins(name, module, file))
    return any(_derives(place, base, bases, seen) for place, _, base in origins)


def _origins(name: str, module: str, file: Path) -> Iterator[str]:
    """Dotted paths of the origin of an imported name, or of the bases of the class of that name."""
    nodes, imports = list(ast.walk(parsed(file))), dict[str, str]()
    for node in nodes:
        if isinstance(node, ast.Import):
            imports |= {each.asname: each.name for each in node.names if each.asname}
            imports |= {top: top for top in (each.name.partition(".")[0] for each in node.names if not each.asname)}
        elif isinstance(node, ast.ImportFrom):
            imports |= {each.asname or each.name: f"{full_name(node, module, file)}.{each.name}" for each in node.names}
    if name in imports:
        yield imports[name]
    for node in nodes:
        for base in node.bases if isinstance(node, ast.ClassDef) and node.name == name else []:
            first, dot, rest = ast.unparse(base.value if isinstance(base, ast.Subscript) else base).partition(".")
            yield imports.get(first, f"{module}.{first}") + dot + rest


@strict
class StageNode:
    """A stage as in YAML, before its method's class is known."""

    method: dict[str, object]
    inputs: dict[str, str]
    resources: dict[str, object]


@strict
class GateDefaults:
    """Defaults of all gates of a pipeline."""

    approval: Approval


@strict
class TrainingDefaults:
    """Default fields of trainings, selected by ``preset=``.

    Args:
        every, sft: for all methods, and for SFT only.
        sft_adapter: for SFT with an adapter; replace those of ``sft``.
        adapter: fields of the LoRA of every training that has one; of a quantized base the dropout alone, whose rank
            and alpha the reference documents name apart.
    """

    every: dict[str, object]
    sft: dict[str, object]
    sft_adapter: dict[str, object]
    adapter: dict[str, object]


@strict
class Root:
    """The keys of ``conf/config.yaml`` with everything it composes.

    Args:
        adapter, quantization, optimizer, lr_schedule, save, precision, gate: defaults for every method with such a
            field.
    """

    name: str
    store: str
    code_drift: CodeDrift
    advice: Advise
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
    training: TrainingDefaults
    aliases: dict[str, Alias]
    non_commercial_labels: tuple[str, ...]
    accept_label_drop: tuple[str, ...]
    restart: tuple[str, ...]
    because: dict[str, str]
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
    root = _root(tree)
    sources = {name: typed(Source, node, f"sources.{name}") for name, node in _nodes(tree, "sources").items()}
    stages = {name: _stage(name, node, root, tree) for name, node in _nodes(tree, "stages").items()}
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
    )
    _refuse_unread_sources(pipeline, overrides, config_dir)
    return pipeline


def _root(tree: Node) -> Root:
    adapter = None if tree.get("adapter") == AUTO else tree.get("adapter")
    return typed(Root, {**tree, "adapter": adapter}, "", groups())


def stages_of(tree: Node) -> dict[str, Stage]:
    """The stages of a configuration, each checked on its own, without their connections.

    Raises:
        ConfigError: names what was found, what is accepted, what to do.
    """
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
    defaults = {
        "adapter": tree["adapter"], "quantization": tree["quantization"], "optimizer": tree["optimizer"],
        "schedule": tree["lr_schedule"], "save": root.save, "approval": root.gate.approval,
        "precision": root.precision if _applies_precision(cls) else None,
    }  # fmt: skip
    taken = set(field_names(cls))
    for key in defaults.keys() & taken:
        if defaults[key] is not None:
            recipe[key] = _merged(defaults[key], recipe[key]) if key in recipe else defaults[key]
    shared = tree["resources"]
    assert isinstance(shared, dict)
    # The root's resources are the defaults of all stages.
    resources = typed(Resources, {**shared, **parts.resources}, f"{where}.resources")
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
    notes: tuple[str, ...] = (
        (f"{where}.method: sets {', '.join(kept)} itself, and not as the preset does",) if kept else ()
    )
    if recipe.get("precision") == "auto" and "precision" in taken:
        recipe["precision"] = resources.resolved_precision("auto")
        because = f"gpus_per_worker={resources.gpus_per_worker}"
        notes += (f"{where}.method.precision=auto: {recipe['precision']}, because {because}",)
    return Stage(method=typed(cls, recipe, f"{where}.method"), inputs=parts.inputs, resources=resources, notes=notes)


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
            defaults["adapter"] = _merged({"type": adapter.get("type", "lora"), **lora}, defaults.get("adapter", {}))
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
            recipe[key] = _merged(value, recipe[key])
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


def _applies_precision(cls: type[Method]) -> bool:
    """False for a method with its own loop that always computes in fp32."""
    return not (issubclass(cls, Training) and cls.has_own_loop and "precision" in LOOP_FIELDS - cls.applies)


def _merged(shared: object, own: object) -> object:
    """A stage's setting merged over the default, unless it selects another optimizer, adapter ..."""
    if not isinstance(shared, Mapping) or not isinstance(own, Mapping):
        return own
    if any(own.get(key, shared.get(key)) != shared.get(key) for key in ("name", "type", "format")):
        return own
    return {**shared, **own}


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
    stages = declared.get("stages")
    inputs = (
        [each.get("inputs") for each in stages.values() if isinstance(each, dict)] if isinstance(stages, dict) else []
    )
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
