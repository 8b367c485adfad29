"""Exports a stage as a folder that verl trains from: rows, settings, rewards and the command."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from flows.planning.plan import Plan, PlannedStage
from flows.planning.staleness import PlannedInput
from flows.verl.recipe import VERSION, Places, flat, verl_recipe
from lineage.artifact import MODELS, SOURCE
from lineage.errors import ArtifactError, ConfigError
from lineage.filesystem.digest import DigestCache
from lineage.filesystem.files import refuse_edited
from lineage.source.model_source import model_options
from lineage.store import CACHE
from tasks.data.kinds import HELD_OUT, TRAIN, messages_of, tools_of
from tasks.evaluate.row_scores import WEIGHTS_FILE
from tasks.model.fetch_model import fetch_model
from tasks.reward_functions import Rewards
from tasks.train.generation.generating import Generating

REWARDS, COMMAND, NOTES = "rewards.py", "run.sh", "not_exported.txt"
_REWARDS = '''\
"""The reward functions of the stage {stage}, for verl: `pip install` posttrain where verl computes rewards."""

import json
from functools import cache

from tasks.reward_functions import RewardFunction, Scorer, scorers

REWARDS = json.loads({rewards!r})
MODEL = {model!r}


@cache
def _scorers() -> list[Scorer]:
    from pathlib import Path

    from tasks.model.tokenizers import tokenizer_of

    rewards = {{name: RewardFunction(**_fields(each)) for name, each in REWARDS.items()}}
    return scorers(rewards, tokenizer_of(Path(MODEL)))


def _fields(configured: dict) -> dict:
    return {{name: tuple(value) if isinstance(value, list) else value for name, value in configured.items()}}


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> dict[str, float]:
    """The weighted sum of the rewards as `score`, and each reward under its name."""
    row = json.loads(extra_info["posttrain"])
    columns = {{name: [value] for name, value in row["columns"].items()}}
    found = {{each.name: each([row["prompt"]], [solution_str], columns)[0] for each in _scorers()}}
    total = sum(each.weight * found[each.name] for each in _scorers())
    return {{"score": total, **{{f"rewards/{{name}}": value for name, value in found.items()}}}}
'''


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The result of an export: folder, settings by key, overrides that replaced some, notes on what is not exported."""

    folder: Path
    num_rows: dict[str, int]
    config: dict[str, object]
    overrides: list[str]
    notes: list[str]


def export_verl(plan: Plan, stage: str, folder: Path, overrides: Sequence[str], ability: str) -> Exported:
    """Writes the folder.

    Args:
        overrides: overrides of verl's settings, in Hydra's grammar.
        ability: verl's label for the rows, such as math.

    Raises:
        ConfigError: verl has no such method or option, or an override has no value.
        ArtifactError: an input of the stage is not finished.
    """
    planned = plan.stage(stage)
    method = planned.stage.method
    if not isinstance(method, Generating):
        raise ConfigError(f"{stage}: {method.name()} is not exported to verl; a stage of GRPO, RLOO or PPO is accepted")
    inputs = {slot: _finished(plan, stage, each) for slot, each in planned.inputs.items()}
    prompts, policy = inputs["prompts"], inputs["policy"]
    require_whole(stage, policy)
    require_plain_tokenizer(stage, policy)
    folder = folder.absolute()
    source = f"{plan.pipeline.name}/{stage}"
    rewards = method.rewards or {}
    truth = _truth_column(rewards)
    rows = {name: verl_rows(prompts / name, source, ability, truth) for name in (TRAIN, HELD_OUT)}
    places = Places(
        policy=str(policy), train=str(folder / TRAIN), held_out=str(folder / (HELD_OUT if rows[HELD_OUT] else TRAIN)),
        rewards=str(folder / REWARDS) if rewards else None, measures=bool(rows[HELD_OUT]),
        reward_model=str(inputs["reward_model"]) if "reward_model" in inputs else None,
        pipeline=plan.pipeline.name, stage=stage,
    )  # fmt: skip
    recipe = verl_recipe(method, planned.stage.resources, places, len(rows[TRAIN]))
    replaced = _keys(overrides)
    config = {key: value for key, value in recipe.config.items() if key.lstrip("+") not in replaced}
    cli_args = [*(f"{key}={flat(value)}" for key, value in sorted(config.items())), *overrides]
    texts = {
        REWARDS: _rewards_module(stage, rewards, policy) if rewards else None,
        NOTES: "".join(f"{note}\n" for note in recipe.notes),
        COMMAND: _command(cli_args),
        WEIGHTS_FILE: json.dumps(_weights(plan, planned), indent=2) + "\n",
    }
    for file, text in texts.items():
        if text is not None:
            refuse_edited(folder / file, text)
    _write(folder, rows, texts)
    sizes = {Path(name).stem: len(each) for name, each in rows.items()}
    return Exported(folder=folder, num_rows=sizes, config=config, overrides=list(overrides), notes=recipe.notes)


def _weights(plan: Plan, planned: PlannedStage) -> dict[str, str]:
    """Slot of a model -> digest of the files that verl will load, which are those that their stage wrote.

    Raises:
        ArtifactError: they are not.
    """
    found, cache = {}, DigestCache(plan.pipeline.store / "digests.json")
    for slot, input_ in planned.inputs.items():
        if planned.stage.method.consumes[slot] in MODELS:
            entry = input_.entry or (plan.entry(plan.stage(input_.name)) if input_.source is None else None)
            pinned = input_.pinned.digest if input_.pinned else None
            found[slot] = entry.require_intact(cache).output_digest if entry else pinned or input_.fingerprint
    return found


def _finished(plan: Plan, stage: str, input_: PlannedInput) -> Path:
    if input_.source is None and plan.stage(input_.name).state != "reuse":
        raise ArtifactError(
            f"{stage} reads {input_.name}, which is not finished ({plan.stage(input_.name).reason}); run it first: "
            f"posttrain stage {input_.name}"
        )
    path = plan.path_of(input_)
    options = model_options(input_.source) if input_.source and input_.entry is None else {}
    if input_.source and input_.source.has_new_tokens:
        path = fetch_model(input_.source, plan.pipeline.store / CACHE)  # whole, with what else the source sets
    elif options:
        raise ConfigError(
            f"{stage} reads {input_.name.removeprefix(SOURCE)}, whose source sets {', '.join(options)}: verl reads the "
            f"files in {path}, which lack it; a model whose files have it is accepted; train a stage on it before, or "
            "save it with these settings, and remove them"
        )
    if not path.is_dir():
        raise ArtifactError(
            f"{stage} reads {input_.name.removeprefix(SOURCE)}, and {path} is not a directory; verl reads a model from "
            "one: set its path"
        )
    return path.absolute()


def require_whole(stage: str, policy: Path) -> None:
    """Requires a whole model, since verl cannot load an adapter without its base."""
    if not any(policy.glob("model*.safetensors")):
        raise ConfigError(
            f"{stage}: its policy {policy} is an adapter without its base, which verl cannot load; a whole model is "
            "accepted; put a stage `merge` before it (docs/models.md), or train the policy with save=null"
        )


def require_plain_tokenizer(stage: str, policy: Path) -> None:
    """Requires a tokenizer that verl, which loads it by ``AutoTokenizer``, reads as its file has it."""
    from tasks.model.tokenizers import read_otherwise

    if other := read_otherwise(policy):
        raise ConfigError(
            f"{stage}: verl loads the tokenizer of {policy} by AutoTokenizer, which takes {other} for this type of "
            "model and makes other tokens than its tokenizer.json, on which the policy was trained; a model whose "
            "tokens are those of its type is accepted; train the stage with posttrain run"
        )


def _truth_column(rewards: Rewards) -> str | None:
    """The column for verl's ground truth: the first that a reward function compares answers with."""
    from tasks.reward_functions import scorers

    named = [each.column for each in rewards.values() if each.column]
    read = [column for key, each in rewards.items() if not _counts_tokens(each.function or key)
            for column in scorers({key: each})[0].columns]  # fmt: skip
    return next(iter([*named, *read]), None)


def _counts_tokens(name: str) -> bool:
    from tasks.reward_functions.built_in import BUILT_IN

    return name in BUILT_IN and BUILT_IN[name].counts_tokens


def _write(folder: Path, rows: Mapping[str, list[dict[str, object]]], texts: Mapping[str, str | None]) -> None:
    """Writes all files, or removes those that this export does not have; nothing is refused from here on."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    for name, each in rows.items():
        if each:
            pq.write_table(pa.Table.from_pylist(each), folder / name)
        else:
            (folder / name).unlink(missing_ok=True)
    for name, text in texts.items():
        if text is None:
            (folder / name).unlink(missing_ok=True)
        else:
            (folder / name).write_text(text, encoding="utf-8")
    (folder / COMMAND).chmod(0o755)


def verl_rows(rows: Path, source: str, ability: str, truth: str | None) -> list[dict[str, object]]:
    """Prepared prompts in verl's schema; none where the file is missing.

    ``extra_info.posttrain`` holds the prompt and its columns for our rewards, as JSON, since columns may differ in type
    between rows. ``reward_model.ground_truth`` is for verl's own functions.

    Raises:
        ConfigError: a row has tools.
    """
    return list(_verl_rows(rows, source, ability, truth))


def _verl_rows(rows: Path, source: str, ability: str, truth: str | None) -> Iterator[dict[str, object]]:
    import pyarrow.parquet as pq

    if not rows.exists():
        return
    for index, row in enumerate(pq.read_table(rows).to_pylist()):
        prompt = messages_of(row["prompt"])
        if tools_of(row) or any("tool_calls" in each for each in prompt):
            raise ConfigError(
                f"{source}: row {row['row_id']} has tools, which verl reads from its own configuration "
                "(actor_rollout_ref.rollout.multi_turn); prompts without tools and calls are accepted"
            )
        columns = json.loads(row["columns"]) if row.get("columns") else {}
        value = columns.get(truth) if truth else None
        yield {
            "data_source": source,
            "prompt": [{"role": str(each["role"]), "content": str(each["content"])} for each in prompt],
            "ability": ability,
            "reward_model": {
                "style": "rule",
                "ground_truth": value if isinstance(value, str) else json.dumps(value) if value is not None else "",
            },
            "extra_info": {
                "split": rows.stem, "index": index, "row_id": row["row_id"],
                "posttrain": json.dumps({"prompt": prompt, "columns": columns}),
            },
        }  # fmt: skip


def _rewards_module(stage: str, rewards: Rewards, policy: Path) -> str:
    configured = {
        name: {field: value for field, value in asdict(each).items() if value is not None}
        for name, each in rewards.items()
    }
    return _REWARDS.format(stage=stage, rewards=json.dumps(configured), model=str(policy))


def _keys(overrides: Sequence[str]) -> set[str]:
    for word in overrides:
        if "=" not in word:
            raise ConfigError(f"--set {word}: KEY=VALUE is accepted, such as --set trainer.nnodes=2; add a value")
    return {word.lstrip("+~").partition("=")[0] for word in overrides}


def _command(cli_args: Sequence[str]) -> str:
    lines = " \\\n".join(f"  {shlex.quote(word)}" for word in cli_args)
    return f'#!/bin/sh\n# pip install verl=={VERSION}\nexec python3 -m verl.trainer.main_ppo \\\n{lines} \\\n  "$@"\n'
