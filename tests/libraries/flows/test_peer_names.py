"""Names that are attributed to Hugging Face's libraries, against the installed ones; and where ours are."""

import dataclasses
import inspect
import re

import pytest
from peft import LoraConfig
from transformers import BitsAndBytesConfig, GenerationConfig, TrainingArguments
from trl import DPOConfig, GRPOConfig, GRPOTrainer, KTOConfig, ModelConfig, RewardConfig, ScriptArguments, SFTConfig

from flows.declare.peer_names import FIELDS, HUGGING_FACE, VALUES
from lineage.artifact import Source
from lineage.errors import ConfigError
from tasks.context import Resources
from tasks.dpo import DPO
from tasks.grpo import GRPO
from tasks.kto import KTO
from tasks.method import Adapter, Optimizer, Quantization, Schedule
from tasks.ppo import PPO
from tasks.reward_functions import RewardFunction
from tasks.reward_functions.built_in import BUILT_IN
from tasks.reward_functions.scorer import PEERS, check_rewards
from tasks.sft import SFT
from tasks.simpo import SimPO
from tasks.train.best import Validation
from tasks.train.generation.generating import Sampling
from tasks.train.losses.dpo_losses import ReferenceSync

CONFIGS = (
    TrainingArguments, SFTConfig, DPOConfig, GRPOConfig, KTOConfig, RewardConfig, ModelConfig, ScriptArguments,
    LoraConfig,
)  # fmt: skip
METHODS = (SFT, DPO, GRPO, KTO, PPO, SimPO)
NESTED = {
    "adapter": Adapter, "optimizer": Optimizer, "schedule": Schedule, "quantization": Quantization,
    "validation": Validation, "sampling": Sampling, "reference_sync": ReferenceSync,
}  # fmt: skip


def names(*classes: type) -> set[str]:
    return {each.name for cls in classes for each in dataclasses.fields(cls)}


def test_each_name_of_hugging_face_is_a_field_of_its_configs() -> None:
    arguments = {name for cls in (BitsAndBytesConfig, GRPOTrainer) for name in inspect.signature(cls).parameters}
    known = names(*CONFIGS) | arguments | {*vars(GenerationConfig())}
    assert sorted(HUGGING_FACE - known) == []


@pytest.mark.parametrize("ours", sorted({*FIELDS.values()}))
def test_each_name_of_ours_is_a_field(ours: str) -> None:
    for first, path in re.findall(r"(stages\.STAGE\.(?:method|resources)|sources\.NAME)\.([\w.]+)", ours):
        name, _, within = path.rstrip(".").partition(".")
        holders = {"stages.STAGE.method": METHODS, "stages.STAGE.resources": (Resources,), "sources.NAME": (Source,)}
        assert name in names(*holders[first]), ours
        if within and name == "rewards":
            assert within.removeprefix("NAME.") in names(RewardFunction), ours
        elif within:
            assert within in names(NESTED[name]), ours


def test_no_peers_value_is_one_of_ours() -> None:
    accepted = " ".join(
        str(each.type) for cls in (Optimizer, Schedule, Quantization, DPO, SFT) for each in dataclasses.fields(cls)
    )
    assert [value for value in VALUES if f"'{value}'" in accepted] == []
    assert [ours for ours in VALUES.values() if f"'{ours}'" not in accepted] == []


@pytest.mark.parametrize("name", PEERS)
def test_a_peers_reward_is_answered_with_ours(name: str) -> None:
    with pytest.raises(ConfigError, match=f"there is no reward function {name}; here it is {re.escape(PEERS[name])}"):
        check_rewards({name: RewardFunction()})
    assert PEERS[name].startswith("a function of yours") or re.match(r"\w+", PEERS[name])[0] in BUILT_IN  # type: ignore[index]
