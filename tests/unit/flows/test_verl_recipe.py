"""A recipe as settings of verl: the same numbers under its names, and nothing dropped without a word."""

import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from flows.verl.recipe import _OF_PLAN, Places, Recipe, flat, verl_recipe
from lineage.errors import ConfigError
from tasks.context import Launcher, Resources
from tasks.data.images import Images
from tasks.grpo import GRPO
from tasks.method import Adapter, Optimizer, Quantization, Schedule
from tasks.reward_functions import RewardFunction
from tasks.rloo import RLOO
from tasks.sft import SFT
from tasks.train.best import Best, KeepBest
from tasks.train.evaluation import Evaluation
from tasks.train.generation.generating import Generating, Sampling
from tasks.train.losses.grpo_variants import VARIANTS
from tasks.train.models.freeze import Freeze
from tasks.train.optim.schedules import Adaptive

PLACES = Places(
    policy="/models/sft", train="/out/train.parquet", held_out="/out/held_out.parquet", rewards="/out/rewards.py"
)
LENGTH = {"num_steps": 100, "learning_rate": 1e-6}
EXACT = {"exact": RewardFunction()}


def grpo(**given: object) -> GRPO:
    return GRPO(**{**LENGTH, "rewards": EXACT, **given})


def rloo(**given: object) -> RLOO:
    return RLOO(**{**LENGTH, "rewards": EXACT, **given})


def ppo(**given: object) -> Generating:
    module = pytest.importorskip("tasks.ppo")
    found: Generating = module.PPO(**{**LENGTH, "rewards": EXACT, **given})
    return found


def exported(method: Generating, resources: Resources | None = None, places: Places = PLACES) -> Recipe:
    return verl_recipe(method, resources or Resources(), places, num_rows=1000)


def test_grpo_has_the_same_batches_lengths_and_loss() -> None:
    method = grpo(
        global_batch_size=64, num_generations=8, num_iterations=2, max_length=1024, max_completion_length=256,
        beta=0.02, epsilon_high=0.28, loss="dapo", sampling=Sampling(temperature=0.9, top_p=0.95, top_k=50), seed=3,
    )  # fmt: skip
    config = exported(method, Resources(num_nodes=2, num_workers=8, micro_batch_size=4, save_steps=10)).config
    expected = {
        "data.train_batch_size": 8, "actor_rollout_ref.rollout.n": 8, "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
        "actor_rollout_ref.actor.ppo_epochs": 2, "trainer.total_training_steps": 50,  # generations
        "data.max_prompt_length": 768, "data.max_response_length": 256, "data.truncation": "left", "data.seed": 3,
        "data.train_files": ["/out/train.parquet"], "data.val_files": ["/out/held_out.parquet"],
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4, "actor_rollout_ref.actor.optim.lr": 1e-6,
        "actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine",
        "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": 0.05, "actor_rollout_ref.actor.optim.clip_grad": 1.0,
        "actor_rollout_ref.rollout.temperature": 0.9, "actor_rollout_ref.rollout.top_p": 0.95,
        "actor_rollout_ref.rollout.top_k": 50, "algorithm.adv_estimator": "grpo",
        "algorithm.norm_adv_by_std_in_grpo": True, "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
        "actor_rollout_ref.actor.clip_ratio_low": 0.2, "actor_rollout_ref.actor.clip_ratio_high": 0.28,
        "actor_rollout_ref.actor.use_kl_loss": True, "actor_rollout_ref.actor.kl_loss_coef": 0.02,
        "actor_rollout_ref.actor.kl_loss_type": "low_var_kl", "algorithm.use_kl_in_reward": False,
        "actor_rollout_ref.model.path": "/models/sft", "reward.custom_reward_function.path": "/out/rewards.py",
        "trainer.nnodes": 2, "trainer.n_gpus_per_node": 4,
        "trainer.save_freq": 5,  # 10 optimizer steps: 5 generations
    }  # fmt: skip
    assert {key: config[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("loss", "mode", "aggregation", "low", "high"),
    [
        ("grpo", "vanilla", "seq-mean-token-mean", 0.2, 0.2), ("dapo", "vanilla", "token-mean", 0.2, 0.28),
        ("bnpo", "vanilla", "token-mean", 0.2, 0.2), ("dr_grpo", "vanilla", "seq-mean-token-sum-norm", 0.2, 0.2),
        ("gspo", "gspo", "seq-mean-token-mean", 3e-4, 4e-4), ("cispo", "cispo", "token-mean", 1.0, 4.0),
        ("sapo", "sapo", "seq-mean-token-mean", 0.2, 0.2),
    ],
)  # fmt: skip
def test_each_loss_has_its_form_in_verl(loss: str, mode: str, aggregation: str, low: float, high: float) -> None:
    config = exported(grpo(loss=loss, num_iterations=2)).config
    assert config["actor_rollout_ref.actor.policy_loss.loss_mode"] == mode
    assert config["actor_rollout_ref.actor.loss_agg_mode"] == aggregation
    bounds = [config[f"actor_rollout_ref.actor.clip_ratio_{name}"] for name in ("low", "high", "c")]
    assert bounds == [low, high, 1e9]
    assert config["algorithm.norm_adv_by_std_in_grpo"] == (loss != "dr_grpo")


def test_losses_that_verl_lacks_are_refused() -> None:
    known = {"grpo", "dapo", "bnpo", "dr_grpo", "gspo", "cispo", "sapo"}
    assert VARIANTS.keys() - known == {"luspo", "vespo"}
    for loss in ("luspo", "vespo"):
        with pytest.raises(ConfigError, match=f"loss={loss}: verl 0.9.1 has no such loss; accepted: grpo, dapo"):
            exported(grpo(loss=loss, num_iterations=2))


def test_epochs_are_enough_for_all_steps_though_verl_drops_the_rest_of_an_epoch() -> None:
    for num_steps in (1, 31, 32, 62, 63):
        method = grpo(global_batch_size=256, num_generations=8, num_steps=num_steps)  # 32 prompts of 1000: 31 batches
        config = exported(method).config
        assert config["trainer.total_training_steps"] == num_steps
        assert config["trainer.total_epochs"] == -(-num_steps // 31)
    with pytest.raises(ConfigError, match="7 prompts are fewer than the 8 of a step"):
        verl_recipe(grpo(), Resources(), PLACES, num_rows=7)


def test_rloo_has_its_kl_in_the_reward_and_a_sum_over_tokens() -> None:
    config = exported(rloo(beta=0.1)).config
    assert config["algorithm.adv_estimator"] == "rloo" and config["algorithm.use_kl_in_reward"] is True
    assert config["algorithm.kl_ctrl.kl_coef"] == 0.1 and config["algorithm.kl_penalty"] == "kl"
    assert config["actor_rollout_ref.actor.loss_agg_mode"] == "seq-mean-token-sum"


def test_ppo_has_gae_a_critic_and_an_adaptive_kl() -> None:
    method = ppo(
        global_batch_size=64, num_generations=1, num_minibatches=4, num_ppo_epochs=2, kl_coef=0.1, kl_target=6.0,
        kl_horizon=5000, gamma=0.99, gae_lambda=0.9, clip_range=0.1, value_clip_range=0.3, value_coef=0.5,
    )  # fmt: skip
    places = replace(PLACES, rewards=None, reward_model="/models/reward")
    found = exported(replace(method, rewards=None), places=places)
    expected = {
        "algorithm.adv_estimator": "gae", "algorithm.gamma": 0.99, "algorithm.lam": 0.9,
        "algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.type": "adaptive", "algorithm.kl_ctrl.kl_coef": 0.1,
        "algorithm.kl_ctrl.target_kl": 6.0, "algorithm.kl_ctrl.horizon": 5000, "data.train_batch_size": 64,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 16, "actor_rollout_ref.actor.ppo_epochs": 2,
        "actor_rollout_ref.actor.clip_ratio_high": 0.1, "critic.cliprange_value": 0.3,
        "critic.model.path": "/models/reward", "critic.optim.lr": 1e-6, "reward.reward_model.enable": True,
        "reward.reward_model.model_path": "/models/reward",
    }  # fmt: skip
    assert {key: found.config[key] for key in expected} == expected
    assert any(note.startswith("value_coef=0.5: verl has an optimizer of its own") for note in found.notes)


# A field, or a field of a setting, and another value than its default.
OTHER: dict[str, object] = {
    "control_tokens": "keep",
    "learning_rate": 1e-5, "num_steps": 7, "num_epochs": 2.0, "global_batch_size": 128, "max_length": 512, "seed": 5,
    "max_grad_norm": 0.5, "precision": "bf16", "adapter": Adapter(rank=4), "adapter_in": "merge",
    "freeze": Freeze(modules="mlp"), "neftune_alpha": 5.0, "save": "adapter", "max_completion_length": 100,
    "best": Best(metric="reward", mode="max", every_steps=5),
    "max_prompt_length": 50, "too_long": "drop", "num_generations": 16,
    "rewards": {"answer": RewardFunction(function="exact")},
    "reward_model_weight": 0.5, "missing_eos_penalty": 1.0, "equal_rewards_patience": 3, "vllm": "colocate",
    "loss": "dapo", "beta": 0.3, "num_iterations": 2, "epsilon": 0.1, "epsilon_high": 0.4, "scale_rewards": "batch",
    "mask_truncated": True, "kl_ratio": True, "normalize_advantages": True, "reward_clip": 2.0,
    "sampling": [
        Sampling(temperature=0.5), Sampling(top_p=0.5), Sampling(top_k=3), Sampling(min_p=0.1),
        Sampling(repetition_penalty=1.3),
    ],
    "optimizer": [
        Optimizer(betas=(0.8, 0.9)), Optimizer(eps=1e-6), Optimizer(weight_decay=0.1), Optimizer(name="lion_8bit"),
        Optimizer(name="sgd", momentum=0.5),
    ],
    "schedule": [
        Schedule(name="constant"), Schedule(name="linear"), Schedule(warmup=4), Schedule(min_learning_rate=1e-8),
        Schedule(name="cosine_with_restarts", num_cycles=3), Schedule(adaptive=Adaptive()),
    ],
    "kl_coef": 0.2, "kl_target": 6.0, "kl_horizon": 500, "gamma": 0.9, "gae_lambda": 0.5, "clip_range": 0.5,
    "evaluation": Evaluation(every_steps=2),
    "value_clip_range": 0.7, "value_coef": 0.3, "whiten_rewards": "scale", "whiten_advantages": False,
    "center_advantages": True, "num_ppo_epochs": 3, "num_minibatches": 2,
}  # fmt: skip
# output and on_divergence need best; diloco, images, validation and quantization are refused; the others are short
# forms.
ELSEWHERE = {
    "diloco", "images", "output", "on_divergence", "quantization", "validation", "lr_schedule", "warmup_ratio",
    "weight_decay",
}  # fmt: skip
BESIDE: dict[str, dict[str, object]] = {  # what a field needs
    "num_epochs": {"num_steps": None}, "epsilon": {"num_iterations": 2}, "epsilon_high": {"num_iterations": 2},
    "kl_ratio": {"num_iterations": 2, "beta": 0.1}, "save": {"adapter": Adapter()},
    "adapter_in": {"adapter": Adapter()}, "kl_horizon": {"kl_target": 6.0}, "center_advantages": {"num_generations": 4},
}  # fmt: skip


@pytest.mark.parametrize("build", [grpo, rloo, ppo])
def test_every_field_changes_the_settings_or_is_named(build) -> None:
    unnamed = []
    for each in fields(build()):
        if each.name in ELSEWHERE:
            continue
        values = OTHER[each.name]
        for value in values if isinstance(values, list) else [values]:
            if build is ppo and (
                each.name in ("best", "evaluation", "vllm") or (isinstance(value, Schedule) and value.adaptive)
            ):
                continue  # its own loop refuses them
            beside = BESIDE.get(each.name, {})
            before, after = exported(build(**beside)), exported(build(**{**beside, each.name: value}))
            named = [note for note in after.notes if note.startswith((f"{each.name}=", f"{each.name}."))]
            if before.config == after.config and not named:
                unnamed.append(f"{each.name}={value}")
    # An adapter of the input is merged anyway; the rewards are in a file of their own; there is no reward model.
    assert sorted(name.partition("=")[0] for name in unnamed) == ["adapter_in", "reward_model_weight", "rewards"]


@pytest.mark.parametrize(
    ("resources", "measures", "expected"),
    [
        (Resources(), False, {"save_freq": 100, "test_freq": -1, "val_before_train": False}),
        (Resources(save_steps=30), True, {"save_freq": 30, "test_freq": 30, "val_before_train": True}),
        (Resources(save_epochs=0.2), False, {"save_freq": 25, "max_actor_ckpt_to_keep": 2}),
        (Resources(save_steps=10**6, keep_last=4), False, {"save_freq": 100, "max_actor_ckpt_to_keep": 4}),
    ],
)
def test_verl_saves_at_the_latest_at_the_end_and_measures_held_out_rows(resources, measures, expected) -> None:
    found = verl_recipe(grpo(global_batch_size=64), resources, replace(PLACES, measures=measures), num_rows=1000)
    assert {name: found.config[f"trainer.{name}"] for name in expected} == expected


OTHER_RESOURCES = {
    "num_nodes": 2, "num_workers": 2, "cpus_per_worker": 3, "gpus_per_worker": 1, "micro_batch_size": 4,
    "launcher": Launcher.CLUSTER, "zero_stage": 2, "save_steps": 7, "save_epochs": 0.3, "save_minutes": 2.0,
    "keep_last": 5, "keep_best": KeepBest(metric="loss"), "max_failures": 1, "deterministic": True, "weights": "bf16",
    "attention": "eager", "gradient_checkpointing": 2, "compile": True, "precompute_reference": True, "liger": True,
    "empty_cache_steps": 3, "dataloader_workers": 2, "prefetch_factor": 4,
    "vllm_gpu_memory_utilization": 0.5, "vllm_enforce_eager": True, "check_memory": False, "hang_minutes": 4.0,
    "save_async": False, "rollback": "host", "checkpoint_mirror": "s3://bucket/prefix",
    "min_workers": 1, "gpu": "H100", "wait_minutes": 5.0,
}  # fmt: skip


def test_every_field_of_resources_changes_the_settings_or_is_named() -> None:
    before = exported(grpo())
    for each in fields(Resources):
        if each.name in _OF_PLAN:
            continue
        after = exported(grpo(), Resources(**{each.name: OTHER_RESOURCES.get(each.name, "sdpa")}))
        named = [note for note in after.notes if note.startswith(f"{each.name}=")]
        assert before.config != after.config or named, each.name


def test_what_verl_cannot_do_is_refused() -> None:
    both = replace(PLACES, reward_model="/models/reward")
    with pytest.raises(ConfigError, match="rewards and the slot reward_model are both filled"):
        exported(grpo(), places=both)
    with pytest.raises(ConfigError, match="SFT: is not exported to verl; stages of GRPO, RLOO and PPO"):
        verl_recipe(SFT(num_steps=1), Resources(), PLACES, 10)
    for fields_, found in (
        ({"adapter": Adapter(type="dora")}, "adapter.type=dora: verl trains only LoRA"),
        ({"adapter": Adapter(), "quantization": Quantization(format="nf4")}, "quantization.format=nf4: verl trains on"),
        ({"images": Images()}, "images: rows with images are not exported to verl"),
        ({"adapter": Adapter(), "adapter_in": "continue"}, "adapter_in=continue: verl starts a LoRA from nothing"),
    ):
        with pytest.raises(ConfigError, match=found):
            exported(grpo(**fields_))
    only = replace(PLACES, rewards=None, reward_model="/models/reward")
    weighted = exported(grpo(rewards=None, reward_model_weight=0.5), places=only)
    assert "reward_model_weight=0.5: verl has no such setting" in weighted.notes


def test_values_are_in_the_grammar_of_overrides() -> None:
    values = {"a": None, "b": True, "c": 1e-6, "d": ["x y", 2], "e": {"eps": 0.5}, "f": "it's", "g": 1e9, "h": 0.1}
    shown = {key: flat(value) for key, value in values.items()}
    assert shown == {
        "a": "null", "b": "true", "c": "1e-06", "d": "['x y',2]", "e": "{eps:0.5}", "f": "'it\\'s'", "g": "1e+09",
        "h": "0.1",
    }  # fmt: skip


def verl_config() -> Path | None:
    """Of the package that the set-up unpacks beside the environment, since its needs contradict the lock."""
    path = Path(sys.prefix) / "verl" / "verl" / "trainer" / "config"
    return path if path.is_dir() else None


@pytest.mark.skipif(verl_config() is None, reason="needs verl: make .venv/ready")
@pytest.mark.parametrize("build", [grpo, rloo, ppo])
def test_verl_has_every_key(build, monkeypatch) -> None:
    from hydra import compose, initialize_config_dir
    from hydra.core.override_parser import overrides_parser
    from hydra.core.override_parser.overrides_visitor import HydraOverrideVisitor
    from omegaconf import OmegaConf

    monkeypatch.setattr(overrides_parser, "HydraOverrideVisitor", HydraOverrideVisitor)  # as verl's process has it
    methods = [build()]
    if build is grpo:  # fields that the three have in common
        methods.append(build(adapter=Adapter(exclude_modules="lm_head"), optimizer=Optimizer(eps=1e-6)))
        methods.append(build(sampling=Sampling(repetition_penalty=1.2), schedule=Schedule(warmup=4)))
    for method in methods:
        config = exported(method).config
        with initialize_config_dir(str(verl_config()), version_base=None):
            found = compose("ppo_trainer", [f"{key}={flat(value)}" for key, value in config.items()])
        for key, value in config.items():
            assert OmegaConf.select(found, key.lstrip("+")) == value, key
