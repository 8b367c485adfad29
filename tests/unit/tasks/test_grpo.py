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
from tasks.train.generating import Generating, Sampling

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
        (GRPO, {}, "7b43aba7e9882f99"),
        (GRPO, OPTIONS, "40eaef85774e43af"),
        (RLOO, {"rewards": REWARDS}, "80577930c4005db4"),
        (OnlineDPO, {"rewards": REWARDS}, "778c440057045b8e"),
        (PPO, {"rewards": REWARDS, "kl_target": 2.0}, "e3047068efe9d58a"),
    ],
)
def test_fingerprints_are_those_of_the_first_outputs(
    cls: type[Generating], fields: dict[str, object], prefix: str
) -> None:
    assert fingerprint(cls(num_steps=3, **fields).recipe(), {}).startswith(prefix)  # type: ignore[arg-type]


def test_an_adapter_on_the_head_is_refused_by_the_plan() -> None:
    with pytest.raises(ConfigError, match=r"adapter.target_modules=lm_head.*remove it, or train it in full"):
        load_pipeline(["pipeline=sft-grpo", "stages.grpo.method.adapter.target_modules=lm_head"])
