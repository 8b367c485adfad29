"""GRPO and its kin keep their fingerprints; what TRL refuses when it builds a trainer, the plan refuses."""

import pytest

from flows.declare.config import load_pipeline
from lineage.errors import ConfigError
from lineage.fingerprint import fingerprint
from tasks.grpo import GRPO
from tasks.online_dpo import OnlineDPO
from tasks.ppo import PPO
from tasks.reward_functions import RewardFunction
from tasks.rloo import RLOO
from tasks.taid import TAID
from tasks.train.best import Best
from tasks.train.generation.generating import Generating, Sampling

REWARDS = {
    "exact": RewardFunction(function="exact"),
    "spread": RewardFunction(function="python:tests.completion_scores.spread", weight=2.0),
}
OPTIONS: dict[str, object] = {
    "rewards": REWARDS, "loss": "gspo", "num_iterations": 2, "beta": 0.1, "kl_ratio": True, "epsilon": 0.1,
    "scale_rewards": "batch", "mask_truncated": True, "sampling": Sampling(temperature=0.7),
}  # fmt: skip


@pytest.mark.parametrize(
    ("cls", "fields", "prefix"),
    [
        (GRPO, {}, "ac38abf7fe574960"),
        (GRPO, OPTIONS, "fbb3c41e1b7aebac"),
        (RLOO, {"rewards": REWARDS}, "4827a0c9370fa1e7"),
        (OnlineDPO, {"rewards": REWARDS}, "433faec87842a0f2"),
        (PPO, {"rewards": REWARDS, "kl_target": 2.0}, "372fa2b396b85617"),
    ],
)
def test_fingerprints_are_those_of_the_first_outputs_of_the_version(
    cls: type[Generating], fields: dict[str, object], prefix: str
) -> None:
    assert cls.version == 2  # an equal version is an equal fingerprint
    assert fingerprint(cls(num_steps=3, **fields).recipe(), {}).startswith(prefix)  # type: ignore[arg-type]


@pytest.mark.parametrize("cls", [GRPO, RLOO, OnlineDPO])
def test_a_loss_that_says_nothing_ranks_no_models(cls: type[Generating]) -> None:
    with pytest.raises(
        ConfigError, match=rf"best.metric=loss: the loss of {cls.__name__} is of its own completions.*=reward"
    ):
        cls(num_steps=3, rewards=REWARDS, best=Best(metric="loss", every_steps=1))
    cls(num_steps=3, rewards=REWARDS, best=Best(metric="reward", mode="max", every_steps=1))


@pytest.mark.parametrize("cls", [GRPO, RLOO, OnlineDPO])
@pytest.mark.parametrize(
    ("name", "value", "plain"),
    [("top_p", 0.9, "1.0"), ("top_k", 20, "null"), ("min_p", 0.1, "null"), ("repetition_penalty", 1.1, "1.0")],
)
def test_vllm_samples_from_the_whole_distribution(cls: type[Generating], name: str, value: float, plain: str) -> None:
    sampling = Sampling(temperature=0.7, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"sampling.{name}={value}: .* set sampling.{name}={plain}, or vllm=null"):
        cls(num_steps=3, rewards=REWARDS, sampling=sampling, vllm="colocate")
    cls(num_steps=3, rewards=REWARDS, sampling=sampling)
    cls(num_steps=3, rewards=REWARDS, sampling=Sampling(temperature=0.7), vllm="colocate")


def test_a_target_that_moves_ranks_no_models_and_alpha_0_has_no_momentum() -> None:
    with pytest.raises(
        ConfigError, match=r"best.metric=loss: the loss of TAID is to a target that moves.*held_out_loss"
    ):
        TAID(num_steps=3, learning_rate=1e-3, best=Best(metric="loss", every_steps=1))
    with pytest.raises(ConfigError, match=r"momentum=0.5 has no effect with alpha=0; remove it, or set alpha=0.0005"):
        TAID(num_steps=3, learning_rate=1e-3, alpha=0.0, momentum=0.5)
    TAID(num_steps=3, learning_rate=1e-3, alpha=0.0)


def test_an_adapter_on_the_head_is_refused_by_the_plan() -> None:
    with pytest.raises(ConfigError, match=r"adapter.target_modules=lm_head.*remove it, or train it in full"):
        load_pipeline(["pipeline=sft-grpo", "stages.grpo.method.adapter.target_modules=lm_head"])
