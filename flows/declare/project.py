"""A user's own project: a file of settings, ``posttrain.yaml``, and ``data=`` for the path of its rows."""

import argparse
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path

import yaml

from flows.declare.pipeline import listed
from lineage.artifact import SOURCE, Kind
from lineage.errors import ConfigError

DATA_KEY = "data"
_SHIPPED = Path(__file__).parents[2] / "conf"
_SCRATCH = "tasks.base_model.BaseModel"

Node = Mapping[str, object]


def data_key(tree: Node, key: str, value: object = None) -> str:
    """The key that ``data`` stands for, the path of the only source of rows; or ``data.NAME``, of one of several."""
    if isinstance(value, list):
        raise ConfigError(f"{key}=[{', '.join(map(str, value))}]: {several_files(list(map(str, value)))}")
    names, name = data_sources(tree), key.partition(".")[2]
    if not name and len(names) == 1:
        (name,) = names
    if name in names:
        return f"sources.{name}.path"
    found = "no such source" if name else f"{tree.get('name')} reads {len(names)} sources of rows"
    accepted = [f"{DATA_KEY}.{each}" for each in names]
    raise ConfigError(
        f"{key}: {found}; accepted: {listed(key, accepted) if name else ', '.join(accepted) or 'none'}; one source is "
        "read by pipeline=sft, cpt, dpo, reward, kto and grpo"
    )


def several_files(paths: Sequence[str]) -> str:
    """What to type where ``data`` has several files."""
    first, second = map(shlex.quote, paths[:2]) if len(paths) > 1 else ("a.csv", "b.json")
    return (
        "one file, folder or glob is accepted, as 'data=rows-*.jsonl'; files in several formats are a source each: "
        f"data={first} sources.more.path={second} stages.instructions.inputs.rows_2=source:more (posttrain init DIR "
        f"--data {first} {second} writes it)"
    )


def data_sources(tree: Node) -> list[str]:
    """The sources of rows that stages read, without those that only make a model from scratch (``model=tiny``)."""
    stages = {name: node_of(node) for name, node in node_of(tree.get("stages")).items()}
    read = {name: set(map(str, node_of(stage.get("inputs")).values())) for name, stage in stages.items()}
    scratch = {name for name, stage in stages.items() if node_of(stage.get("method")).get("_target_") == _SCRATCH}
    others = set().union(*(refs for name, refs in read.items() if name not in scratch))
    left_out = scratch.union(*(read[name] - others for name in scratch))
    refs = set().union(*(refs for name, refs in read.items() if name not in left_out))
    names = {ref.removeprefix(SOURCE) for ref in refs if ref.startswith(SOURCE) or ref not in stages}
    sources = {name: node_of(node) for name, node in node_of(tree.get("sources")).items() if name in names}
    return [name for name, source in sources.items() if source.get("kind", Kind.ROWS) == Kind.ROWS]


def node_of(value: object) -> Node:
    """The mapping at a key; of anything else an empty one."""
    return value if isinstance(value, Mapping) else {}


def require_global(path: Path, package: str) -> None:
    """Refuses a pipeline, a model or a preset whose keys Hydra would put below the name of its group."""
    if package == path.parent.name and package in ("pipeline", "model", "preset", "part"):
        raise ConfigError(
            f"{path}: its keys would be {package}.name, {package}.stages ..., and not name, stages; "
            "write this as its first line: # @package _global_"
        )


PROJECT = "posttrain.yaml"
project_files: dict[str, str] = {}  # override -> the project file from which this process read it
_PLAIN = re.compile(r"[\w./@:+%*-]+")  # what needs no quotes in an override


def read_project(options: argparse.Namespace) -> None:
    """Puts the settings of a project file before the overrides, which may name the file of a pipeline too.

    Raises:
        ConfigError: the pipeline (``ours/pipeline/sft.yaml``) is in another folder of groups than ``--config-dir``.
    """
    cli_args = options.overrides
    files = [arg for arg in cli_args if "=" not in arg and arg.endswith((".yaml", ".yml"))]
    placed = [arg for arg in files if Path(arg).absolute().parent.name == "pipeline" and Path(arg).is_file()]
    if placed and "config_dir" in options:
        folder = Path(placed[0]).parent.parent
        if options.config_dir and options.config_dir.resolve() != folder.resolve():
            raise ConfigError(f"{placed[0]}: is not in --config-dir {options.config_dir}; leave --config-dir out")
        cli_args = [f"pipeline={Path(arg).stem}" if arg == placed[0] else arg for arg in cli_args]
        options.config_dir = None if folder.resolve() == _SHIPPED.resolve() else folder
    options.overrides = with_project(cli_args)


def with_project(cli_args: Sequence[str]) -> list[str]:
    """Overrides, those of a project file first: of ``FILE.yaml`` among them, else of ``posttrain.yaml`` in this folder.

    The latter is left out where the overrides choose another pipeline than it does.

    Raises:
        ConfigError: there is no such file, or it holds no settings.
    """
    files = [arg for arg in cli_args if "=" not in arg and arg.endswith((".yaml", ".yml"))]
    own = [arg for arg in cli_args if arg not in files]
    keys = {_key(arg) for arg in own}
    if not files and Path(PROJECT).is_file():
        found = project_overrides(Path(PROJECT))
        chosen = [arg for arg in own if arg.startswith("pipeline=")]
        if chosen and chosen[-1] not in found:
            print(f"posttrain: {PROJECT} is left out, since {chosen[-1]} is another pipeline", file=sys.stderr)
            return own
    else:
        found = [arg for file in files for arg in project_overrides(Path(file))]
    return [*(arg for arg in found if _key(arg) not in keys), *own]


def without_project(cli_args: Sequence[str]) -> list[str]:
    """The overrides that are not those of ``posttrain.yaml`` in this folder, which every command here reads."""
    found = set(project_overrides(Path(PROJECT))) if Path(PROJECT).is_file() else set()
    chosen = [arg for arg in cli_args if arg.startswith("pipeline=")]
    return [arg for arg in cli_args if arg not in found] if set(chosen) <= found else list(cli_args)


# Peer -> keys that its configurations have, and a project never has; the first that fits is named.
_PEERS = {
    "llamafactory": {"finetuning_type", "dataset_dir", "cutoff_len", "do_train", "template"},
    "axolotl": {"base_model", "datasets", "sequence_len"},
    "oumi": {"model.model_name", "training.trainer_type"},
    "trl": {"model_name_or_path", "dataset_name", "per_device_train_batch_size"},
}
_OF_SEVERAL = {"do_train", "datasets", "model_name_or_path", "per_device_train_batch_size"}


def other_peer(keys: Set[str], peer: str) -> tuple[str, list[str]]:
    """The peer whose configuration has such keys where it is none of ``peer``, and those keys; empty: none."""
    found = {name: sorted((its - _OF_SEVERAL) & keys) for name, its in _PEERS.items()}
    other = "" if found[peer] else next((name for name, its in found.items() if its), "")
    return other, found.get(other, [])


def is_shipped(name: str) -> bool:
    """Whether a pipeline of this name comes with the package."""
    return (_SHIPPED / "pipeline" / f"{name}.yaml").is_file()


def meant(arg: str) -> str:
    """The override that an argument without a key may stand for, as a question; empty: none."""
    key = "pipeline" if is_shipped(arg) else DATA_KEY if Path(arg).is_file() else ""
    return f"did you mean {key}={arg}? " if key else ""


def _key(arg: str) -> str:
    return arg.lstrip("+~").partition("=")[0]


def project_overrides(file: Path) -> list[str]:
    """The settings of a project file as overrides, in the order of the file.

    Keys may have dots: ``stages.sft.method.learning_rate: 1e-5`` is what nested mappings say.

    Raises:
        ConfigError: it cannot be read, or is a file of a group.
    """
    try:
        node = yaml.compose(file.read_text(encoding="utf-8"), yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", "")
        what = f"line {mark.line + 1}: {problem}" if mark else getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"{file}: cannot be read as a project ({what}); YAML lines KEY: VALUE are accepted"
        ) from error
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{file}: holds no settings; YAML lines KEY: VALUE are accepted, such as model: owner/name")
    names = [str(key.value) for key, _ in node.value]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{file}: {twice} is there twice; one value of a key is accepted; remove the other")
    if any(key.value == "defaults" for key, _ in node.value):
        raise ConfigError(
            f"{file}: has a defaults list, so it is a pipeline; put it into a folder of the name pipeline: "
            f"posttrain plan conf/pipeline/{file.name}; a project file has no such list, but pipeline: NAME"
        )
    found = list(_leaves(node, ""))
    keys = {*names} | {arg.partition("=")[0] for arg in found}
    if peer := next((peer for peer, its in _PEERS.items() if keys & its), None):
        raise ConfigError(
            f"{file}: is a configuration of {peer}, with {', '.join(sorted(keys & _PEERS[peer]))}; make "
            f"a pipeline of it: posttrain import {peer} {shlex.quote(str(file))}"
        )
    project_files.update(dict.fromkeys(found, str(file)))
    return found


def _leaves(node: yaml.MappingNode, prefix: str) -> Iterator[str]:
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        if isinstance(value, yaml.MappingNode) and value.value:
            yield from _leaves(value, f"{name}.")
        else:
            yield f"{name}={_text(value)}"


def _is_plain(text: str) -> bool:
    """Whether a text without quotes is the same in YAML."""
    try:
        return bool(yaml.safe_load(text) == text)
    except yaml.YAMLError:
        return False


def _text(node: yaml.Node) -> str:
    """A value in the grammar of overrides."""
    if isinstance(node, yaml.MappingNode):
        return f"{{{', '.join(f'{key.value}: {_text(value)}' for key, value in node.value)}}}"
    if isinstance(node, yaml.SequenceNode):
        return f"[{', '.join(map(_text, node.value))}]"
    if node.tag == "tag:yaml.org,2002:null":
        return "null"
    is_text = node.tag == "tag:yaml.org,2002:str"
    is_clear = node.style is None or _is_plain(str(node.value))  # quotes that change nothing
    if not is_text or (is_clear and _PLAIN.fullmatch(node.value)) or node.value.startswith("${"):
        return str(node.value)
    return quoted(str(node.value))


def quoted(text: str) -> str:
    """A text in the grammar of overrides, where a backslash is doubled before a quote alone."""
    return "'" + re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + (r"\'" if match[2] else ""), text) + "'"
