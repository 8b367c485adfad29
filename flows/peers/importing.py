"""``posttrain import``: a configuration of LLaMA-Factory, axolotl, TRL or Oumi becomes a pipeline file.

Each key is mapped, named as not needed, or refused. ``flows.declare.peer_names`` says what most keys are here;
``RULES`` has those that need more than another name. What a peer assumes where its file is silent is set too.
"""

import argparse
import json
import re
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from flows.commands.arguments import write_output
from flows.declare.peer_names import FIELDS, OF_BASE, VALUES
from flows.declare.project import is_shipped, other_peer, without_project
from flows.peers.datasets import (
    NO_PAD,
    READERS,
    SAYS,
    STAGES,
    Draft,
    Values,
    as_list,
    finish_factory,
    finish_rewards,
    finish_template,
    finish_trained_on,
    flat_oumi,
    hub_sources,
    mends,
    number,
    part,
    pipeline_of,
    read_values,
    section,
    set_adapter,
    set_prompt_column,
    set_rewards,
    set_special_tokens,
    set_weights,
    slug,
    training_of,
)
from flows.reports.wording import on_screen, relative
from lineage.errors import ConfigError
from lineage.filesystem.files import local_path

PEERS = ("llamafactory", "axolotl", "trl", "oumi")
_TITLES = {"llamafactory": "LLaMA-Factory's", "axolotl": "axolotl's", "trl": "TRL's", "oumi": "Oumi's"}
_SAMPLES = ("grpo", "rloo")
_HUGGING_FACE: Values = {
    "learning_rate": 5e-5, "num_train_epochs": 3.0, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1,
    "lr_scheduler_type": "linear", "warmup_steps": 0, "weight_decay": 0.0, "max_grad_norm": 1.0, "seed": 42,
    "optim": "adamw_torch_fused",
}  # fmt: skip
# What each peer assumes, by its own names.
DEFAULTS: Mapping[str, Values] = {
    "llamafactory": {
        **_HUGGING_FACE, "cutoff_len": 2048, "lora_rank": 8, "lora_dropout": 0.0,
        "disable_gradient_checkpointing": False,
    },
    "axolotl": {
        "num_epochs": 1.0, "micro_batch_size": 1, "gradient_accumulation_steps": 1, "lr_scheduler": "cosine",
        "optimizer": "adamw_torch_fused", "weight_decay": 0.0, "max_grad_norm": 1.0, "seed": 42, "sequence_len": 512,
        "warmup_ratio": 0.03,
    },
    "trl": {**_HUGGING_FACE, "bf16": "auto", "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05},
    "oumi": {**_HUGGING_FACE, "optim": "adamw_torch", "lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0},
}  # fmt: skip
TRL_DEFAULTS: Mapping[str, Values] = {
    "sft": {"learning_rate": 2e-5, "max_length": 1024},
    "dpo": {"learning_rate": 1e-6, "max_length": 1024, "beta": 0.1},
    "kto": {"learning_rate": 1e-6, "max_length": 1024, "beta": 0.1},
    "reward": {"learning_rate": 1e-4, "max_length": 1024},
    "grpo": {
        "learning_rate": 1e-6, "beta": 0.0, "num_generations": 8, "max_completion_length": 512, "loss_type": "dapo",
    },
    "rloo": {"learning_rate": 1e-6, "beta": 0.05, "num_generations": 2, "max_completion_length": 512},
}  # fmt: skip
# Names that replace each other: where a file has one, the defaults of the others do not apply.
_INSTEAD = (
    ("num_train_epochs", "max_steps"), ("num_epochs", "max_steps"), ("warmup_steps", "warmup_ratio", "warmup"),
    ("bf16", "fp16", "mixed_precision_dtype"), ("max_length", "max_seq_length"),
    ("disable_gradient_checkpointing", "gradient_checkpointing", "recompute_granularity"),
)  # fmt: skip
_OURS = (  # the same name here
    "num_epochs", "learning_rate", "seed", "max_length", "beta", "label_smoothing", "neftune_alpha", "num_generations",
    "num_iterations", "max_completion_length", "max_prompt_length", "epsilon", "epsilon_high", "desirable_weight",
    "undesirable_weight", "ld_alpha", "discopop_tau", "gamma", "max_grad_norm",
)  # fmt: skip
_UNCLIPPED = 1e9  # a norm that no gradient reaches, for 0, which clips none at peers
_FIELD = re.compile(r"(stages\.STAGE\.method|stages\.STAGE\.resources|sources\.NAME)\.([\w.]+)(?:=(\w+))?")
_PREFIXES = (
    "wandb_", "mlflow_", "comet_", "swanlab_", "trackio_", "hub_", "ddp_", "dataset_prepared", "hf_", "enable_wandb",
    "enable_mlflow", "enable_tensorboard", "ray_", "use_swanlab", "push_to_hub", "launcher.",
)  # fmt: skip


Rule = Callable[[Draft, str, object], None]


def _to(path: str) -> Rule:
    return lambda draft, key, value: draft.set(key, path, value)


def _note(why: str) -> Rule:
    return lambda draft, key, value: draft.skip(key, why)


def _only(accepted: object, why: str, otherwise: str) -> Rule:
    """A key that is not needed with one value, and refused with others."""

    def rule(draft: Draft, key: str, value: object) -> None:
        if value == accepted:
            draft.skip(key, why)
        else:
            draft.refuse(key, value, otherwise)

    return rule


def _together(name: str, shown: str) -> Rule:
    """A value that ``_finish`` reads beside others."""

    def rule(draft: Draft, key: str, value: object) -> None:
        draft.seen[name] = value
        draft.mapped[key] = shown

    return rule


def _named(path: str) -> Rule:
    return lambda draft, key, value: draft.set(key, path, VALUES.get(str(value), str(value)))


def _joined(path: str) -> Rule:
    """A list of names, which is a text here."""

    def rule(draft: Draft, key: str, value: object) -> None:
        names = [str(each) for each in value] if isinstance(value, list) else [str(value)]
        text = ",".join(names)
        draft.set(key, path, "all-linear" if text in ("all", "all-linear", "all_linear") else text)

    return rule


def _frozen_part(*names: str) -> Rule:
    """Whether parts of a model that reads images are frozen, as they are here by default."""
    trained: Callable[[Draft], object] = lambda draft: section(draft.method.get("images"), "images").get("trains")  # noqa: E731
    return lambda draft, key, value: (
        draft.skip(key, "it is frozen") if value
        else draft.set(key, "method.images.trains", [*as_list(trained(draft)), *names])
    )  # fmt: skip


def _steps(draft: Draft, key: str, value: object) -> None:
    if isinstance(value, int | float) and value > 0:
        draft.set(key, "method.num_steps", int(value))
    else:
        draft.skip(key, "epochs are counted")


def _precision(draft: Draft, key: str, value: object) -> None:
    text = str(value).lower()
    if text in ("false", "none"):
        draft.skip(key, "precision is fp32 unless another key sets one")
        return
    if key == "mixed_precision_dtype":
        key_value = text
    else:
        key_value = "auto" if text in ("auto", "full") else "fp16" if key in ("fp16", "float16") else "bf16"
    draft.set(key, "method.precision", key_value)


def _adapter(draft: Draft, key: str, value: object) -> None:
    name = {True: "lora", False: "full"}.get(value, str(value)) if isinstance(value, bool) else str(value)
    if name == "full":
        draft.skip(key, "all weights are trained")
    elif name in ("lora", "qlora", "oft", "dora"):
        draft.set(key, "method.adapter.type", "lora" if name == "qlora" else name)
        draft.seen["adapter"] = True
        if name == "qlora":
            draft.set(key, "method.quantization.format", "nf4")
    else:
        draft.refuse(
            key, value, "full, lora, qlora and oft are mapped; freeze is stages.STAGE.method.freeze: set it by hand"
        )


def _all_linear(draft: Draft, key: str, value: object) -> None:
    if value:
        draft.set(key, "method.adapter.target_modules", "all-linear")
    else:
        draft.skip(key, "the modules are named")


def _quantized(draft: Draft, key: str, value: object) -> None:
    forms = {4: "nf4", 8: "int8"}
    if value is False:
        draft.skip(key, "the base is not quantized")
    elif key == "load_in_8bit":
        draft.set(key, "method.quantization.format", "int8")
    elif value is True or value in forms:
        draft.set(key, "method.quantization.format", "nf4" if value is True else forms[int(str(value))])
    else:
        draft.refuse(key, value, "4 and 8 bits are mapped")


def _warmup(draft: Draft, key: str, value: object) -> None:
    if not value and draft.method.get("schedule", {}).get("warmup"):  # type: ignore[attr-defined]
        draft.skip(key, "another key sets the warm-up")
    else:
        draft.set(key, "method.schedule.warmup", value)


def _held_out(draft: Draft, key: str, value: object) -> None:
    if value:
        share = float(str(value))
        draft.set(key, "data.held_out", share if share < 1 else int(share))
    else:
        draft.skip(key, "one row is held out (held_out: 1)")


def _strategy(draft: Draft, key: str, value: object) -> None:
    draft.seen["eval_strategy"] = str(value)
    draft.mapped[key] = "method.validation"


def _saves(draft: Draft, key: str, value: object) -> None:
    if value == "epoch":
        draft.set(key, "resources.save_epochs", 1.0)
    else:
        draft.skip(key, "the other keys of saves are mapped; save_minutes saves too")


def _per_epoch(path: str) -> Rule:
    def rule(draft: Draft, key: str, value: object) -> None:
        if value:
            draft.set(key, path, 1 / float(str(value)))
        else:
            draft.skip(key, "none is made")

    return rule


def _checkpointed(draft: Draft, key: str, value: object) -> None:
    if value:
        draft.set(key, "resources.gradient_checkpointing", "on")
    else:
        draft.skip(key, "off is the default")


def _packing(draft: Draft, key: str, value: object) -> None:
    if not value:
        draft.skip(key, "off is the default")
    elif draft.stage == "cpt":
        draft.skip(key, "documents are always packed")
    elif draft.stage == "sft":
        draft.set(key, "method.packing", "best_fit")
    else:
        draft.refuse(key, value, f"{draft.stage} reads batches without padding, and has no packs")


_STRATEGIES = {  # of FSDP, by name and by the number that accelerate has for it
    "full_shard": "fsdp", "shard_grad_op": "fsdp_grad", "no_shard": "none", "hybrid_shard": "fsdp_hybrid",
    "hybrid_shard_zero2": "fsdp_hybrid", "_hybrid_shard_zero2": "fsdp_hybrid", "fsdp": "fsdp",
    "1": "fsdp", "2": "fsdp_grad", "3": "none", "4": "fsdp_hybrid", "5": "fsdp_hybrid", "true": "fsdp",
    "false": "fsdp_grad",
}  # fmt: skip
_ALONE = "one worker has nothing to divide; more: --num-workers N"
_FSDP_KEYS = (  # that change no model, and are one way here
    "auto_wrap", "auto_wrap_policy", "version", "state_dict_type", "final_state_dict_type", "sync_module_states",
    "backward_prefetch", "forward_prefetch", "use_orig_params", "limit_all_gathers", "cpu_ram_efficient_loading",
    "mixed_precision", "mixed_precision_policy", "xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "enable_fsdp",
)  # fmt: skip


def _deepspeed(draft: Draft, key: str, value: object) -> None:
    """Its configuration, or the name of a file that cannot be read, which has the stage in it."""
    zero = value.get("zero_optimization", {}) if isinstance(value, dict) else {}
    named = re.search(r"(?:zero|_z|stage\W*)[_-]?([0-3])", str(value).lower())
    stage = str(zero.get("stage", 0)) if isinstance(value, dict) else named[1] if named else ""
    offloads = "offload" in str(value).lower() if not isinstance(value, dict) else any(
        isinstance(each := zero.get(name), dict) and each.get("device", "none") != "none"
        for name in ("offload_optimizer", "offload_param")
    )  # fmt: skip
    if not value or stage == "0":
        draft.skip(key, "one copy on each worker is the default")
    elif stage not in ("1", "2", "3"):
        draft.refuse(key, value, "no stage of ZeRO is in its name, and there is no such file; set resources.sharding")
    elif draft.workers == 1:
        draft.skip(key, _ALONE)
    else:
        draft.set(key, "resources.sharding", f"zero{stage}{'_offload' * (offloads and stage != '1')}")


def _accelerate(draft: Draft, key: str, value: object) -> None:
    """A name of TRL's, such as ``zero2``, or a file."""
    if str(value) in ("single_gpu", "multi_gpu"):
        draft.skip(key, "one copy on each worker is the default")
    elif str(value).startswith("fsdp"):
        _fsdp(draft, key, {"fsdp": True})
    else:
        _deepspeed(draft, key, value)


def _fsdp(draft: Draft, key: str, value: object) -> None:
    """``full_shard auto_wrap offload``, a list of such, or a section of settings."""
    named = value if isinstance(value, dict) else {}
    values = value.split() if isinstance(value, str) else value if isinstance(value, list) else [value]
    for word in () if named else values:
        named[str(word).lower()] = True
    if draft.workers == 1 or not value:
        draft.skip(key, _ALONE if value else "one copy on each worker is the default")
        return
    for name, each in named.items():
        where, own = f"{key}.{name}", name.removeprefix("fsdp_")
        strategy = _STRATEGIES.get(own if each is True and own in _STRATEGIES else str(each).lower(), "")
        if own in ("sharding_strategy", "reshard_after_forward", *_STRATEGIES) and strategy:
            draft.set(where, "resources.sharding", strategy)
        elif own in ("offload", "offload_params", "cpu_offload"):
            draft.set(where, "resources.offload", True) if each else draft.skip(where, "off is the default")
        elif own in ("transformer_layer_cls_to_wrap", "transformer_layer_cls", "min_num_params", "min_params"):
            wrap = ",".join(map(str, each)) if isinstance(each, list) else each
            draft.set(where, "resources.wrap", wrap) if wrap else draft.skip(where, "the model's layers are wrapped")
        elif own == "activation_checkpointing":
            _checkpointed(draft, where, each)
        elif own in _FSDP_KEYS:
            draft.skip(where, "it changes no model, and is one way here")
        else:
            draft.refuse(where, each, "docs/sharding.md lists what FSDP2 has here")
    draft.resources.setdefault("sharding", "fsdp")


def _attention(draft: Draft, key: str, value: object) -> None:
    name = {"fa2": "flash_attention_2", "disabled": "eager"}.get(str(value), str(value))
    if name in ("eager", "sdpa"):
        draft.set(key, "resources.attention", name)
    else:
        draft.skip(key, "attention=auto takes the fastest that is installed; the model is the same")


def _loss(draft: Draft, key: str, value: object) -> None:
    if draft.stage in ("orpo", "simpo", "reward", "sft", "cpt"):
        nll = draft.stage in ("sft", "cpt") and value not in ("nll", None)
        draft.refuse(key, value, "the loss of SFT is nll") if nll else draft.skip(key, f"the stage is {draft.stage}")
        return
    losses = [value] if isinstance(value, str) else [str(each) for each in value] if isinstance(value, list) else []
    if len(losses) != 1:
        draft.refuse(key, value, "several losses are stages.STAGE.method.losses with weights: set it by hand")
        return
    path = "method.loss" if draft.stage in _SAMPLES else "method.loss_type"
    draft.set(key, path, VALUES.get(losses[0], losses[0]))


def _sampling(draft: Draft, key: str, value: object) -> None:
    if draft.stage in _SAMPLES:
        draft.set(key, f"method.sampling.{key}", value)
    else:
        draft.refuse(key, value, f"{draft.stage} samples nothing")


def _scaled(draft: Draft, key: str, value: object) -> None:
    draft.set(key, "method.scale_rewards", {True: "group", False: "none"}.get(value, value))  # type: ignore[call-overload]


def _vllm(draft: Draft, key: str, value: object) -> None:
    if value:
        draft.set(key, "method.vllm", value if isinstance(value, str) else draft.seen.get("vllm_mode", "colocate"))
    else:
        draft.skip(key, "transformers generates")


def _kwargs(draft: Draft, key: str, value: object) -> None:
    for name, each in value.items() if isinstance(value, dict) else ():
        path = {"min_lr": "min_learning_rate", "num_cycles": "num_cycles", "power": "power"}.get(name)
        if name == "num_cycles" and each == 0.5:
            draft.skip(f"{key}.{name}", "half a wave is the cosine")
        elif path:
            draft.set(f"{key}.{name}", f"method.schedule.{path}", each)
        elif name == "min_lr_rate":
            _together("min_share", "method.schedule.min_learning_rate")(draft, f"{key}.{name}", each)
        else:
            draft.refuse(f"{key}.{name}", each, "min_lr, min_lr_rate, num_cycles and power are mapped")


def _plugins(draft: Draft, key: str, value: object) -> None:
    for each in value if isinstance(value, list) else [value]:
        name = str(each).rpartition(".")[2]
        if name == "LigerPlugin":
            draft.skip(f"{key}:{name}", _LIGER)
        elif name in _PLUGINS:
            draft.skip(f"{key}:{name}", _PLUGINS[name])
        else:
            draft.refuse(f"{key}:{name}", each, f"LigerPlugin, {', '.join(_PLUGINS)} are known")


_PLUGINS = {
    "CutCrossEntropyPlugin": "it saves memory, and changes no model; resources.liger has a fused loss",
    **dict.fromkeys(("KernelsPlugin", "ExpertParallelPlugin"), "it changes no model"),
    "SwanLabPlugin": "the record has what was trained, and where",
}  # fmt: skip


def _inside(draft: Draft, key: str, value: object) -> None:
    """Settings that the peer passes on, by their own names."""
    for name, each in value.items() if isinstance(value, dict) else ():
        _one(draft, name, each)


def _template(draft: Draft, key: str, value: object) -> None:
    if draft.template[0]:
        draft.skip(key, f"the template of {draft.template[0]} counts")
    else:
        draft.template = key, str(value)


def _frozen(draft: Draft, key: str, value: object) -> None:
    names = [str(each).replace(".*", "*") for each in as_list(value)]
    draft.set(key, "method.freeze.modules", ",".join(names))


def _wrapped(draft: Draft, key: str, value: object) -> None:
    _fsdp(draft, key, {key: value})


_LIGER = "resources.liger=auto takes its layers on a GPU where they are installed"
_EXECUTION = _note("it changes no model")
_RULES: Mapping[tuple[str, ...], Rule] = {
    ("per_device_train_batch_size", "micro_batch_size"): _together("micro", "resources.micro_batch_size"),
    ("gradient_accumulation_steps",): _together("accumulation", "method.global_batch_size"),
    ("per_device_eval_batch_size", "eval_batch_size", "eval_accumulation_steps"): _note("micro_batch_size is read"),
    ("max_steps",): _steps,
    ("bf16", "fp16", "pure_bf16", "bfloat16", "float16", "mixed_precision_dtype"): _precision,
    ("tf32", "dtype", "torch_dtype", "torch_dtype_str", "model_dtype", "upcast_layernorm"): _note(
        "weights are held in fp32, and precision says what computes"
    ),
    ("finetuning_type", "adapter", "use_peft"): _adapter,
    ("lora_target", "lora_target_modules"): _joined("method.adapter.target_modules"),
    ("lora_modules_to_save", "additional_target"): _joined("method.adapter.modules_to_save"),
    ("lora_target_linear",): _all_linear,
    ("load_in_4bit", "load_in_8bit", "quantization_bit", "q_lora", "q_lora_bits"): _quantized,
    ("bnb_4bit_quant_type",): _together("format", "method.quantization.format"),
    ("bnb_4bit_compute_dtype",): _together("compute", "method.quantization.compute_dtype"),
    ("bnb_4bit_quant_storage", "quantization_method", "quantization_device_map"): _EXECUTION,
    ("warmup_ratio", "warmup_steps", "warmup"): _warmup,
    ("weight_decay",): _to("method.optimizer.weight_decay"),
    ("optim", "optimizer"): _named("method.optimizer.name"),
    ("lr_scheduler", "lr_scheduler_type"): _named("method.schedule.name"),
    ("lr_scheduler_kwargs",): _kwargs,
    ("cosine_min_lr_ratio",): _together("min_share", "method.schedule.min_learning_rate"),
    ("adam_beta1", "beta1"): _together("beta1", "method.optimizer.betas"),
    ("adam_beta2", "beta2"): _together("beta2", "method.optimizer.betas"),
    ("val_size", "val_set_size", "test_size"): _held_out,
    ("eval_strategy", "evaluation_strategy"): _strategy,
    ("eval_steps",): _together("eval_steps", "method.validation.every_steps"),
    ("evals_per_epoch",): _per_epoch("method.validation.every_epochs"),
    ("do_eval", "do_train", "do_predict"): _note("held-out rows are measured where validation is set"),
    ("save_strategy",): _saves,
    ("saves_per_epoch",): _per_epoch("resources.save_epochs"),
    ("save_steps",): lambda draft, key, value: (
        _together("save_share", "resources.save_epochs")(draft, key, value)
        if isinstance(value, float) and 0 < value < 1
        else draft.set(key, "resources.save_steps", value)
        if value
        else draft.skip(key, "none is made")
    ),
    ("max_grad_norm",): lambda draft, key, value: draft.set(key, "method.max_grad_norm", value or _UNCLIPPED),
    ("padding_free",): _note("batches have no padding"),
    ("packing_strategy",): lambda draft, key, value: (
        draft.skip(key, "packs are filled best fit, and cut no row")
        if value in ("bfd", "ffd")
        else draft.refuse(key, value, "packs cut no row here; bfd and ffd are mapped")
    ),
    ("init_lora_weights",): lambda draft, key, value: (
        draft.skip(key, "PEFT's own is the default")
        if str(value).lower() in ("default", "true")
        else draft.set(key, "method.adapter.init", value)
    ),
    ("save_epoch",): lambda draft, key, value: _saves(draft, key, "epoch" if value else "no"),
    ("model_name_or_path", "base_model", "model_name"): set_weights,
    ("adapter_name_or_path", "lora_model_dir", "adapter_model"): set_adapter,
    ("trust_remote_code", "trust_remote_code_model"): _note(
        "Python files of a model run only where its source pins a commit: sources.base.revision and .trust_remote_code"
    ),
    ("model_revision", "revision_of_model"): lambda draft, key, value: (
        draft.skip(key, "main is the default") if value == "main" else draft.set(key, "base.revision", value)
    ),
    ("special_tokens",): set_special_tokens,
    ("template", "chat_template"): _template,
    ("chat_template_jinja",): lambda draft, key, value: (
        draft.set(key, "base.chat_template", value)
        if str(value).endswith(".jinja")
        else draft.refuse(key, value, "a file whose name ends in .jinja is mapped: write it there")
    ),
    ("create_new_adapter",): _together("new_adapter", "method.adapter_in"),
    ("mask_history",): _only(
        False,
        "all answers are trained",
        'all answers are trained here, but those with "loss": false: write that into the earlier turns of the rows',
    ),
    ("default_system", "default_system_message", "system_prompt"): _to("data.system_prompt"),
    ("deepspeed",): _deepspeed,
    ("fsdp", "fsdp_config"): _fsdp,
    ("fsdp_version", "fsdp_final_state_dict_type"): _EXECUTION,
    ("flash_attn", "flash_attention", "attn_implementation", "sdp_attention", "xformers_attention"): _attention,
    ("gradient_checkpointing", "enable_gradient_checkpointing"): _checkpointed,
    ("disable_gradient_checkpointing",): lambda draft, key, value: _checkpointed(draft, key, not value),
    ("gradient_checkpointing_kwargs", "torch_empty_cache_steps", "use_reentrant_gc"): _EXECUTION,
    ("packing", "sample_packing", "neat_packing", "pack"): _packing,
    ("eval_sample_packing", "eval_packing", "pad_to_sequence_len"): _EXECUTION,
    ("train_on_inputs", "train_on_prompt"): _only(
        False, "the answers alone get loss", "the answers alone get loss here (docs/data.md)"
    ),
    ("assistant_only_loss", "completion_only_loss"): _only(
        True, "the answers alone get loss", "prompts get no loss here (docs/data.md)"
    ),
    ("pref_loss", "rl", "loss_type"): _loss,
    ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"): _sampling,
    ("reward_funcs", "reward_functions"): set_rewards,
    ("reward_weights",): _together("reward_weights", "method.rewards.*.weight"),
    ("accelerate_config",): _accelerate,
    ("dataset_prompt_column",): lambda draft, key, value: (
        set_prompt_column(draft, key, value) if value != "prompt" else draft.skip(key, "it is the prompt's name")
    ),
    ("scale_rewards",): _scaled,
    ("use_vllm", "vllm_mode"): _vllm,
    ("load_best_model_at_end",): lambda draft, key, value: (
        draft.set(key, "method.output", "best") if value else draft.skip(key, "the last step is the default")
    ),
    ("metric_for_best_model",): _only("eval_loss", "it is what validation measures", "set method.best.metric by hand"),
    ("greater_is_better",): _note("method.best.mode follows from the metric"),
    ("plugins",): _plugins,
    ("bnb_config_kwargs", "tokenizer_kwargs"): _inside,
    ("dataset_kwargs",): _note("formats of rows are recognised, and packed by packing"),
    ("freeze_layers",): _frozen,
    ("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules"): lambda draft, key, value: (
        draft.refuse(key, value, "freeze.except_last_layers=N trains the last norm and the head too: set it by hand")
    ),
    ("unfrozen_parameters", "trainable_parameters"): lambda draft, key, value: draft.refuse(
        key, value, "it names what is trained; freeze.modules names what is frozen: set it by hand"
    ),
    ("pissa_init",): lambda draft, key, value: (
        draft.set(key, "method.adapter.init", "pissa") if value else draft.skip(key, "PEFT's own is the default")
    ),
    ("recompute_granularity",): _checkpointed,
    ("fsdp_transformer_layer_cls_to_wrap",): _wrapped,
    ("lora_exclude_modules",): lambda draft, key, value: (
        draft.set(key, "method.adapter.exclude_modules", ",".join(str(each).replace(".*", "*") for each in value))
        if isinstance(value, list) and value
        else draft.skip(key, "it names none")
    ),
    ("oft_target",): _joined("method.adapter.target_modules"),
    ("oft_block_size",): _to("method.adapter.block_size"),
    ("eta_min",): _to("method.schedule.min_learning_rate"),
    ("vllm_gpu_memory_utilization",): _to("resources.vllm_gpu_memory_utilization"),
    ("tokenizer_pad_token", "pad_token"): _note(NO_PAD),
    ("tokens",): lambda draft, key, value: (
        set_special_tokens(draft, key, value) if isinstance(value, dict) else draft.set(key, "base.added_tokens", value)
    ),
    ("resize_token_embeddings_to_32x",): _note("a model has a row for each token that rows have"),
    ("model_kwargs",): _to("base.model_kwargs"),
    ("fp8",): lambda draft, key, value: (
        draft.set(key, "method.precision", "fp8") if value else draft.skip(key, "off is the default")
    ),
    ("image_max_pixels", "image_min_pixels"): lambda draft, key, value: draft.set(
        key, f"method.images.{key.removeprefix('image_')}", value
    ),
    ("freeze_vision_tower",): _frozen_part("vision"),
    ("freeze_multi_modal_projector",): _frozen_part("projector"),
    ("freeze_mm_modules",): _frozen_part("projector", "vision"),
    ("freeze_language_model",): lambda draft, key, value: (
        draft.set(key, "method.images.language", "frozen") if value else draft.skip(key, "it is trained")
    ),
    ("video_max_pixels", "video_min_pixels", "video_fps", "video_maxlen"): _note("rows have no videos"),
    ("eot_tokens",): _note("the tokens that end a turn of the template are found and trained"),
    ("num_labels",): _only(1, "a reward model has one label", "a reward model has one label"),
    ("average_tokens_across_devices",): _only(True, "it is how a step is averaged", "a step averages over all tokens"),
    ("cosine_constant_lr_ratio",): _only(0, "off is the default", "the schedule constant after a share: by hand"),
    tuple(f"{name}_parallel_size" for name in ("tensor", "context", "expert")): _only(
        1, "one is the default", "docs/sharding.md says how a model is divided here"
    ),
    ("dp_shard_size", "dp_replicate_size"): _only(1, _ALONE, "docs/sharding.md says how a model is divided here"),
    ("galore_target", "apollo_target"): _only("all", "it is all that they project", "all layers are projected here"),
    ("gptq", "lora_fan_in_fan_out"): _only(False, "off is the default", "the files of a base say that: set it by hand"),
    ("use_liger_kernel", "enable_liger_kernel"): _note(_LIGER),
    ("dataset_num_proc", "preprocessing_num_workers", "dataset_processes"): _note("all CPUs of the stage read rows"),
    ("strict", "model_type", "tokenizer_type", "is_mistral_derived_model", "is_llama_derived_model"): _note(
        "transformers finds the classes by config.json"
    ),
    ("pref_ftx", "rpo_alpha", "sft_alpha"): lambda draft, key, value: (
        draft.set(key, "method.sft_weight", value) if value else draft.skip(key, "0 is the default")
    ),
}
RULES = {name: rule for names, rule in _RULES.items() for name in names}


def convert(peer: str, values: Mapping[str, object], workers: int, training: str | None, folder: Path) -> Draft:
    """The draft of a peer's settings.

    Args:
        values: its file, as it is nested.
        workers: GPUs that the peer's run has, by which a step's rows are multiplied.
        training: a key of ``STAGES``; None: as the file says.
        folder: of the file, from which LLaMA-Factory's ``dataset_dir`` may be.

    Raises:
        ConfigError: the file does not say what is trained.
    """
    flat = dict(_turned_off(*each) for each in (flat_oumi(values) if peer == "oumi" else values).items())
    if flat.get("do_predict") and not flat.get("do_train"):
        raise ConfigError("do_predict without do_train: the file trains nothing; import the file of a training")
    if isinstance(named := flat.get("deepspeed"), str):
        files = [place for place in (Path(named), folder / named) if place.is_file()]
        flat["deepspeed"] = read_values(peer, files[0]) if files else named
    stage = training_of(peer, flat, training)
    draft = Draft(peer=peer, stage=stage, workers=workers)
    READERS[peer](draft, flat, folder)
    assumed = {**DEFAULTS[peer], **(TRL_DEFAULTS.get(stage, {}) if peer == "trl" else {})}
    for names in _INSTEAD:
        if any(flat.get(name) is not None for name in names):
            assumed = {key: value for key, value in assumed.items() if key not in names}
    if peer == "trl" and stage not in _SAMPLES:
        assumed.setdefault("max_length", 1024)
    for key, value in {**assumed, **{key: each for key, each in flat.items() if each is not None}}.items():
        _one(draft, key, value)
    draft.assumed = {key for key in assumed if flat.get(key) is None}
    theirs = {ours: key for key, ours in draft.places().items() if key in draft.assumed}
    for key, ours in draft.places().items():
        is_other = key in flat and key not in draft.assumed and "=" not in FIELDS.get(key, "")
        if ours in theirs and is_other:
            draft.refuse(key, number(flat[key]), f"{_TITLES[peer]} name of it is {theirs[ours]}")
    for key in (key for key, value in flat.items() if value is None):
        draft.skip(key, "it has no value")
    _finish(draft)
    return draft


def _turned_off(key: str, value: object) -> tuple[str, object]:
    """``--no_bf16``, by which arguments of Hugging Face turn a key off, as that key."""
    is_known = key.startswith("no_") and value is True and key[3:] in {*RULES, *FIELDS}
    return (key[3:], False) if is_known else (key, value)


def _one(draft: Draft, key: str, value: object) -> None:
    """One key: by its rule, by the table of names, or refused."""
    value = number(value)
    if key in RULES:
        RULES[key](draft, key, value)
        return
    ours = FIELDS.get(key, "")
    found = _FIELD.fullmatch(ours)
    if key in _OURS:
        draft.set(key, f"method.{key}", value)
    elif ours.startswith("nothing") or key.startswith(_PREFIXES):
        what = "GPUs are --num-workers N" if key[:9] == "launcher." else "the record has what was trained, and where"
        draft.skip(key, ours.removeprefix("nothing: ") or what)
    elif ours.startswith(("store=", "tracking", "restart=")):
        draft.skip(key, f"the command sets it: {ours}")
    elif found and found[3]:
        if value:
            draft.set(key, f"{found[1].rpartition('.')[2]}.{found[2]}", found[3])
        else:
            draft.skip(key, "off is the default")
    elif found:
        part = found[1].rpartition(".")[2]
        part = part if part != "NAME" else "base" if found[2] in OF_BASE else "rows"
        if part == "rows":
            for each in draft.rows:
                each[found[2]] = value
            draft.mapped[key] = f"sources.*.{found[2]}={json.dumps(value)}"
        else:
            draft.set(key, f"{part}.{found[2]}", value)
    else:
        close = get_close_matches(key, [*RULES, *FIELDS], n=1, cutoff=0.8)
        hint = (
            f"here it is {ours}{'' if ours.startswith('not a setting') else ': set it by hand'}"
            if ours
            else f"it is unknown{f'; did you mean {close[0]}?' if close else ''}"
        )
        draft.refuse(key, value, hint)


def _finish(draft: Draft) -> None:
    """What several keys decide together."""
    seen, method = draft.seen, draft.method
    micro, accumulation = (int(str(seen.get(name, 1))) for name in ("micro", "accumulation"))
    method["global_batch_size"] = micro * accumulation * draft.workers
    draft.resources |= {"micro_batch_size": micro, **({"num_workers": draft.workers} if draft.workers > 1 else {})}
    if "num_steps" in method:
        method.pop("num_epochs", None)
    _finish_adapter(draft)
    finish_template(draft)
    finish_factory(draft)
    stage3 = str(draft.resources.get("sharding", "")).startswith("zero3")
    if stage3 and (draft.stage in _SAMPLES or "quantization" in method):  # the plan refuses it there
        offloads = draft.resources["sharding"] == "zero3_offload"
        draft.set("deepspeed", "resources.sharding", "fsdp")
        draft.resources |= {"offload": True} if offloads else {}
    if {"beta1", "beta2"} & seen.keys():
        method.setdefault("optimizer", {})
        part(method, "optimizer")["betas"] = [seen.get("beta1", 0.9), seen.get("beta2", 0.999)]
    finish_rewards(draft)
    if "save_share" in seen:  # of all steps
        draft.resources["save_epochs"] = float(str(seen["save_share"])) * float(str(method.get("num_epochs", 1)))
    if float(str(seen.get("min_share", 0))) >= 1:  # of a rate that does not fall
        schedule = part(method, "schedule")
        schedule["name"] = "constant_with_warmup" if schedule.get("warmup") else "constant"
    elif "min_share" in seen:
        least = float(str(seen["min_share"])) * float(str(method["learning_rate"]))
        part(method, "schedule")["min_learning_rate"] = least
    _finish_validation(draft)
    if draft.stage in _SAMPLES and "max_length" not in method:
        prompt = int(str(method.get("max_prompt_length", 512)))
        method["max_length"] = prompt + int(str(method.get("max_completion_length", 256)))
    _show_values(draft)
    if "path" not in draft.base:
        draft.refuse("model", None, "the file names no model; add one to it")
    if not draft.rows:
        draft.refuse("dataset", None, "the file names no rows; add them to it")


def _show_values(draft: Draft) -> None:
    """Puts what several keys decide, and the rows that are held out, among what is mapped."""
    if "held_out" not in draft.data:
        draft.data["held_out"] = 1
        draft.mapped["held_out"] = "data.held_out=1  (the least here; the file holds no rows out)"
    micro, rows = draft.resources["micro_batch_size"], draft.method["global_batch_size"]
    settings = {"resources.micro_batch_size": micro, "method.global_batch_size": rows}
    draft.mapped |= {key: f"{ours}={settings[ours]}" for key, ours in draft.mapped.items() if ours in settings}


def _finish_adapter(draft: Draft) -> None:
    seen, method = draft.seen, draft.method
    if not seen.get("adapter"):
        method.pop("adapter", None)
        for key in [key for key, ours in draft.mapped.items() if ours.startswith("method.adapter")]:
            draft.mapped.pop(key)
            draft.skip(key, "no adapter is trained")
    elif part(method, "adapter").get("type") == "oft":  # which has blocks, and no rank
        for name in ("rank", "alpha", "dropout"):
            part(method, "adapter").pop(name, None)
        part(method, "adapter").setdefault("block_size", 32)
    elif draft.peer == "llamafactory" and "alpha" not in part(method, "adapter"):
        draft.set("lora_alpha", "method.adapter.alpha", 2 * int(str(part(method, "adapter")["rank"])))
        draft.assumed.add("lora_alpha")
    finish_trained_on(draft)
    if seen.get("adapter") and method.pop("freeze", None):
        draft.mapped.pop("freeze_layers", None)
        draft.skip("freeze_layers", "beside an adapter the whole base is frozen")
    quantization = part(method, "quantization") if "quantization" in method else {}
    if "format" not in quantization:
        method.pop("quantization", None)
        return
    if quantization["format"] == "nf4":
        quantization["format"] = seen.get("format", "nf4")
    if "compute" in seen:
        dtypes = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
        quantization["compute_dtype"] = dtypes.get(str(seen["compute"]), seen["compute"])


def _finish_validation(draft: Draft) -> None:
    seen, method = draft.seen, draft.method
    strategy = str(seen.get("eval_strategy", "steps" if "eval_steps" in seen else "no"))
    steps = seen.get("eval_steps", 500)
    measured: Values = {"every_steps": steps} if strategy == "steps" else {}
    if measured and isinstance(steps, float) and steps < 1:  # a share of all steps
        measured = {"every_epochs": steps * float(str(method.get("num_epochs", 1)))}
    measured |= {"every_epochs": 1.0} if strategy == "epoch" else {}
    if draft.stage in _SAMPLES:
        for key in [key for key, ours in draft.mapped.items() if ours.startswith("method.validation")]:
            draft.mapped.pop(key)
            draft.skip(key, "prompts have no loss; rewards are reported at each step")
        method.pop("validation", None)
    elif measured or "validation" in method:
        found = method.setdefault("validation", {})
        assert isinstance(found, dict)
        if not {"every_steps", "every_epochs"} & found.keys():
            found.update(measured or {"every_epochs": 1.0})


def add_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("peer", choices=PEERS, help="whose configuration it is")
    parser.add_argument("file", type=local_path, metavar="FILE", help="YAML, JSON, or a script with the arguments")
    parser.add_argument("--out", type=local_path, metavar="FILE", help="default: conf/pipeline/NAME.yaml")
    named = f"where the file does not say what is trained: {', '.join(STAGES)}"
    parser.add_argument("--training", choices=STAGES, metavar="NAME", help=named)
    parser.add_argument(
        "--num-workers", type=int, default=1, metavar="N", help="GPUs of the peer's run, which multiply its batch"
    )
    parser.add_argument(
        "--leave-out", action="append", default=[], metavar="KEY", help="a refused key that may be lost; repeat it"
    )


def _require_own(peer: str, file: Path, values: Values) -> None:
    """Requires that a file is a configuration of the peer that is named."""
    if {"pipeline", "stages"} & values.keys():
        raise ConfigError(f"{file}: is no configuration of {peer}, but of posttrain: posttrain plan {file}")
    inside = {f"{key}.{each}" for key, node in values.items() if isinstance(node, dict) for each in node}
    other, theirs = other_peer({*values, *inside}, peer)
    if other and SAYS[peer] not in values:
        command = f"posttrain import {other} {shlex.quote(str(file))}"
        raise ConfigError(f"{file}: is a configuration of {other}, with {', '.join(theirs)}: {command}")


def _place(options: argparse.Namespace) -> tuple[Path, str]:
    """The file that is written, and what to say where its name is not that of the peer's file."""
    name = slug((options.out or options.file).stem)
    other = f"{options.peer}-{name}.yaml"
    if options.out and is_shipped(name):
        other = str(options.out.with_name(other))
        raise ConfigError(f"{options.out}: posttrain ships a pipeline {name} too; give another name: --out {other}")
    folder = Path("conf") / "pipeline"
    if is_shipped(name):
        return folder / other, f"  (posttrain ships a pipeline {name} too)"
    return options.out or folder / f"{name}.yaml", ""


def run_import(options: argparse.Namespace) -> int:
    file = options.file
    values = read_values(options.peer, file)
    _require_own(options.peer, file, values)
    left_out = [key for key in options.leave_out if values.pop(key, None) is not None]
    overrides = without_project(options.overrides)
    fields = [each for each in overrides if "." in each.partition("=")[0]]
    draft = convert(options.peer, values, options.num_workers, options.training, file.parent)
    refused = {key: why for key, why in draft.refused.items() if key not in options.leave_out}
    if refused:
        lines = "".join(f"\n  {why}" for why in refused.values())
        raise ConfigError(
            f"{file}: {len(refused)} keys have no place here:{lines}\n  change them in the file, or accept that "
            f"they are lost: {' '.join(f'--leave-out {key}' for key in refused)}"
        )
    out, renamed = _place(options)
    name = slug(out.stem)
    lost = [f"not carried over: {', '.join(sorted({*left_out, *draft.refused}))}"] if left_out or draft.refused else []
    differs = [f"{key}: {how}" for key, how in draft.differs.items()]
    text = pipeline_of(draft, name, [f"Imported from {file.name} of {options.peer}.", *lost, *differs], fields)
    for key, what in draft.mapped.items():
        ours = f"stages.{draft.stage}.{what.partition('=')[0]}"
        if mine := next((each for each in reversed(fields) if each.partition("=")[0] == ours), None):
            draft.mapped[key] = f"{mine.removeprefix(f'stages.{draft.stage}.')}  (as overridden here)"
    more, to_mend, of_hub = _require_loads(text, name, file, [each for each in overrides if each not in fields])
    code = ConfigError.exit_code if to_mend else 0  # as of the plan
    out.parent.mkdir(parents=True, exist_ok=True)
    write_output(out, text, keeps=True)
    if options.json:
        shown = {
            "pipeline": name, "file": str(out), "add": more, "mapped": draft.mapped, "not_needed": draft.not_needed,
            "left_out": left_out, "assumed": sorted(draft.assumed & draft.mapped.keys()), "to_mend": to_mend,
            "differs": draft.differs, "unchecked": of_hub,
        }  # fmt: skip
        print(json.dumps(shown, indent=2))
        return code
    for title, found in (("mapped", draft.mapped), ("left out, for this reason", draft.not_needed)):
        print(f"{title}:")
        width = max(map(len, found), default=0)
        for key, what in found.items():
            origin = f"  ({_TITLES[options.peer]} default)" if key in draft.assumed else ""
            print(on_screen(f"  {key:<{width}}  {what}{origin}"))
    print(f"wrote {relative(out)}{renamed}")
    unread = [f"of the hub, which the plan reads and import does not: {', '.join(of_hub)}"] if of_hub else []
    for each in (*(f"differs: {each}" for each in differs), *unread, *(f"mend before a plan: {e}" for e in to_mend)):
        print(on_screen(each))
    is_placed = out.absolute().parent.name == "pipeline"
    moved = "" if is_placed else f"mkdir -p conf/pipeline && mv {shlex.quote(str(out))} conf/pipeline/ && "
    placed = str(out) if is_placed else f"conf/pipeline/{out.name}"
    first = f"mend the rows or {relative(out)}, which is written, then " if to_mend else ""
    print(" ".join([f"next: {first}{moved}posttrain plan {shlex.quote(placed)}", *more]))
    return code


def _require_loads(text: str, name: str, file: Path, groups: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Requires that the pipeline is one of ours; returns the overrides with which it is, a GPU's where it needs one or
    sets a precision, what the plan refuses, and what is of the hub."""
    from flows.declare.config import load_pipeline

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "pipeline" / f"{name}.yaml"
        place.parent.mkdir()
        place.write_text(text, encoding="utf-8")
        tried = (["resources=gpu"], []) if "\n      precision: " in text else ([], ["resources=gpu"])
        for more in [[*each, *groups] for each in tried]:
            try:
                pipeline = load_pipeline([f"pipeline={name}", *more], Path(folder))
            except ConfigError as error:
                cause = error
            else:
                return more, mends(pipeline), hub_sources(pipeline)
    raise ConfigError(
        f"{file}: as a pipeline: {cause}\n  give the override to this command too, or leave a key of the file out: "
        "--leave-out KEY"
    ) from cause
