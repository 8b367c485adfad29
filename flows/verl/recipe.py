"""Translates a recipe to settings of verl (Sheng et al. 2024, arXiv:2409.19256), with its FSDP engine and vLLM.

The keys are those of ``verl/trainer/config/ppo_trainer.yaml`` of verl 0.9.1. Settings that verl lacks are
listed in ``Recipe.notes``, with what verl does instead.
"""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass

from flows.declare.project import quoted
from lineage.errors import ConfigError
from tasks.context import Resources
from tasks.grpo import GRPO
from tasks.method import Method
from tasks.ppo import PPO
from tasks.rloo import RLOO
from tasks.train.generation.generating import Generating
from tasks.train.losses.grpo_variants import VARIANTS

VERSION = "0.9.1"
_NEVER = 1e9  # a bound that is never reached, since verl has no "none"
_ACTOR, _ROLLOUT, _CRITIC = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "critic"
_AGGREGATION = {  # loss of GRPO -> how verl averages over tokens
    "grpo": "seq-mean-token-mean", "dapo": "token-mean", "bnpo": "token-mean", "dr_grpo": "seq-mean-token-sum-norm",
    "gspo": "seq-mean-token-mean", "cispo": "token-mean", "sapo": "seq-mean-token-mean",
}  # fmt: skip
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_INSTEAD = {  # field -> what verl does instead
    "sampling.min_p": "samples without it",
    "scale_rewards": "scales by the group's standard deviation, or not at all",
    "mask_truncated": "trains completions without an end too",
    "kl_ratio": "does not weight the KL by the ratio",
    "reward_clip": "does not clip rewards",
    "normalize_advantages": "has it in another estimator: --set algorithm.adv_estimator=reinforce_plus_plus_baseline",
    "missing_eos_penalty": "subtracts nothing for a missing end; a reward function can",
    "equal_rewards_patience": "does not stop where rewards are equal for many steps",
    "vllm": "starts vLLM in its own workers",
    "optimizer.weight_decay": "decays biases and norms too",
    "whiten_rewards": "does not whiten rewards",
    "whiten_advantages": "whitens advantages of GAE always",
    "center_advantages": "does not subtract the mean of a prompt's completions",
    "value_coef": "has an optimizer of its own for the critic, whose loss has no factor",
    "save": "saves sharded checkpoints: python -m verl.model_merger makes a model of one",
    "best": "keeps no best model",
    "evaluation": "scores no checkpoints by these metrics",
    "adapter.dropout": "has no dropout in a LoRA",
    "save_minutes": "saves by steps alone",
    "keep_best": "keeps the newest checkpoints alone",
    "save_async": "waits for its saves",
    "rollback": "goes back to no checkpoint",
    "checkpoint_mirror": "copies checkpoints to HDFS alone (trainer.default_hdfs_dir)",
    "max_failures": "restarts nothing itself: run it again, and it resumes from its last checkpoint",
    "hang_minutes": "waits for a worker that hangs",
    "min_workers": "trains with all workers, or not at all",
    "gpu": "takes GPUs of any type",
    "wait_minutes": "does not wait for nodes, but ends",
    "deterministic": "has kernels that are not deterministic",
    "weights": "sets it by the precision",
    "attention": "has FlashAttention, or what actor_rollout_ref.model.override_config says",
    **dict.fromkeys(("zero_stage", "sharding", "offload", "wrap", "reduce_dtype", "prefetch"), "shards by FSDP"),
    "timeout_minutes": "has a timeout of its own",
    "precompute_reference": "computes the reference's log-probabilities in each step",
    "cpus_per_worker": "sets its own threads",
    "gpus_per_worker": "takes one GPU for each worker",
    "launcher": "starts its workers by Ray",
    "empty_cache_steps": "empties the cache itself",
    "prefetch_factor": "has torch's own for its loader",
    "check_memory": "checks no memory before it starts",
}
# Fields of ``resources`` that matter also where they have their defaults, and those that concern this project's plan.
_EFFECTIVE = {"equal_rewards_patience", "save_minutes", "max_failures", "hang_minutes"}
_OF_PLAN = {"price_per_gpu_hour", "currency", "watts_per_worker", "gpu_memory_gib", "gpu_pool"}


@dataclass
class Recipe:
    """Settings of verl.

    Args:
        config: key -> value.
        notes: lines on fields that are not exported.
        read: our fields that ``config`` or ``notes`` cover; nested ones by dotted names.
    """

    config: dict[str, object] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    read: set[str] = field(default_factory=set)

    def put(self, prefix: str, *read: str, **values: object) -> None:
        """Adds keys below a prefix, which cover these fields of ours."""
        self.config |= {f"{prefix}.{name}": value for name, value in values.items()}
        self.read |= {*read}

    def leave(self, name: str, value: object) -> None:
        """Notes a field that is not exported."""
        self.read.add(name)
        self.notes.append(f"{name}={value}: verl {_INSTEAD.get(name, 'has no such setting')}")


@dataclass(frozen=True, kw_only=True)
class Places:
    """Paths of verl's inputs; ``reward_model`` is None if the slot is empty.

    Args:
        measures: whether ``held_out`` has rows that are not trained on, which verl measures whenever it saves.
    """

    policy: str
    train: str
    held_out: str
    rewards: str | None
    reward_model: str | None = None
    pipeline: str = "posttrain"
    stage: str = "stage"
    measures: bool = False


def verl_recipe(method: Method, resources: Resources, places: Places, num_rows: int) -> Recipe:
    """The settings of a stage in verl.

    Args:
        num_rows: number of training prompts, which ``num_epochs`` refers to.

    Raises:
        ConfigError: verl lacks the method or this form of it.
    """
    if not isinstance(method, GRPO | RLOO | PPO):
        raise ConfigError(
            f"{method.name()}: is not exported to verl; stages of GRPO, RLOO and PPO are accepted; name one of them"
        )
    if getattr(method, "images", None):
        raise ConfigError("images: rows with images are not exported to verl; set images=null, or train it here")
    recipe = Recipe()
    _check_adapter(method)
    recipe.read.add("adapter_in")
    _data(method, places, recipe)
    _batch(method, resources, num_rows, recipe)
    _sampling(method, resources, recipe)
    _optimization(method, recipe)
    _model(method, resources, places, recipe)
    _rewards(method, places, recipe)
    if isinstance(method, GRPO):
        _grpo(method, recipe)
    elif isinstance(method, RLOO):
        _rloo(method, recipe)
    else:
        _ppo(method, places, recipe)
    _trainer(method, resources, places, num_rows, recipe)
    for name, value in unread(method, recipe.read):
        recipe.leave(name, value)
    for name, value in unread(resources, recipe.read | _OF_PLAN):
        recipe.leave(name, value)
    recipe.notes.append("seed: the order of prompts and the noise of samples are verl's own: its numbers are others")
    return recipe


def _trainer(method: Generating, resources: Resources, places: Places, num_rows: int, recipe: Recipe) -> None:
    """Machines, checkpoints and measurements. Without a frequency verl saves no model at all, also not at the end."""
    steps = recipe.config["trainer.total_training_steps"]
    assert isinstance(steps, int)
    prompts = method.global_batch_size // method.num_generations
    frequencies = [
        *([-(-resources.save_steps // method.steps_per_generation)] if resources.save_steps else []),
        *([max(1, round(resources.save_epochs * num_rows / prompts))] if resources.save_epochs else []),
    ]
    save = min([steps, *frequencies])
    recipe.put(
        "trainer", "num_nodes", "num_workers", "micro_batch_size", "save_steps", "save_epochs", "keep_last",
        project_name=places.pipeline, experiment_name=places.stage, logger=["console"],
        nnodes=resources.num_nodes, n_gpus_per_node=max(1, resources.num_workers // resources.num_nodes),
        save_freq=save, max_actor_ckpt_to_keep=resources.keep_last, test_freq=save if places.measures else -1,
        val_before_train=places.measures,
    )  # fmt: skip
    if isinstance(method, PPO):
        recipe.put("trainer", max_critic_ckpt_to_keep=resources.keep_last)
    recipe.put("data", "dataloader_workers", dataloader_num_workers=resources.num_loaders)


def unread(setting: object, read: set[str], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Fields with non-default values (or effective defaults) that are not covered yet."""
    assert is_dataclass(setting)
    for each in fields(setting):
        name, value = prefix + each.name, getattr(setting, each.name)
        default = each.default_factory() if each.default_factory is not MISSING else each.default
        if name in read or (value == default and name not in _EFFECTIVE) or value is None:
            continue
        if is_dataclass(value) and any(other.startswith(f"{name}.") for other in read):
            yield from unread(value, read, f"{name}.")
        else:
            yield name, value


def _check_adapter(method: Generating) -> None:
    if method.adapter and method.adapter.type != "lora":
        raise ConfigError(
            f"adapter.type={method.adapter.type}: verl trains only LoRA; set adapter.type=lora, or adapter=null"
        )
    if method.quantization:
        raise ConfigError(
            f"quantization.format={method.quantization.format}: verl trains on no base in few bits; set "
            "quantization=none"
        )
    if method.adapter_in in ("continue", "stack"):
        raise ConfigError(f"adapter_in={method.adapter_in}: verl starts a LoRA from nothing; set adapter_in=merge")


def _data(method: Generating, places: Places, recipe: Recipe) -> None:
    tokenization = method.tokenization()
    assert tokenization
    recipe.put(
        "data", "max_length", "max_prompt_length", "max_completion_length", "too_long", "seed",
        train_files=[places.train], val_files=[places.held_out], prompt_key="prompt",
        max_prompt_length=tokenization.max_length, max_response_length=method.max_completion_length,
        filter_overlong_prompts=method.too_long == "drop",
        truncation="left" if method.too_long in (None, "cut_prompt") else "error", shuffle=True, seed=method.seed,
    )  # fmt: skip


def _batch(method: Generating, resources: Resources, num_rows: int, recipe: Recipe) -> None:
    """Prompts per generation and per update; a training step of verl is a generation with all its updates."""
    updates = getattr(method, "num_minibatches", 1)
    prompts = method.global_batch_size // method.num_generations
    if prompts % updates:
        raise ConfigError(
            f"num_minibatches={updates}: {prompts} prompts (global_batch_size / num_generations) do not divide into so "
            "many updates, and verl divides prompts; set num_minibatches to a divisor"
        )
    if num_rows < prompts:
        raise ConfigError(
            f"{num_rows} prompts are fewer than the {prompts} of a step (global_batch_size / num_generations), and verl"
            " drops a batch that is not full; set a smaller global_batch_size, or add prompts"
        )
    steps = -(-method.steps(lambda: num_rows) // method.steps_per_generation)
    recipe.put(
        "trainer", "num_steps", "num_epochs", total_training_steps=steps,
        total_epochs=-(-steps // (num_rows // prompts)),  # of full batches: verl drops the rest
    )  # fmt: skip
    recipe.put("data", "global_batch_size", train_batch_size=prompts)
    recipe.put(_ROLLOUT, "num_generations", n=method.num_generations)
    epochs = getattr(method, "num_iterations", getattr(method, "num_ppo_epochs", 1))
    micro = resources.rows_at_once
    recipe.put(
        _ACTOR, "num_iterations", "num_ppo_epochs", "num_minibatches", ppo_mini_batch_size=prompts // updates,
        ppo_epochs=epochs, ppo_micro_batch_size_per_gpu=micro, data_loader_seed=method.seed,
    )  # fmt: skip
    recipe.put(_ROLLOUT, log_prob_micro_batch_size_per_gpu=micro)
    recipe.put("actor_rollout_ref.ref", log_prob_micro_batch_size_per_gpu=micro)


def _sampling(method: Generating, resources: Resources, recipe: Recipe) -> None:
    sampling = method.sampling
    share, is_eager = resources.vllm_gpu_memory_utilization, resources.vllm_enforce_eager
    engine = {"gpu_memory_utilization": share} if share else {}
    engine |= {"enforce_eager": True} if is_eager else {}
    recipe.put(
        _ROLLOUT, "sampling.temperature", "sampling.top_p", "sampling.top_k", "sampling.repetition_penalty",
        "vllm_gpu_memory_utilization", "vllm_enforce_eager",
        name="vllm", temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k or -1,
        tensor_model_parallel_size=1, dtype="float16" if method.precision == "fp16" else "bfloat16", **engine,
    )  # fmt: skip
    if sampling.repetition_penalty != 1:  # verl's YAML lacks the key, which its dataclass has
        recipe.config[f"+{_ROLLOUT}.repetition_penalty"] = sampling.repetition_penalty


def _optimization(method: Generating, recipe: Recipe) -> None:
    optimizer, schedule = method.optimizer, method.schedule
    if not optimizer.name.startswith("adamw_torch"):
        recipe.leave("optimizer.name", f"{optimizer.name}, trained by AdamW")
    constant = schedule.name in ("constant", "constant_with_warmup")
    if not constant and not schedule.name.startswith("cosine"):
        recipe.leave("schedule.name", f"{schedule.name}, trained by cosine")
    if schedule.name == "cosine_with_restarts":
        recipe.leave("schedule.num_cycles", schedule.num_cycles or 2)
    low = 0.0 if constant else schedule.share_of_minimum(method.learning_rate)
    share = schedule.warmup if schedule.warmup < 1 else 0.0
    steps = -1 if schedule.warmup < 1 else max(1, round(schedule.warmup / method.steps_per_generation))
    values = {
        "lr": method.learning_rate, "weight_decay": optimizer.weight_decay,
        "betas": list(optimizer.betas or (0.9, 0.999)), "lr_scheduler_type": "constant" if constant else "cosine",
        "lr_warmup_steps_ratio": share, "lr_warmup_steps": steps, "min_lr_ratio": low,
        "clip_grad": method.max_grad_norm,
    }  # fmt: skip
    if optimizer.eps is not None:
        values["override_optimizer_config"] = {"eps": optimizer.eps}
    if optimizer.weight_decay:
        recipe.leave("optimizer.weight_decay", optimizer.weight_decay)
    recipe.put(
        f"{_ACTOR}.optim", "learning_rate", "max_grad_norm", "optimizer.name", "optimizer.betas", "optimizer.eps",
        "optimizer.weight_decay", "schedule.name", "schedule.warmup", "schedule.min_learning_rate",
        "schedule.num_cycles", **values,
    )  # fmt: skip
    recipe.put(_ACTOR, grad_clip=method.max_grad_norm)
    if isinstance(method, PPO):
        recipe.put(f"{_CRITIC}.optim", **values)
        recipe.put(_CRITIC, grad_clip=method.max_grad_norm)


def _model(method: Generating, resources: Resources, places: Places, recipe: Recipe) -> None:
    model = "actor_rollout_ref.model"
    recipe.put(
        model, "gradient_checkpointing", "liger", path=places.policy, use_remove_padding=True,
        enable_gradient_checkpointing=resources.checkpointed_layers is not None, use_liger=resources.liger,
    )  # fmt: skip
    if (resources.checkpointed_layers or 1) > 1:
        recipe.leave("gradient_checkpointing", f"{resources.gradient_checkpointing}, checkpointed in all layers")
    recipe.put(_ACTOR, "compile", use_torch_compile=resources.compile)
    dtype = _DTYPES.get(resources.resolved_precision(method.precision))
    if dtype is None:
        recipe.leave("precision", method.precision)
    for engine in (f"{_ACTOR}.fsdp_config", "actor_rollout_ref.ref.fsdp_config"):
        recipe.put(engine, "precision", dtype=dtype or "bfloat16")
    if method.adapter is None:
        recipe.read.add("adapter")
        return
    adapter = method.adapter
    recipe.put(
        model, "adapter.type", "adapter.rank", "adapter.alpha", "adapter.target_modules", "adapter.exclude_modules",
        lora_rank=adapter.rank, lora_alpha=adapter.alpha,
        target_modules="all-linear" if adapter.target_modules == "all-linear" else adapter.target_names,
        exclude_modules=[each.strip() for each in (adapter.exclude_modules or "").split(",") if each.strip()] or None,
    )  # fmt: skip
    recipe.put(_ROLLOUT, load_format="safetensors")  # required by verl with LoRA


def _rewards(method: Generating, places: Places, recipe: Recipe) -> None:
    if places.rewards:
        recipe.put("reward.custom_reward_function", "rewards", path=places.rewards, name="compute_score")
    if places.reward_model and places.rewards:
        raise ConfigError(
            "rewards and the slot reward_model are both filled: verl's managers read one of them; empty the slot, set "
            "rewards=null, or write a reward manager for verl"
        )
    if places.reward_model:
        recipe.put("reward.reward_model", enable=True, model_path=places.reward_model)
        recipe.put("reward.reward_model.rollout", name="vllm", tensor_model_parallel_size=1)
        if method.reward_model_weight not in (None, 1.0):
            recipe.leave("reward_model_weight", method.reward_model_weight)
    recipe.read.add("reward_model_weight")


def _clipped(low: float, high: float, recipe: Recipe) -> None:
    recipe.put(_ACTOR, clip_ratio=low, clip_ratio_low=low, clip_ratio_high=high)
    recipe.put(_ACTOR, clip_ratio_c=_NEVER)  # no second clip of losses with negative advantages


def _grpo(method: GRPO, recipe: Recipe) -> None:
    variant = VARIANTS[method.loss]
    if method.loss not in _AGGREGATION:
        raise ConfigError(
            f"loss={method.loss}: verl {VERSION} has no such loss; accepted: {', '.join(_AGGREGATION)}; set one of them"
        )
    scale = method.scale_rewards or variant.scale_rewards
    if scale == "batch":
        recipe.leave("scale_rewards", scale)
    recipe.put(
        "algorithm", "loss", "scale_rewards", adv_estimator="grpo", norm_adv_by_std_in_grpo=scale != "none",
        use_kl_in_reward=False,
    )  # fmt: skip
    modes = {"gspo": "gspo", "cispo": "cispo", "sapo": "sapo"}
    recipe.put(f"{_ACTOR}.policy_loss", loss_mode=modes.get(method.loss, "vanilla"))
    recipe.put(_ACTOR, loss_agg_mode=_AGGREGATION[method.loss], entropy_coeff=0)
    high = method.epsilon_high or variant.epsilon_high or 0.2
    if method.loss == "cispo":  # ours is the largest ratio without a lower bound, verl's the distance from 1
        _clipped(1.0, high - 1, recipe)
    else:
        _clipped(method.epsilon or variant.epsilon or 0.2, high, recipe)
    recipe.put(
        _ACTOR, "epsilon", "epsilon_high", "beta", use_kl_loss=method.beta > 0, kl_loss_coef=method.beta,
        kl_loss_type="low_var_kl",
    )  # fmt: skip


def _rloo(method: RLOO, recipe: Recipe) -> None:
    recipe.put(
        "algorithm", "beta", adv_estimator="rloo", use_kl_in_reward=method.beta > 0, kl_penalty="kl",
        norm_adv_by_std_in_grpo=False,
    )  # fmt: skip
    recipe.put("algorithm.kl_ctrl", type="fixed", kl_coef=method.beta)
    recipe.put(_ACTOR, use_kl_loss=False, loss_agg_mode="seq-mean-token-sum", entropy_coeff=0)
    _clipped(0.2, 0.2, recipe)  # nothing is clipped: completions are trained once


def _ppo(method: PPO, places: Places, recipe: Recipe) -> None:
    adaptive = method.kl_target is not None
    recipe.put(
        "algorithm", "gamma", "gae_lambda", adv_estimator="gae", gamma=method.gamma, lam=method.gae_lambda,
        use_kl_in_reward=method.kl_coef > 0, kl_penalty="kl",
    )  # fmt: skip
    recipe.put(
        "algorithm.kl_ctrl", "kl_coef", "kl_target", "kl_horizon", type="adaptive" if adaptive else "fixed",
        kl_coef=method.kl_coef, **({"target_kl": method.kl_target} if adaptive else {}),
        **({"horizon": method.kl_horizon} if method.kl_horizon else {}),
    )  # fmt: skip
    recipe.put(_ACTOR, "clip_range", use_kl_loss=False, loss_agg_mode="token-mean", entropy_coeff=0)
    _clipped(method.clip_range, method.clip_range, recipe)
    limit = _NEVER if method.value_clip_range is None else method.value_clip_range
    recipe.put(_CRITIC, "value_clip_range", cliprange_value=limit, loss_agg_mode="token-mean")
    recipe.put(f"{_CRITIC}.model", path=places.reward_model or places.policy)
    recipe.leave("value_coef", method.value_coef)
    if not method.whiten_advantages:
        recipe.leave("whiten_advantages", False)


def flat(value: object) -> str:
    """A value in Hydra's grammar of overrides."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else repr(value)
    if isinstance(value, list):
        return f"[{','.join(map(flat, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{flat(each)}' for key, each in value.items())}}}"
    return quoted(str(value))
