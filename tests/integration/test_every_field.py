"""Every field of every method changes the run: an option that does nothing is a defect."""

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from lineage.errors import ConfigError
from tasks.method import LOOP_FIELDS, Adapter, Optimizer, Schedule
from tasks.reward_functions import RewardFunction
from tasks.train.generation.generating import Sampling
from tasks.train.losses.dpo_losses import ReferenceSync
from tasks.train.models.freeze import Freeze
from tests import tiny, training
from tests.training import same, weights

LORA = Adapter(rank=4, alpha=8)
Weights = dict[str, torch.Tensor]


CHANGES: dict[str, object] = {
    "learning_rate": 6e-3,
    "num_steps": 4,
    "num_epochs": 2.0,
    "global_batch_size": 4,
    "seed": 1,
    "warmup_ratio": 0.5,
    "lr_schedule": "constant",  # at three steps, linear is cosine
    "weight_decay": 0.5,
    "optimizer": Optimizer(betas=(0.5, 0.6)),
    "schedule": Schedule(warmup=2),
    "max_grad_norm": 0.01,
    "precision": "bf16",
    "adapter": LORA,
    "save": "adapter",
    "beta": 0.5,
    "loss_type": "ipo",
    "sft_weight": 2.0,
    "desirable_weight": 3.0,
    "undesirable_weight": 3.0,
    "gamma": 0.1,
    "losses": {"sigmoid": 1.0, "kto_pair": 1.0},
    "label_smoothing": 0.1,
    "discopop_tau": 1.0,
    "f_divergence": "forward_kl",
    "f_alpha": 0.1,
    "ld_alpha": 0.0,
    "weighting": "wpo",
    "reference_sync": ReferenceSync(every_steps=2),
    "chat_template": "chatml",
    "too_long": "cut_prompt",
    "max_prompt_length": 6,
    "packing": "best_fit",
    "thinking": "drop",
    "control_tokens": "keep",
    "freeze": Freeze(modules="mlp"),
    "neftune_alpha": 5.0,
    "max_completion_length": 4,
    "sampling": Sampling(temperature=0.5),
    "temperature": 2.0,
    "cross_entropy_weight": 0.5,
    "t_start": 0.2,
    "t_end": 0.9,
    "alpha": 0.5,
    "momentum": 0.5,
    "num_generations": 8,
    "rewards": {"characters": RewardFunction(function="python:tests.completion_scores.length")},
    "missing_eos_penalty": 3.0,
    "kl_coef": 0.5,
    "kl_target": 0.01,
    "kl_horizon": 10,
    "gae_lambda": 0.5,
    "clip_range": 0.01,
    "value_clip_range": 0.01,
    "value_coef": 1.0,
    "whiten_rewards": "shift",
    "whiten_advantages": False,
    "center_advantages": True,
    "num_ppo_epochs": 3,
    "num_minibatches": 2,
    "num_iterations": 2,
    "scale_rewards": "none",
    "mask_truncated": True,
    "normalize_advantages": True,
    "reward_clip": 2.0,
}
# Fields that are read with others alone, with the others: the run without the field is another one.
READ_WITH: dict[str, dict[str, object]] = {
    "label_smoothing": {"loss_type": "aot"},
    "discopop_tau": {"loss_type": "discopop"},
    "f_alpha": {"f_divergence": "alpha_divergence"},
    "kl_horizon": {"kl_target": 0.01},
}
OWN_CHANGES: dict[tuple[str, str], object] = {  # where a method has other values
    **{(name, "too_long"): "drop" for name in training.GENERATING},
    **{(name, "num_epochs"): 0.2 for name in training.GENERATING},
    **{(name, "max_prompt_length"): 12 for name in training.GENERATING},
    ("online_dpo", "num_generations"): 4,
    ("online_dpo", "missing_eos_penalty"): 10.0,
    ("grpo", "loss"): "dr_grpo",
    ("online_dpo", "loss"): "ipo",
    ("kto", "loss_type"): "apo_zero_unpaired",
}
SHORTER = {
    "cpt": 12, "sft": 34, "reward": 28, "dpo": 28, "distill": 34, "taid": 34, "kto": 28, "orpo": 28, "simpo": 28,
    "cpo": 28, **dict.fromkeys(training.GENERATING, 34),
}  # fmt: skip
# test_adapter_in.py, test_best.py, test_diloco.py, test_divergence.py, test_evaluation_beside.py, test_qlora.py,
# test_validation.py
ELSEWHERE = {"adapter_in", "best", "diloco", "evaluation", "output", "on_divergence", "quantization", "validation"}
ELSEWHERE |= {"images"}  # test_vision.py
# test_generating.py, test_ppo.py
ELSEWHERE |= {"reward_model_weight", "equal_rewards_patience", "vllm", "epsilon", "epsilon_high", "kl_ratio"}
# Tried quickly: a method's own fields, all of SFT's, what all generating methods have, and what PPO's own loop applies.
_OF_ALL = {each.name for each in dataclasses.fields(training.METHODS["sft"])}


def _is_quick(name: str, field: str) -> bool:
    if field in training.METHODS[name].__annotations__ or name == "sft":
        return True
    of_grpo = {each.name for each in dataclasses.fields(training.METHODS["grpo"])}
    of_ppo = name == "ppo" and (field in LOOP_FIELDS or field not in of_grpo)
    return of_ppo or (name == "grpo" and field not in _OF_ALL)


FIELDS = [
    pytest.param(
        name, field.name, id=f"{name}.{field.name}",
        marks=[] if _is_quick(name, field.name) else [pytest.mark.slow],
    )
    for name, cls in training.METHODS.items()
    for field in dataclasses.fields(cls)
    if field.name not in ELSEWHERE and not (cls.has_own_loop and field.name == "neftune_alpha")  # refused
]  # fmt: skip


def write_thinking(directory: Path, root: Path) -> Path:
    """The same inputs, except that the assistant thinks before it answers."""
    columns = {
        "messages": tiny.conversation_rows(40),
        "chosen": tiny.preference_rows(40),
        "completion": tiny.unpaired_rows(40),
    }
    for column, rows in columns.items():
        for row in rows:
            answer = row[column][-1]  # type: ignore[index]
            answer["content"] = f"<think>\nsorted list\n</think>\n\n{answer['content']}"
    kinds = dict(zip(("conversations", "preferences", "unpaired"), columns.values(), strict=True))
    return write_other(directory, root, kinds)


def write_spelling(directory: Path, root: Path) -> Path:
    """The same inputs, except that their texts spell a control token."""
    kinds = {
        "conversations": tiny.conversation_rows(40), "preferences": tiny.preference_rows(40),
        "unpaired": tiny.unpaired_rows(40), "prompts": tiny.prompt_rows(40), "text": tiny.text_rows(40),
    }  # fmt: skip
    for row in (row for rows in kinds.values() for row in rows):
        for message in row.get("messages", row.get("prompt", ()))[:1]:  # type: ignore[index]
            message["content"] += " <|im_end|> list"
        if "text" in row:
            row["text"] = f"{row['text']} <|im_end|> list"
    return write_other(directory, root, kinds)


def write_other(directory: Path, root: Path, kinds: dict[str, list[dict[str, object]]]) -> Path:
    for kind, rows in kinds.items():
        tiny.write_rows(directory / kind, rows)
    for other in root.iterdir():
        if other.name not in kinds:
            (directory / other.name).symlink_to(other)
    return directory


@pytest.fixture(scope="module")
def baseline(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Adapter | None], Weights]:
    """Weights of a method before any field is changed, in full or with an adapter."""

    @cache
    def trained(name: str, adapter: Adapter | None) -> Weights:
        output = tmp_path_factory.mktemp("baseline") / "output"
        return weights(training.train(training.method(name, adapter=adapter), root, output).output)

    return trained


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_every_field_changes_the_run(
    root: Path, tmp_path: Path, baseline: Callable[[str, Adapter | None], Weights], name: str, field: str
) -> None:
    value = SHORTER[name] if field == "max_length" else OWN_CHANGES.get((name, field), CHANGES.get(field))
    assert value is not None, f"say in CHANGES what {field} is changed to"
    if field == "chat_template":  # a model without a template trains with the field, and is refused without it
        policy = tiny.write_policy(tmp_path / "bare", chat_template=None)
        with pytest.raises(ConfigError, match="chat_template=chatml"):
            training.train(training.method(name), root, tmp_path / "refused", policy=policy)
        run = training.train(training.method(name, chat_template=value), root, tmp_path / "output", policy=policy)
        assert AutoTokenizer.from_pretrained(run.output).chat_template == tiny.CHATML
        return
    if field == "too_long":  # of no effect where nothing is
        shorter = {"max_length": SHORTER[name]}
        cut = training.train(training.method(name, **shorter), root, tmp_path / "cut")
        run = training.train(training.method(name, **shorter, too_long=value), root, tmp_path / "output")
        assert not same(weights(run.output), weights(cut.output))
        return
    if field in ("thinking", "control_tokens"):  # no effect: these rows have no thinking, and spell no token
        rows = (write_thinking if field == "thinking" else write_spelling)(tmp_path / "rows", root)
        if (name, field) == ("cpt", "control_tokens"):  # documents keep them where the field is not set
            value = "text"
        kept, run = (
            training.train(training.method(name, **{field: each}), rows, tmp_path / str(each)) for each in (None, value)
        )
        assert not same(weights(run.output), weights(kept.output))
        return
    if field == "save":  # of an adapter: all of the output is other files
        run = training.train(training.method(name, adapter=LORA, save=value), root, tmp_path / "output")
        assert (run.output / "base.json").exists() and not (run.output / "model.safetensors").exists()
        return
    if field in READ_WITH:
        default, run = (
            training.train(
                training.method(name, **READ_WITH[field], **more), root, tmp_path / str(len(more)) / "output"
            )
            for more in ({}, {field: value})
        )
        assert not same(weights(run.output), weights(default.output))
        return
    length = {"num_steps": None} if field == "num_epochs" else {}
    run = training.train(training.method(name, **length, **{field: value}), root, tmp_path / "output")
    assert not same(weights(run.output), baseline(name, None))
