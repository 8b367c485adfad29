"""The rows and the base that a peer's file names, as sources, and rewards; the draft of a pipeline, and its file."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lineage.artifact import SOURCE
from lineage.errors import ConfigError, DataError, PipelineError
from lineage.source.model_files import read_json
from lineage.source.source_checks import is_hub_id
from lineage.source.sources import local_paths
from tasks.data.formats.turns import ROLES, THOUGHTS
from tasks.data.preparing.options import Prepare
from tasks.model.chat_template import template_text

if TYPE_CHECKING:
    from flows.declare.pipeline import Pipeline

Values = dict[str, object]
_LAUNCHERS = {"accelerate", "torchrun", "deepspeed"}
# Training -> the stage that prepares its rows, and the slot that reads them.
STAGES = {
    "sft": ("conversations", "rows"), "cpt": ("text", "rows"), "dpo": ("preferences", "pairs"),
    "orpo": ("preferences", "pairs"), "simpo": ("preferences", "pairs"), "cpo": ("preferences", "pairs"),
    "reward": ("preferences", "pairs"), "kto": ("unpaired", "rows"), "grpo": ("prompts", "prompts"),
    "rloo": ("prompts", "prompts"),
}  # fmt: skip


def section(value: object, name: str) -> Values:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{name}: is no mapping; KEY: VALUE lines are accepted; correct the file")
    return dict(value)


@dataclass(kw_only=True)
class Draft:
    """A pipeline that is being put together.

    Args:
        mapped: key -> what it is here.
        not_needed, refused: key -> why.
        differs: key -> how what it is here is not quite the peer's.
        assumed: keys that the peer's file does not have: its defaults.
    """

    peer: str
    stage: str
    workers: int
    base: Values = field(default_factory=dict)
    rows: list[Values] = field(default_factory=list)
    data: Values = field(default_factory=dict)
    method: Values = field(default_factory=dict)
    resources: Values = field(default_factory=dict)
    mapped: dict[str, str] = field(default_factory=dict)
    not_needed: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    differs: dict[str, str] = field(default_factory=dict)
    assumed: set[str] = field(default_factory=set)
    seen: Values = field(default_factory=dict)  # what several keys decide together
    template: tuple[str, str] = ("", "")  # the key and the name of the chat template

    def set(self, key: str, path: str, value: object) -> None:
        """Sets ``method.optimizer.name`` and the like."""
        part, *parents, last = path.split(".")
        node = getattr(self, part)
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
        self.mapped[key] = f"{path}={json.dumps(value)}"

    def skip(self, key: str, why: str) -> None:
        self.not_needed[key] = why

    def places(self) -> dict[str, str]:
        """Key -> the field that it is here."""
        return {key: ours.partition("=")[0] for key, ours in self.mapped.items()}

    def refuse(self, key: str, value: object, why: str) -> None:
        self.refused[key] = f"{key}={json.dumps(value)}: {why}"


def as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else [] if value is None else [value]


SAYS = {"llamafactory": "stage", "axolotl": "rl", "trl": "trainer", "oumi": "trainer_type"}  # the key of the training
_OUMI = {"trl_sft": "sft", "trl_dpo": "dpo", "trl_kto": "kto", "trl_grpo": "grpo", "hf": "sft", "oumi": "sft"}
_AXOLOTL = {"dpo": "dpo", "ipo": "dpo", "orpo": "orpo", "kto": "kto", "simpo": "simpo", "grpo": "grpo"}
_FACTORY = {"pt": "cpt", "sft": "sft", "rm": "reward", "dpo": "dpo", "kto": "kto"}


def training_of(peer: str, flat: Values, named: str | None) -> str:
    """The training that a file is of; the keys that only say so are taken out of it."""
    key = SAYS[peer]
    found = str(flat.pop(key) if key != "rl" else flat.get(key, None)).lower() if key in flat else ""
    if peer == "llamafactory":
        if "export_dir" in flat and not found:
            raise ConfigError(
                "export_dir: the file is an export, and trains nothing; of a model of the store: posttrain export "
                "merged REF --out DIRECTORY"
            )
        if "infer_backend" in flat and not found and not named:
            raise ConfigError(
                "infer_backend: the file trains nothing; a model of the store answers by posttrain chat REF and "
                "posttrain serve-model REF"
            )
        stage = _FACTORY.get(found)
        loss = str(flat.get("pref_loss", ""))
        if stage == "dpo" and loss in ("orpo", "simpo"):
            stage = loss
            flat.pop("pref_loss")
    elif peer == "axolotl":
        kinds = [str(each.get("type")) for each in as_list(flat.get("datasets")) if isinstance(each, dict)]
        stage = _AXOLOTL.get(found) if found not in ("", "none") else "cpt" if "completion" in kinds else "sft"
        stage = "cpt" if flat.get("pretraining_dataset") else stage
        if flat.pop("reward_model", None):
            stage = "reward"
        if stage and found != "ipo":
            flat.pop("rl", None)
    else:
        stage = _OUMI.get(found) if peer == "oumi" else found or None
    stage = named or stage
    if stage not in STAGES:
        raise ConfigError(
            f"{key}={found or 'null'}: the training is unknown; accepted: {', '.join(STAGES)}; say which: "
            "--training sft"
        )
    return stage


def _of_factory(draft: Draft, flat: Values, folder: Path) -> None:
    """The files of LLaMA-Factory's named data, by its ``dataset_info.json``."""
    names = [
        name.strip() for each in as_list(flat.pop("dataset", None)) for name in str(each).split(",") if name.strip()
    ]
    configured = str(flat.pop("dataset_dir", "data"))
    places = [Path(configured), folder / configured]
    file = next((place / "dataset_info.json" for place in places if (place / "dataset_info.json").is_file()), None)
    infos = json.loads(file.read_text(encoding="utf-8")) if file else {}
    for name in names:
        info = infos.get(name)
        if file is None or not isinstance(info, dict):
            where = f"{file} has no such name" if file else f"no dataset_info.json in {' or '.join(map(str, places))}"
            draft.refuse(f"dataset.{name}", name, f"{where}; set sources.{slug(name)}.path by hand")
            continue
        hub = info.get("hf_hub_url")
        source: Values = {"path": str(hub or file.parent / str(info.get("file_name", "")))}
        source |= {ours: info[theirs] for ours, theirs in (("subset", "subset"), ("split", "split")) if theirs in info}
        columns = {str(key): str(value) for key, value in section(info.get("columns"), "columns").items()}
        ours = {"prompt": "instruction", "query": "input", "response": "output"}
        renamed = {ours.get(key, key): value for key, value in columns.items() if ours.get(key, key) != value}
        if info.get("formatting", "alpaca") == "alpaca" and not info.get("ranking"):
            renamed.pop("messages", None)
        else:
            tags = {"role_tag": "from", "content_tag": "value", **section(info.get("tags"), "tags")}
            renamed = {key: value for key, value in renamed.items() if key not in ours.values()}
            renamed |= _turns(draft, f"dataset.{name}.tags", renamed.pop("messages", None), tags)
        if renamed:
            source["columns"] = renamed
        draft.rows.append({"name": name, **source})
        draft.mapped[f"dataset.{name}"] = f"sources.{slug(name)}.path={source['path']}"
    for key in ("eval_dataset", "tokenized_path", "interleave_probs", "mix_strategy"):
        if flat.get(key) is not None:
            draft.refuse(
                key, flat.pop(key), "val_size sets rows aside here; mixtures are proportions of the data stage"
            )


_OWN_TURNS = {("from", "value"): "conversations", ("role", "content"): "messages"}  # keys of a turn -> our column


def _turns(draft: Draft, where: str, column: str | None, tags: Mapping[str, object]) -> dict[str, str]:
    """The column of turns by our name, where its own differs; refuses names of keys and of roles that are not read."""
    ours = _OWN_TURNS.get((str(tags["role_tag"]), str(tags["content_tag"])))
    roles = [str(each) for name, each in tags.items() if name not in ("role_tag", "content_tag")]
    if ours is None or (unknown := [each for each in roles if each.lower() not in ROLES]):
        found = {key: value for key, value in tags.items() if ours is None or value in unknown}
        draft.refuse(where, found, f"turns with from and value, or role and content, and the roles {', '.join(ROLES)} "
                     "are read; rename them in the rows")  # fmt: skip
        return {}
    return {ours: column} if column and column not in _OWN_TURNS.values() else {}


_OWN_WORDS = {  # what types of axolotl write around rows, whatever the template
    "alpaca": "Below is an instruction ... ### Instruction: ... ### Response:",
    "alpaca_chat": "SYSTEM: Below is an instruction ... USER: ... ASSISTANT:",
}


def _of_axolotl(draft: Draft, flat: Values, folder: Path) -> None:
    known = (
        "alpaca", "chat_template", "completion", "sharegpt", "alpaca_chat", "chat_template.default", "chatml.intel",
        "chatml.ultra", "chatml.argilla", "llama3.intel", "llama3.ultra", "llama3.argilla", "chatml.prompt_pairs",
        "llama3.prompt_pairs", "bradley_terry.chat_template", "pretrain",
    )  # fmt: skip
    for key in ("datasets", "pretraining_dataset"):
        for at, each in enumerate(as_list(flat.pop(key, None))):
            where = f"{key}[{at}]"
            node = dict(each) if isinstance(each, dict) else {"path": each}
            kind = node.pop("type", None)
            if kind is not None and kind not in known and not str(kind).startswith("chat_template"):
                draft.refuse(f"{where}.type", kind, f"{', '.join(known)} are read; name columns: sources.NAME.columns")
            _written_as(draft, f"{where}.type", str(kind), node)
            files = node.pop("data_files", None)
            built_in = node.get("path") in ("json", "csv", "parquet", "text")
            source: Values = {"path": as_list(files)[0] if built_in and files else node["path"]}
            if files and not built_in:
                source["loader"] = {"data_files": files}
            source |= {"split": node.pop("split")} if node.get("split") else {}
            source |= {"subset": node.pop("name")} if node.get("name") else {}
            columns = {
                "field": "text", "text_column": "text", "field_chosen": "chosen", "field_rejected": "rejected",
                "field_tools": "tools",
            }  # fmt: skip
            found = {ours: str(node.pop(theirs)) for theirs, ours in columns.items() if node.get(theirs)}
            found |= _turns_of_axolotl(draft, where, node)
            source |= {"columns": {ours: value for ours, value in found.items() if ours != value}} if found else {}
            source = {name: value for name, value in source.items() if value != {}}
            _skip_recognised(draft, where, node)
            draft.rows.append({"name": Path(str(source["path"])).stem, **source})
            draft.mapped[where] = f"sources.*.path={source['path']}"
    if flat.get("test_datasets") is not None:
        draft.refuse("test_datasets", flat.pop("test_datasets"), "val_set_size sets rows aside here")


def _written_as(draft: Draft, where: str, kind: str, node: Values) -> None:
    """What a type of rows writes around them: turns of a template that it names, or words of its own."""
    family = kind.partition(".")[0]
    if family in ("chatml", "llama3"):
        _set_template(draft, where, family)
    elif family == "sharegpt":
        _set_template(draft, where, str(node.pop("conversation", "vicuna_v1.1")))
    elif kind in _OWN_WORDS:
        draft.skip(where, "each row is a prompt and its answer: differs, below")
        draft.differs[f"{where}={kind}"] = (
            f'a prompt is written there as "{_OWN_WORDS[kind]}", and here by the chat template of the model; to keep '
            "the words: sources.base.chat_template=FILE.jinja, a template that writes them"
        )


def _set_template(draft: Draft, where: str, name: str) -> None:
    """The template that rows name; of several, the first renders all."""
    first, chosen = draft.template
    if not first:
        draft.template = where, name
    elif chosen != name:
        draft.skip(where, "one template renders all rows: differs, below")
        draft.differs[f"{where}={name}"] = f"its rows are rendered by the template of {first}, {chosen}"
    else:
        draft.skip(where, f"it is the template of {first}")


def _turns_of_axolotl(draft: Draft, where: str, node: Values) -> dict[str, str]:
    """The column of turns; their keys and roles are recognised where formats of rows have them."""
    mapping = section(node.pop("message_property_mappings", None), f"{where}.message_property_mappings")
    tags = {"role_tag": mapping.pop("role", None) or node.pop("message_field_role", None)}
    tags["content_tag"] = mapping.pop("content", None) or node.pop("message_field_content", None)
    roles = section(node.pop("roles", None), f"{where}.roles")
    names = {f"{role}_tag": each for role, many in roles.items() for each in as_list(many)}
    is_named = any(tags.values())
    if not is_named:  # by the rows themselves
        tags = dict(zip(tags, ("role", "content"), strict=True))
    for name in (*(["message_property_mappings"] if is_named else []), *(["roles"] if roles else [])):
        draft.skip(f"{where}.{name}", "turns with from and value, or role and content, are recognised, and their roles")
    for name, value in mapping.items():
        if name != value:
            draft.refuse(f"{where}.message_property_mappings.{name}", value, "rename the key in the rows")
    column = node.pop("field_messages", None)
    return _turns(draft, where, str(column) if column else None, {**tags, **names})


def _skip_recognised(draft: Draft, where: str, node: Values) -> None:
    """Skips what formats of rows say themselves, and refuses the rest."""
    for name in ("ds_type", "train_on_split", "shards"):
        if node.pop(name, None) is not None:
            draft.skip(f"{where}.{name}", "formats of rows are recognised")
    for name, same in (("roles_to_train", ["assistant"]), ("train_on_eos", ["turn"]), ("train_on_eot", ["turn"])):
        if name in node and as_list(node[name]) in ([], same, ["gpt"] if same == ["assistant"] else same):
            draft.skip(f"{where}.{name}", "each answer is trained, and the token that ends it")
            del node[name]
    if (template := node.pop("chat_template", None)) is not None:
        _set_template(draft, f"{where}.chat_template", str(template))
    for name in ("field_thinking", "template_thinking_key"):
        if node.get(name) in THOUGHTS:
            draft.skip(f"{where}.{name}", "it is read, as the template takes it")
            del node[name]
    for name, value in node.items():
        if name != "path":
            draft.refuse(f"{where}.{name}", value, "it is no setting of a source that is mapped")


def _of_trl(draft: Draft, flat: Values, folder: Path) -> None:
    mixed = flat.pop("datasets", None)
    nodes = [dict(each) for each in as_list(mixed) if isinstance(each, dict)]
    if (name := flat.pop("dataset_name", None)) is not None:
        nodes = [{"path": name}]
    nodes += _of_handbook(draft, flat)
    for at, node in enumerate(nodes):
        source: Values = {"path": node.pop("path")}
        if split := node.pop("split", None) or flat.pop("dataset_train_split", None):
            source["split"] = split
        if subset := node.pop("name", None) or flat.pop("dataset_config", None):
            source["subset"] = subset
        if files := node.pop("data_files", None):
            source["loader"] = {"data_files": files}
        for name, value in node.items():
            draft.refuse(f"datasets[{at}].{name}", value, "it is no setting of a source that is mapped")
        draft.rows.append({"name": Path(str(source["path"])).stem, **source})
        draft.mapped["dataset_name" if mixed is None else f"datasets[{at}]"] = f"sources.*.path={source['path']}"
    if flat.pop("dataset_test_split", None) is not None:
        draft.skip("dataset_test_split", "rows of the training split are held out (held_out)")
    if flat.pop("dataset_streaming", None):
        draft.skip("dataset_streaming", "rows are prepared once, and read from the store")


def _of_handbook(draft: Draft, flat: Values) -> list[Values]:
    """The rows of ``dataset_mixture``, as TRL has it, and of ``dataset_mixer``, as the Alignment Handbook had it."""
    mixture, nodes = section(flat.pop("dataset_mixture", None), "dataset_mixture"), list[Values]()
    for each in as_list(mixture.pop("datasets", None)):
        node = section(each, "dataset_mixture.datasets")
        found = {"path": node.pop("id", node.pop("path", None)), "name": node.pop("config", None), **node}
        if found.pop("columns", None) is not None:
            draft.skip("dataset_mixture.columns", "the columns of the rows' kind are read")
        nodes.append({**found, "name": None if found["name"] == "default" else found["name"]})
    if (held := mixture.pop("test_split_size", None)) is not None:
        draft.set("dataset_mixture.test_split_size", "data.held_out", held)
    for name in mixture:
        draft.skip(f"dataset_mixture.{name}", "rows have an order of their own")
    splits = [str(each) for each in as_list(flat.pop("dataset_splits", None))]
    for path, weight in section(flat.pop("dataset_mixer", None), "dataset_mixer").items():
        nodes.append({"path": path, "weight": weight, "split": (splits or ["train"])[0]})
        draft.skip("dataset_splits", "the first split is trained; rows of it are held out (held_out)")
    for node in nodes:
        share = float(str(node.pop("weight", None) or 1))
        if share < 1:
            node["split"] = f"{node.get('split') or 'train'}[:{share * 100:g}%]"
    return nodes


def _of_kwargs(draft: Draft, where: str, source: Values, built: Values) -> Values:
    """Puts the arguments of a data set of Oumi's into a source; returns those that have no place."""
    if (most := built.pop("limit", None)) is not None:
        source["sample_count"] = most
    if hub := built.pop("hf_dataset_path", None):
        source["path"] = str(hub)
    named = {"prompt_column": "prompt", "response_column": "completion", "messages_column": "messages"}
    columns = {ours: str(built.pop(theirs)) for theirs, ours in named.items() if built.get(theirs)}
    if columns := {ours: each for ours, each in columns.items() if ours != each}:
        source["columns"] = columns
    for key in ("processor_name", "return_tensors", "return_conversation", "processor_kwargs", "seq_length"):
        if built.pop(key, None) is not None:
            draft.skip(f"{where}.dataset_kwargs.{key}", "rows become tokens in the training, at its max_length")
    return {f"dataset_kwargs.{key}": value for key, value in built.items()}


def _of_oumi(draft: Draft, flat: Values, folder: Path) -> None:
    shares: dict[str, float] = {}
    for at, each in enumerate(as_list(flat.pop("datasets", None))):
        node, where = section(each, f"datasets[{at}]"), f"datasets[{at}]"
        name, path = str(node.pop("dataset_name", "")), node.pop("dataset_path", None)
        source: Values = {"path": str(path or name)}
        source |= {key: node.pop(key) for key in ("subset", "split", "sample_count") if node.get(key) is not None}
        node |= _of_kwargs(draft, where, source, section(node.pop("dataset_kwargs", None), "dataset_kwargs"))
        if node.pop("shuffle", False):
            source["shuffle_seed"] = node.pop("seed", None) or 0
        if (share := node.pop("mixture_proportion", None)) is not None:
            shares[slug(Path(str(source["path"])).stem)] = float(str(share))
        for key in ("shuffle_buffer_size", "seed", "transform_num_workers", "trust_remote_code"):
            if key in node:
                draft.skip(f"{where}.{key}", "rows are read once, in an order of their own")
                del node[key]
        for key, value in node.items():
            draft.refuse(f"{where}.{key}", value, "it is no setting of a source that is mapped")
        draft.rows.append({"name": Path(str(source["path"])).stem, **source})
        draft.mapped[where] = f"sources.*.path={source['path']}"
    _mixture(draft, flat, shares)


def _mixture(draft: Draft, flat: Values, shares: Mapping[str, float]) -> None:
    if shares:
        draft.data["proportions"] = {
            "rows" if at == 0 else name: share for at, (name, share) in enumerate(shares.items())
        }
    if (strategy := flat.pop("mixture_strategy", None)) and len(draft.rows) > 1:
        draft.set("mixture_strategy", "data.stopping", strategy)
    for key in ("collator_name", "collator_kwargs", "target_col", "stream", "use_torchdata", "use_async_dataset"):
        if flat.pop(key, None) is not None:
            draft.skip(key, "rows are batched without padding; the answers alone get loss")


_ACCURACY = (
    "TRL compares expressions (math-verify), numeric the last number of each; where solutions are no numbers, set "
    "function: exact"
)
_REWARDS: Mapping[str, Values] = {
    **{name: {"function": "numeric", "column": "solution"} for name in ("accuracy", "accuracy_reward")},
    "think_format_reward": {"function": "format", "pattern": r"(?s)<think>(?!.*<think>).*?</think>.*"},
}


def set_rewards(draft: Draft, key: str, value: object) -> None:
    from tasks.reward_functions.built_in import BUILT_IN
    from tasks.reward_functions.scorer import PEERS as OTHERS

    rewards: Values = {}
    for each in map(str, as_list(value)):
        name = each.rpartition(".")[2]
        if each not in (*_REWARDS, *BUILT_IN) and "." not in each:
            here = OTHERS.get(each, f"{', '.join(BUILT_IN)} and a.dotted.function are read")
            draft.refuse(f"{key}:{each}", each, f"there is no such reward function; here it is {here}")
            continue
        if each in ("accuracy", "accuracy_reward"):
            draft.differs[f"{key}:{each}"] = _ACCURACY
        rewards[name] = _REWARDS.get(each, {"function": f"python:{each}" if "." in each else each})
    draft.set(key, "method.rewards", rewards)
    draft.seen["reward_names"] = [each.rpartition(".")[2] for each in map(str, as_list(value))]


def set_prompt_column(draft: Draft, key: str, value: object) -> None:
    for each in draft.rows:
        each["columns"] = {"prompt": str(value)}
    draft.mapped[key] = f"sources.*.columns.prompt={value}"


def finish_rewards(draft: Draft) -> None:
    """Gives each reward its weight."""
    names, weights = (as_list(draft.seen.get(name)) for name in ("reward_names", "reward_weights"))
    for name, weight in zip(names, weights, strict=False):
        rewards = draft.method["rewards"]
        assert isinstance(rewards, dict)
        if str(name) in rewards:
            rewards[str(name)] = {**section(rewards[str(name)], str(name)), "weight": weight}


# Templates of LLaMA-Factory and axolotl -> ours, or TRL's, that write the same turns.
_TEMPLATES = {
    "chatml": "chatml", "llama3": "llama3", "qwen": "qwen2_5", "qwen_25": "qwen2_5", "qwen3": "qwen3", "phi": "phi3",
    "phi_3": "phi3", "phi_35": "phi3_5",
}  # fmt: skip
_OWN_TEMPLATE = "tokenizer_default"


def _own_template(draft: Draft) -> str | None:
    """The chat template of a base on this machine; None: it has none, or is not here."""
    from tasks.model.merging import template_of

    folder = local_paths(str(draft.base.get("base_model", draft.base.get("path", ""))))
    return template_of(folder[0]) if folder and folder[0].is_dir() else None


def _writes_same(own: str, ours: str) -> bool:
    """Whether two templates write the same turns, with and without a system prompt."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    turns = [{"role": role, "content": f"a {role}."} for role in ("system", "user", "assistant", "user", "assistant")]
    rendering = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    try:
        first, second = (
            [rendering.from_string(text).render(messages=each, bos_token="").strip() for each in (turns, turns[1:])]
            for text in (own, template_text(ours))
        )
    except (TemplateError, TypeError):
        return False
    return first == second


def finish_template(draft: Draft) -> None:
    """The chat template, where the model's own does not write the same turns."""
    key, value = draft.template
    own = _own_template(draft)
    value = value.removeprefix(f"{_OWN_TEMPLATE}_fallback_") if own is None else value
    ours = _TEMPLATES.get(value)
    if not value or "chat_template" in draft.base:
        return
    if draft.stage == "cpt" or value == "jinja":
        draft.skip(key, "documents have no turns" if draft.stage == "cpt" else "chat_template_jinja has it")
    elif value.startswith(_OWN_TEMPLATE):
        draft.skip(key, "the model's own chat template is rendered")
    elif ours and own and _writes_same(own, ours):
        draft.skip(key, "the model's own chat template writes the same turns")
    elif ours:
        draft.set(key, "base.chat_template", ours)
    else:
        draft.differs[f"{key}={value}"] = (
            "check: there is no template of this name here, and the model's own is rendered; posttrain data FILE "
            "model=DIRECTORY shows the tokens; another one: sources.base.chat_template=FILE.jinja"
        )
        draft.skip(key, "it has no template of this name here: differs, below")


def finish_factory(draft: Draft) -> None:
    """What LLaMA-Factory does otherwise with the same keys."""
    if draft.peer != "llamafactory":
        return
    if draft.stage == "sft" and "packing" in draft.method and "neat_packing" not in draft.mapped:
        draft.differs["packing"] = "without neat_packing, rows of a pack see each other there; here they do not"
    if "cutoff_len" in draft.mapped and draft.stage != "cpt":
        draft.mapped["cutoff_len"] += "  (of a longer row the end is cut here; there, of each turn)"


def finish_trained_on(draft: Draft) -> None:
    """An adapter that the peer trains on, by its own files where they are here."""
    key, method = str(draft.seen.get("trains_on", "")), draft.method
    if not key or draft.seen.get("new_adapter") or not draft.seen.get("adapter"):
        return
    adapter, folder = method["adapter"], local_paths(str(draft.base["path"]))
    assert isinstance(adapter, dict)
    saved = read_json(folder[0], "adapter_config.json") if folder else None
    for ours, theirs in (("rank", "r"), ("alpha", "lora_alpha"), ("target_modules", "target_modules")):
        if isinstance(saved, dict) and (found := saved.get(theirs)):
            adapter[ours] = ",".join(sorted(map(str, found))) if isinstance(found, list) else found
            draft.mapped[f"lora_{theirs.removeprefix('lora_')}"] = f"method.adapter.{ours}={json.dumps(adapter[ours])}"
    method["adapter_in"] = "continue"
    draft.mapped[key] += ", method.adapter_in=continue"
    if draft.peer == "llamafactory" and draft.stage in ("dpo", "kto"):
        draft.differs[key] = (
            "the same adapter is trained on, but the reference there is the base alone, and here the base with the "
            "adapter as it was"
        )


NO_PAD = "batches have no padding, or it is masked: no token is needed for it"


def set_special_tokens(draft: Draft, key: str, value: object) -> None:
    for name, token in value.items() if isinstance(value, dict) else ():
        if name == "pad_token":
            draft.skip(f"{key}.{name}", NO_PAD)
        elif name in ("eos_token", "bos_token"):
            draft.set(f"{key}.{name}", f"base.{name}", token)
        elif name == "unk_token":
            draft.skip(f"{key}.{name}", "tokens are those of tokenizer.json")
        else:
            draft.refuse(f"{key}.{name}", token, "eos_token and bos_token are mapped")


def set_weights(draft: Draft, key: str, value: object) -> None:
    """A base, or an adapter on it."""
    draft.set(key, "base.base_model" if "path" in draft.base else "base.path", value)


def set_adapter(draft: Draft, key: str, value: object) -> None:
    if "path" in draft.base:
        draft.base["base_model"] = draft.base["path"]
        draft.mapped = {each: ours.replace("base.path=", "base.base_model=") for each, ours in draft.mapped.items()}
    draft.set(key, "base.path", value)
    draft.seen["trains_on"] = key


READERS = {"llamafactory": _of_factory, "axolotl": _of_axolotl, "trl": _of_trl, "oumi": _of_oumi}


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "rows"


def number(value: object) -> object:
    """``1e-4``, which YAML reads as a text, is a number to all peers."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", value):
        return float(value) if re.search(r"[.eE]", value) else int(value)
    return value


def flat_oumi(values: Mapping[str, object]) -> Values:
    """Oumi's sections as one level; its names are Hugging Face's but for a few."""
    renamed = {
        "optimizer": "optim", "model_max_length": "max_length", "compile": "torch_compile",
        "empty_device_cache_steps": "torch_empty_cache_steps", "adapter_model": "adapter_name_or_path",
        "lora_init_weights": "init_lora_weights",
    }  # fmt: skip
    flat: Values = {}
    for title, inside in values.items():
        if title == "data":
            flat |= section(section(inside, "data").get("train"), "data.train")
            flat |= {f"data.{name}": each for name, each in section(inside, "data").items() if name != "train"}
        elif title in ("model", "training", "peft"):
            part = section(inside, title)
            for nested in ("grpo", "trainer_kwargs"):
                flat |= section(part.pop(nested, {}), nested)
            flat |= {renamed.get(name, name): each for name, each in part.items()}
        elif title == "fsdp":
            flat["fsdp"] = section(inside, title) if section(inside, title).get("enable_fsdp") else None
        elif title == "deepspeed":
            found = section(inside, title)
            stage = re.sub(r"\D", "", str(found.get("zero_stage", 0)))
            zero = {**found, "stage": stage or 0} if found.get("enable_deepspeed") else None
            flat["deepspeed"] = {"zero_optimization": zero} if zero else None
        else:
            flat[title] = inside
    return flat


def read_values(peer: str, file: Path) -> Values:
    """A YAML or JSON file, or a shell script with the arguments of a command."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror}); name a file that exists") from error
    if file.suffix == ".py":
        raise ConfigError(
            f"{file}: Python scripts are not read; a YAML or JSON file, or a shell script with the arguments of "
            f"{peer}'s command, is accepted; write the settings as such a file"
        )
    if file.suffix in (".yaml", ".yml", ".json"):
        try:
            values = section(yaml.safe_load(text), str(file))
            found = OmegaConf.to_container(OmegaConf.create(values), resolve=True) if "${" in text else values
            return section(found, str(file))
        except OmegaConfBaseException as error:
            raise ConfigError(f"{file}: {str(error).partition(chr(10))[0]}; write the value instead") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"{file}: is not YAML ({str(error).partition(chr(10))[0]}); correct it") from error
    return _arguments(peer, text)


def _arguments(peer: str, text: str) -> Values:
    """``--key value`` pairs of a command; of ``trl sft`` and ``.../dpo.py`` the trainer too."""
    tokens = shlex.split(text.replace("\\\n", " "), comments=True)
    found: Values = {}
    scripts = [at for at, word in enumerate(tokens) if word.endswith(".py")] if _LAUNCHERS & {*tokens} else []
    for at, word in enumerate(tokens):
        if peer == "trl" and "trainer" not in found:
            script = re.fullmatch(r"(?:.*/)?(\w+)\.py", word)
            name = script[1] if script else word if at and tokens[at - 1] == "trl" else ""
            if name.removesuffix("_trainer") in (*STAGES, "reward_modeling"):
                found["trainer"] = "reward" if name == "reward_modeling" else name
        if not word.startswith("--"):
            continue
        key, equals, value = word.removeprefix("--").partition("=")
        is_launchers = at < min(scripts, default=0)
        key = f"launcher.{key}" if is_launchers else key
        following = []
        for each in tokens[at + 1 :] if not equals else ():
            if each.startswith("--") or (is_launchers and each.endswith(".py")):
                break
            following.append(each)
        values = [yaml.safe_load(each) for each in ([value] if equals else following)]
        found[key.replace("-", "_")] = values[0] if len(values) == 1 else values or True
    return found


def hub_sources(pipeline: "Pipeline") -> list[str]:
    """The sources of which nothing is on this machine, as their fields."""
    return [
        f"sources.{name}.path={source.path}" for name, source in pipeline.sources.items()
        if is_hub_id(source.path) and not local_paths(source.path)
    ]  # fmt: skip


def mends(pipeline: "Pipeline") -> list[str]:
    """What the plan refuses, as far as files of this machine show it: an adapter that is missing, the rows, the rest.

    Of a pipeline that reads the hub, ``posttrain plan`` alone says the rest.
    """
    from flows.planning.estimates import refused_rows
    from flows.planning.plan import make_plan

    base, found = pipeline.sources["base"], list[str]()
    if base.base_model and not local_paths(base.path):
        found.append(f"sources.base.path={base.path}: no such folder here, so that it would be an adapter of the hub")
    stage = pipeline.stages["data"]
    assert isinstance(stage.method, Prepare)
    read = {
        slot: pipeline.sources[stage.inputs[slot].removeprefix(SOURCE)] for slot in stage.method.row_slots(stage.inputs)
    }
    try:
        refused_rows(stage.method, read)
    except DataError as error:
        found.append(f"data: {error}")
    if not found and all(local_paths(source.path) for source in pipeline.sources.values()):
        try:
            make_plan(pipeline)
        except PipelineError as error:
            found.append(str(error))
    return found


def part(node: Values, key: str) -> Values:
    found = node[key]
    assert isinstance(found, dict)
    return found


def pipeline_of(draft: Draft, name: str, comments: Sequence[str], fields: Sequence[str] = ()) -> str:
    """The pipeline file: one stage that prepares the rows, and the training.

    Args:
        fields: overrides of fields, which come last.
    """
    kind, slot = STAGES[draft.stage]
    names = list[str]()
    for each in draft.rows:
        wished = slug(str(each["name"]))
        names.append(wished if wished not in (*names, "base") else f"{wished}-{len(names) + 1}")
    rows = {
        own: {key: value for key, value in each.items() if key != "name"}
        for own, each in zip(names, draft.rows, strict=True)
    }
    inputs = {"rows" if at == 0 else own: f"source:{own}" for at, own in enumerate(names)}
    training: Values = {
        "inputs": {"policy": "base", slot: "data"},
        "method": draft.method,
        "resources": draft.resources,
    }
    tree: Values = {
        "defaults": [
            {"/stage@stages.data.method": kind},
            {f"/stage@stages.{draft.stage}.method": draft.stage},
            "_self_",
        ],
        "name": name,
        "sources": {"base": {"kind": "checkpoint", **draft.base}, **rows},
        "stages": {"data": {"inputs": inputs, "method": draft.data}, draft.stage: training},
    }
    for key, _, value in (each.lstrip("+").partition("=") for each in fields):
        *parents, last = key.split(".")
        node: Values = tree
        for parent in parents:
            node.setdefault(parent, {})
            node = part(node, parent)
        node[last] = yaml.safe_load(value)
    head = "".join(f"# {line}\n" for line in ("@package _global_", *comments))
    return head + str(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120))
