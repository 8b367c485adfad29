"""Names of settings in TRL, LLaMA-Factory, axolotl, ms-swift and others -> ours, for the message that refuses them.

Checked against LLaMA-Factory ff6d4d12, axolotl 067b021c and ms-swift 3602360a; a test checks those of Hugging Face.
"""

import contextlib
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import get_args

from flows.declare.pipeline import Root, listed
from flows.declare.project import Node, data_sources, node_of
from lineage.artifact import Source
from lineage.code import target_class
from lineage.errors import ConfigError
from lineage.fingerprint import field_names
from tasks.context import Resources
from tasks.method import Method, Training

_M, _R, _S = "stages.STAGE.method", "stages.STAGE.resources", "sources.NAME"
OF_BASE = (  # fields of a source that are of a model alone
    "revision", "model_kwargs", "tokenizer", "pad_token", "eos_token", "bos_token", "add_bos", "added_tokens",
    "special_tokens", "chat_template",
)  # fmt: skip
HUGGING_FACE: set[str] = set()  # the names that are attributed to transformers, TRL and PEFT


def _each(ours: str, hf: str = "", peers: str = "", others: str = "") -> dict[str, str]:
    """Name -> ours.

    Args:
        hf, peers, others: names in Hugging Face's configs; in LLaMA-Factory, axolotl and ms-swift; elsewhere (Unsloth,
            torchtune, NeMo, Megatron, DeepSpeed, verl, OpenRLHF, Lightning, OpenAI, functions and scripts of these).
    """
    HUGGING_FACE.update(hf.split())
    return dict.fromkeys(f"{hf} {peers} {others}".split(), ours)


FIELDS: Mapping[str, str] = {
    **_each(f"{_M}.num_epochs", "num_train_epochs", "max_epochs", "epochs n_epochs"),
    **_each(f"{_M}.num_steps", "max_steps", "train_iters", "total_training_steps"),
    **_each(f"{_M}.num_steps (episodes / global_batch_size)", "", "", "total_episodes"),
    **_each(f"{_M}.learning_rate", "", "lr"),
    **_each(
        f"{_M}.global_batch_size (rows of a step, all workers) and {_R}.micro_batch_size (rows of a forward)",
        "per_device_train_batch_size", "batch_size", "train_batch_size train_micro_batch_size_per_gpu",
    ),
    **_each(f"{_R}.micro_batch_size", "per_device_eval_batch_size",
            "micro_batch_size eval_batch_size"),
    **_each(f"{_R}.micro_batch_size=auto, which finds the rows that fit", "auto_find_batch_size"),
    **_each(
        f"{_M}.global_batch_size: a generation has so many completions, and {_M}.num_iterations steps",
        "generation_batch_size steps_per_generation",
    ),
    **_each(
        f"{_M}.global_batch_size: the micro batches of a step follow from it, micro_batch_size and num_workers",
        "gradient_accumulation_steps", "", "accumulate_grad_batches",
    ),
    **_each(f"{_M}.validation.every_steps", "eval_steps", "evals_per_epoch", "eval_interval"),
    **_each(f"{_M}.evaluation, which scores the start too", "eval_on_start"),
    **_each(f"{_M}.validation.every_steps or .every_epochs", "eval_strategy do_eval", "evaluation_strategy"),
    **_each(f"{_M}.validation.patience", "", "early_stopping_patience early_stopping_steps early_stop_interval"),
    **_each("sweep.objectives.NAME={metric: STAGE/METRIC, direction: maximize}", "", "", "optimize objective"),
    **_each(f"{_M}.validation.max_rows", "", "eval_limit", "max_eval_samples"),
    **_each(
        "held_out of the stage that prepares the rows",
        "", "val_size val_set_size split_dataset_ratio", "test_size",
    ),
    **_each(f"{_M}.best and {_M}.output=best", "load_best_model_at_end metric_for_best_model greater_is_better"),
    **_each(
        f"{_M}.max_length", "", "cutoff_len sequence_len model_max_length sequence_length",
        "max_seq_length max_seq_len seq_length seq_len context_length",
    ),
    **_each(f"{_M}.too_long", "truncation_mode", "truncation_strategy excess_length_strategy"),
    **_each(f"{_M}.max_completion_length", "max_new_tokens", "response_length", "max_response_length"),
    **_each(f"{_M}.schedule.name", "lr_scheduler_type", "lr_scheduler lr_decay_style", "scheduler"),
    **_each(f"the fields of {_M}.schedule", "lr_scheduler_kwargs"),
    **_each(
        f"{_M}.schedule.warmup (a share of the steps, or steps from 1)", "warmup_steps",
        "lr_warmup_iters lr_warmup_fraction", "num_warmup_steps",
    ),
    **_each(
        f"{_M}.schedule.min_learning_rate (a rate, not a ratio)",
        "", "min_lr cosine_min_lr_ratio", "lr_end min_lr_rate",
    ),
    **_each(f"{_M}.optimizer.name", "optim"),
    **_each(f"{_M}.optimizer.name=muon", "", "use_muon"),
    **_each(f"{_M}.optimizer.name=galore_adamw", "", "use_galore"),
    **_each(f"{_M}.optimizer.name=apollo_adamw", "", "use_apollo"),
    **_each(f"{_M}.optimizer.rank", "", "galore_rank apollo_rank"),
    **_each(f"{_M}.optimizer.scale", "", "galore_scale apollo_scale"),
    **_each(
        f"{_M}.optimizer.update_proj_gap",
        "", "galore_update_interval apollo_update_interval galore_update_proj_gap",
    ),
    **_each(f"{_M}.optimizer.betas=[0.9,0.999]", "adam_beta1 adam_beta2", "", "adam_betas"),
    **_each(f"{_M}.optimizer.eps", "adam_epsilon", "adam_eps"),
    **_each(f"{_M}.optimizer.momentum", "", "sgd_momentum muon_momentum"),
    **_each(f"the fields of {_M}.optimizer", "optim_args"),
    **_each(f"{_M}.max_grad_norm", "", "clip_grad", "gradient_clipping grad_clip"),
    **_each(f"{_M}.optimizer.lora_plus_ratio", "", "loraplus_lr_ratio lorap_lr_ratio"),
    **_each(f"{_M}.adapter.rank", "lora_r r", "lora_rank"),
    **_each(f"{_M}.adapter.alpha", "lora_alpha"),
    **_each(f"{_M}.adapter.dropout", "lora_dropout"),
    **_each(f"{_M}.adapter.bias", "", "lora_bias"),
    **_each(f"{_M}.adapter.target_modules", "lora_target_modules", "lora_target lora_target_linear"),
    **_each(f"{_M}.adapter.modules_to_save", "lora_modules_to_save", "additional_target"),
    **_each(f"{_M}.adapter.rslora", "use_rslora", "peft_use_rslora"),
    **_each(
        f"not a setting: all layers have {_M}.adapter.rank and .alpha",
        "rank_pattern alpha_pattern layers_pattern layer_replication",
    ),
    **_each("nothing: it follows from the method and the model", "task_type fan_in_fan_out inference_mode"),
    **_each("not a setting: experts get an adapter where all layers do", "target_parameters"),
    **_each(f"{_M}.adapter.trainable_token_indices, of a head and embedding in one", "ensure_weight_tying"),
    **_each("model=DIRECTORY of the base", "base_model_name_or_path"),
    **_each(f"{_M}.adapter.type=dora", "use_dora", "peft_use_dora"),
    **_each(f"{_M}.adapter.type, or adapter=lora for all", "use_peft peft_type",
            "finetuning_type tuner_type", "train_type"),
    **_each(f"{_M}.adapter.init", "init_lora_weights", "init_weights peft_init_lora_weights pissa_init",
            "lora_A_init_method lora_a_init_method column_init_method"),
    **_each(f"{_M}.adapter.layers", "layers_to_transform", "peft_layers_to_transform"),
    **_each(f"{_M}.adapter.dropout_position", "", "", "dropout_position lora_dropout_position"),
    **_each(f"{_M}.quantization.format=nf4, or adapter=qlora", "load_in_4bit", "quantization_bit quant_bits"),
    **_each(f"{_M}.quantization.format=int8", "load_in_8bit"),
    **_each(f"{_M}.quantization.format", "bnb_4bit_quant_type", "quantization_type quant_method quantization_method"),
    **_each(f"{_M}.quantization.double", "use_bnb_nested_quant bnb_4bit_use_double_quant", "double_quantization"),
    **_each(f"{_M}.quantization.compute_dtype", "bnb_4bit_compute_dtype"),
    **_each(f"{_M}.quantization.storage_dtype", "bnb_4bit_quant_storage"),
    **_each(
        f"{_M}.precision=bf16",
        "bf16 fp16 tf32 dtype", "torch_dtype pure_bf16 bfloat16 float16", "mixed_precision",
    ),
    **_each(f"{_M}.freeze", "", "freeze_trainable_layers unfrozen_parameters freeze_parameters trainable_parameters"),
    **_each(
        f"not a setting: methods with a reference or a reward train without dropout, but for {_M}.adapter.dropout",
        "disable_dropout",
    ),
    **_each(f"{_M}.neftune_alpha", "neftune_noise_alpha", "noisy_embedding_alpha"),
    **_each(f"{_M}.packing", "packing_strategy padding_free",
            "sample_packing neat_packing pad_to_sequence_len"),
    **_each(f"{_M}.chat_template, or {_S}.chat_template", "chat_template_path", "template chat_template_jinja"),
    **_each(f"{_M}.thinking, for enable_thinking", "chat_template_kwargs"),
    **_each(f"{_M}.thinking", "", "enable_thinking split_thinking"),
    **_each("system_prompt of the stage that prepares the rows", "", "default_system default_system_message system"),
    **_each(f"{_M}.beta", "", "pref_beta rl_beta dpo_beta kl_coef orpo_alpha", "init_kl_coef"),
    **_each(
        f"{_M}.loss_type of DPO; another method is another stage (conf/stage/)",
        "", "pref_loss rl rlhf_type dpo_loss_type",
    ),
    **_each(f"{_M}.losses={{sigmoid: 0.8, sft: 0.2}}", "loss_weights", "dpo_loss_weights"),
    **_each(f"{_M}.sft_weight", "", "pref_ftx rpo_alpha sft_alpha"),
    **_each(f"{_M}.label_smoothing", "", "dpo_label_smoothing"),
    **_each(f"{_M}.f_divergence", "f_divergence_type"),
    **_each(f"{_M}.f_alpha", "f_alpha_divergence_coef"),
    **_each(f"{_M}.weighting", "use_weighting", "dpo_use_weighting"),
    **_each(f"{_M}.reference_sync", "sync_ref_model"),
    **_each(f"{_M}.reference_sync.mixup_alpha", "ref_model_mixup_alpha"),
    **_each(f"{_M}.reference_sync.every_steps", "ref_model_sync_steps"),
    **_each(f"{_R}.precompute_reference", "precompute_ref_log_probs"),
    **_each(f"{_M}.gamma", "", "simpo_gamma", "gamma_beta_ratio"),
    **_each(f"{_M}.desirable_weight", "", "kto_desirable_weight kto_chosen_weight"),
    **_each(f"{_M}.undesirable_weight", "", "kto_undesirable_weight kto_rejected_weight"),
    **_each(f"{_M}.rewards={{NAME: {{}}}}", "reward_funcs"),
    **_each(f"{_M}.rewards.NAME.weight", "reward_weights"),
    **_each("stages.STAGE.inputs.reward_model", "", "reward_model"),
    **{
        key: f"{_M}.sampling.{key}"
        for key in _each("", "temperature top_p top_k min_p repetition_penalty")
    },
    **_each(f"{_M}.num_generations", "", "", "n_samples_per_prompt"),
    **_each(f"{_M}.gae_lambda", "", "", "lam"),
    **_each(f"{_M}.clip_range", "", "", "cliprange clip_ratio eps_clip"),
    **_each(f"{_M}.value_clip_range", "", "", "cliprange_value value_clip"),
    **_each(f"{_M}.value_coef", "", "", "vf_coef"),
    **_each(f"{_M}.num_minibatches", "", "", "num_mini_batches"),
    **_each(f"{_M}.num_iterations", "", "ppo_epochs"),
    **_each(f"{_M}.loss=gspo, which has one ratio per completion", "importance_sampling_level"),
    **_each(f"{_M}.kl_ratio", "use_bias_correction_kl"),
    **_each(f"the fields of {_M}.sampling", "generation_kwargs"),
    **_each(
        f"not a setting: {_M}.loss=sapo or vespo has the values of its paper",
        "sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_k_neg vespo_lambda_pos vespo_lambda_neg",
    ),
    **_each(
        "not a setting: all tokens of a completion get loss, with no bonus for entropy and no second bound",
        "top_entropy_quantile entropy_coef entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target "
        "use_adaptive_entropy delta off_policy_mask_threshold",
    ),
    **_each(f"{_M}.rewards.NAME.weight: rewards are added before they are scaled", "multi_objective_aggregation"),
    **_each(
        f"not a setting: TRL's correction is on, and {_R}.max_logp_difference is how far the sampler may be off",
        "vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max "
        "vllm_importance_sampling_clip_min",
    ),
    **_each(
        "not a setting: vllm=server reads TRL's default address, port 8000",
        "vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port",
    ),
    **_each("nothing: vLLM reads max_length tokens", "vllm_max_model_length"),
    **_each("nothing: the stage evaluate measures held-out prompts", "num_generations_eval"),
    **_each(
        "not a setting: a worker's engine has its own GPU, and completions follow no grammar",
        "vllm_tensor_parallel_size vllm_structured_outputs_regex",
    ),
    **_each(f"not a setting; {_M}.precision=fp32 computes all in fp32", "cast_lm_head_to_fp32"),
    **_each("not a setting: rewards are not centered", "center_rewards_coefficient"),
    **_each(f"a value of {_M}.adapter.init: pissa, olora, eva, lora_ga ...",
            "loftq_config eva_config corda_config lora_ga_config"),
    **_each("not a setting: completions have one turn, without calls of tools", "max_tool_calling_iterations"),
    **_each(f"{_M}.vllm", "use_vllm vllm_mode"),
    **_each(f"{_R}.vllm_gpu_memory_utilization", "", "vllm_gpu_util gpu_memory_utilization"),
    **_each(f"{_R}.vllm_enforce_eager", "", "enforce_eager"),
    **_each(f"{_M}.mask_truncated", "mask_truncated_completions", "overlong_filter"),
    **_each(
        "nothing: samples.parquet of the output holds the completions",
        "log_completions num_completions_to_print log_multimodal log_unique_prompts log_completions_hub_repo",
    ),
    **_each(f"{_R}.save_steps, .save_epochs or .save_minutes", "save_strategy", "saves_per_epoch"),
    **_each(f"{_R}.keep_last", "save_total_limit"),
    **_each(
        f"{_R}.gradient_checkpointing",
        "gradient_checkpointing_kwargs activation_checkpointing",
        "recompute_granularity disable_gradient_checkpointing", "use_gradient_checkpointing",
    ),
    **_each(f"{_R}.attention", "attn_implementation",
            "flash_attn flash_attention attn_impl sdp_attention eager_attention flex_attention xformers_attention"),
    **_each(f"{_R}.compile", "torch_compile"),
    **_each(f"{_R}.liger", "use_liger_kernel", "enable_liger_kernel", "use_liger"),
    **_each(f"{_R}.dataloader_workers", "dataloader_num_workers"),
    **_each(f"{_R}.prefetch_factor", "dataloader_prefetch_factor"),
    **_each("resources.cpus_per_worker of the stage that prepares the rows", "dataset_num_proc",
            "preprocessing_num_workers dataset_processes", "num_proc"),
    **_each(f"{_R}.sharding", "deepspeed fsdp fsdp_config"),
    **_each(f"{_R}.sharding and {_R}.num_workers", "parallelism_config"),
    **_each(f"{_R}.gpus_per_worker=0", "use_cpu"),
    **_each(f"{_R}.empty_cache_steps", "torch_empty_cache_steps"),
    **_each(f"{_R}.num_workers and {_R}.gpus_per_worker", "", "world_size n_gpu",
            "nproc_per_node num_gpus n_gpus_per_node gpus"),
    **_each(f"{_R}.num_nodes", "", "n_node", "nnodes"),
    **_each(f"{_R}.deterministic", "full_determinism", "use_deterministic"),
    **_each(f"{_M}.seed", "data_seed", "", "random_state"),
    **_each("model=DIRECTORY or model=owner/name", "model_name_or_path", "model_name base_model"),
    **_each("model=DIRECTORY of the adapter", "", "adapter_name_or_path lora_model_dir adapters"),
    **_each(f"{_S}.revision", "model_revision", "revision_of_model"),
    **_each(f"{_S}.model_kwargs", "model_init_kwargs", "overrides_of_model_kwargs"),
    **_each(f"{_S}.model_kwargs={{rope_scaling: {{rope_type: linear, factor: 2.0}}}}", "", "rope_scaling"),
    **_each(f"{_S}.model_kwargs={{router_aux_loss_coef: 0.001}}", "router_aux_loss_coef", "moe_aux_loss_coef"),
    **_each(f"{_S}.trust_remote_code of a pinned revision", "trust_remote_code"),
    **_each(f"{_S}.tokenizer", "", "tokenizer_config", "tokenizer_name tokenizer_name_or_path"),
    **_each(f"{_S}.added_tokens", "", "add_tokens tokens"),
    **_each(f"{_S}.special_tokens", "", "special_tokens additional_special_tokens add_special_tokens "
            "new_special_tokens", "extra_special_tokens"),
    **_each(f"{_S}.added_tokens or .special_tokens, which give new tokens rows of the embedding", "",
            "resize_vocab resize_token_embeddings_to_32x", "resize_token_embeddings"),
    **_each(f"{_S}.pad_token", "pad_token"),
    **_each(f"{_S}.eos_token", "eos_token"),
    **_each(f"{_S}.bos_token", "", "bos_token"),
    **_each(f"{_S}.add_bos", "", "", "add_bos_token"),
    **_each(f"{_M}.control_tokens", "", "split_special_tokens"),
    **_each(
        "nothing: tokens are those of tokenizer.json, which the library tokenizers reads; without that file, those of "
        "its class", "", "use_fast_tokenizer tokenizer_use_fast tokenizer_use_mistral_common tokenizer_legacy",
        "use_fast",
    ),
    **_each(
        f"{_S}.tokenizer=DIRECTORY with changed files: tokens are those of tokenizer.json, which travels with a model",
        "", "unk_token", "add_eos_token add_prefix_space tokenizer_kwargs",
    ),
    **_each(f"{_M}.too_long", "", "", "truncation_side"),
    **_each(
        "nothing: rows are not padded, or are masked where they are, and prompts of generation are padded on the left",
        "pad_to_multiple_of length_column_name", "padding_side group_by_length",
    ),
    **_each(f"{_S}.path", "dataset_name", "dataset datasets dataset_dir data_files", "train_file data_path"),
    **_each(f"{_S}.columns={{text: COLUMN}}", "dataset_text_field"),
    **_each(f"{_S}.subset", "dataset_config", "", "dataset_config_name"),
    **_each(f"{_S}.split", "dataset_train_split", "", "train_split"),
    **_each(f"{_S}.sample_count", "", "max_samples", "max_train_samples"),
    **_each("store=DIRECTORY", "output_dir", "save_dir"),
    **_each(
        "posttrain export hub REF --repo OWNER/NAME, after the run",
        "push_to_hub hub_model_id hub_private_repo hub_strategy hub_token hub_revision hub_always_push",
        "export_hub_model_id",
    ),
    **_each("stages.STAGE.inputs.policy, which is the reference too", "", "ref_model"),
    **_each("nothing: the order of rows follows from the seed", "shuffle_dataset train_sampling_strategy"),
    **_each("nothing: every step has global_batch_size rows", "dataloader_drop_last"),
    **_each("not a setting: the loss of a step is that of the tokens of all workers", "average_tokens_across_devices"),
    **_each("not a setting: labels are smoothed by DPO's label_smoothing alone", "label_smoothing_factor"),
    **_each("not a setting: the stage that prepares the rows has their settings", "dataset_kwargs"),
    **_each(f"{_R}.liger, without choice of its layers", "liger_kernel_config"),
    **_each(f"{_R}.gradient_checkpointing, which has no arguments", "activation_checkpointing_kwargs"),
    **_each("nothing: completions end where the chat template ends a turn", "", "", "stop_token"),
    **_each("tracking=wandb, tensorboard ...", "report_to trackio_space_id trackio_bucket_id",
            "use_wandb use_mlflow wandb_project logging_dir"),
    **_each("tracking.experiment", "project", "mlflow_experiment_name", "experiment_name"),
    **_each("tracking.run_name", "run_name", "mlflow_run_name wandb_name wandb_exp_name"),
    **_each("tracking.uri", "", "mlflow_tracking_uri"),
    **_each("nothing: the same command resumes",
            "resume_from_checkpoint ignore_data_skip restore_callback_states_from_checkpoint",
            "auto_resume_from_checkpoints"),
    **_each("restart=[STAGE]", "", "overwrite_output_dir"),
    **_each("nothing: every step is recorded", "logging_steps logging_strategy", "log_interval"),
    **_each("nothing: the columns of the rows' kind are read", "remove_unused_columns"),
    **_each(
        "nothing: the answers alone get loss (docs/data.md)", "assistant_only_loss completion_only_loss",
        "train_on_inputs train_on_prompt roles_to_train", "mask_prompt",
    ),
    **_each(
        "nothing: what is prepared is kept by what it is made from", "", "overwrite_cache shuffle_merged_datasets "
        "dataset_shard_num dataset_shard_idx tokenized_path",
    ),
    **_each("nothing: posttrain diagnose REF --html FILE draws the curves", "", "plot_loss"),
    **_each(
        "nothing: an output is a whole model, and checkpoints hold all that resumes", "save_only_model",
        "save_safetensors", "save_final_model load_pretrained_weights try_resume_from_last_checkpoint",
    ),
    **_each(
        "nothing: the record has speeds, counts and messages",
        "include_num_input_tokens_seen log_level logging_first_step logging_nan_inf_filter", "loss_watchdog_threshold "
        "loss_watchdog_patience include_tokens_per_second include_effective_tokens_per_second debug",
        "include_performance_metrics include_alternative_mfu_metrics log_model_summary dep_log_level telemetry "
        "profiler",
    ),
    **_each(
        "nothing: held-out rows are measured in a training, and models by the stage evaluate",
        "do_train do_predict eval_delay bf16_full_eval fp16_full_eval eval_accumulation_steps prediction_loss_only "
        "eval_do_concat_batches eval_use_gather_object batch_eval_metrics include_for_metrics label_names",
        "eval_max_new_tokens eval_table_size eval_table_max_new_tokens do_causal_lm_eval eval_causal_lm_metrics "
        "do_bench_eval bench_dataset bench_split lm_eval_tasks lm_eval_batch_size lm_eval_post_train lm_eval_model "
        "eval_on_each_dataset compute_accuracy eval_sequence_len",
    ),
    **_each(
        "nothing: a training of rows generates no text", "",
        "do_sample num_beams eval_num_beams length_penalty skip_special_tokens infer_backend infer_dtype use_kv_cache "
        "vllm_maxlen vllm_max_lora_rank vllm_config",
    ),
    **_each(
        "nothing: the record has speeds, memory and messages", "",
        "use_tensorboard use_otel_metrics otel_metrics_host otel_metrics_port print_param_status badam_verbose "
        "enable_torch_profiler profiler_output_dir profiler_wait_steps profiler_warmup_steps profiler_active_steps "
        "profiler_repeat profiler_record_shapes profiler_profile_memory profiler_with_stack profile_modules "
        "profiler_steps profiler_steps_start",
    ),
    **_each(
        "nothing: rows are read once, and kept as they are prepared", "",
        "streaming buffer_size preprocessing_batch_size data_shared_file_system dataset_keep_in_memory cache_dir "
        "num_dataset_shards_to_save push_dataset_to_hub pretrain_multipack_buffer_size",
    ),
    **_each(
        "nothing: packs are filled best fit, and rows of a pack do not see each other", "",
        "sample_packing_group_size sample_packing_bin_size sample_packing_mp_start_method multipack_real_batches "
        "batch_flattening pretrain_multipack_attn",
    ),
    **_each(
        "nothing: it changes no model",
        "dataloader_pin_memory dataloader_persistent_workers ddp_timeout ddp_find_unused_parameters ddp_bucket_cap_mb "
        "ddp_broadcast_buffers ddp_static_graph ddp_backend accelerator_config dataloader_multiprocessing_context "
        "dataloader_in_order disable_tqdm log_on_each_node log_level_replica save_on_each_node skip_memory_metrics "
        "enable_jit_checkpoint use_cache cache_implementation vllm_model_impl vllm_enable_sleep_mode "
        "ds3_gather_for_generation eval_packing precompute_ref_batch_size",
        "low_cpu_mem_usage local_rank lora_mlp_kernel lora_qkv_kernel lora_o_kernel liger_rope liger_rms_norm "
        "liger_glu_activation liger_layer_norm liger_fused_linear_cross_entropy liger_rms_norm_gated "
        "skip_prepare_dataset processor_type use_kernels use_scattermoe use_sonicmoe fused_attn_kernel "
        "gemma4_hybrid_attn_impl experts_implementation llama4_linearized_experts activation_offloading tiled_mlp "
        "flash_attn_cross_entropy flash_attn_fuse_mlp flash_attn_rms_norm flash_attn_fuse_qkv flex_attn_compile_kwargs "
        "cut_cross_entropy device_map experimental_skip_move_to_device streaming_multipack_buffer_size "
        "fp8_backend fp8_enable_fsdp_float8_all_gather shard_for_eval use_unsloth use_unsloth_gc use_v1_kernels "
        "offload_folder ms_hub_token om_hub_token gc_steps gc_collect_steps ddp device use_ray deepcompile "
        "torch_compile_mode torch_compile_backend layer_offloading selective_checkpointing chunked_cross_entropy "
        "chunked_cross_entropy_num_chunks lora_embedding_kernel tiled_mlp_num_shards tiled_mlp_use_original_mlp "
        "flash_optimum liger_swiglu liger_cross_entropy dpo_use_liger_kernel dpo_padding_free moe_grouped_gemm "
        "expert_parallel_backend expert_parallel_num_nvl_bytes expert_parallel_num_rdma_bytes "
        "overlap_param_gather overlap_grad_reduce bias_activation_fusion apply_rope_fusion use_distributed_optimizer "
        "fix_untrained_tokens_device",
        "dataloader_main_process_only nccl_default_timeout_minutes num_processes",
    ),
}  # fmt: skip

# Values of optimizer.name, schedule.name, quantization.format and loss_type: the same thing under another name.
VALUES: Mapping[str, str] = {
    **_each("adamw_torch_fused", "", "", "adam adamw adamw_hf adamw_torch_npu_fused adamw_apex_fused"),
    **_each("paged_adamw_32bit", "", "", "paged_adamw"),
    **_each("adamw_8bit", "", "", "adamw_bnb_8bit adamw8bit"),
    **_each("lion", "", "", "lion_32bit lion_pytorch"),
    **_each("adamw_torch_4bit", "", "", "ao_adamw_4bit"),
    **_each("adamw_torch_8bit", "", "", "ao_adamw_8bit"),
    **_each("rmsprop", "", "", "rmsprop_bnb rmsprop_bnb_32bit"),
    **_each("schedule_free_adamw", "", "", "schedulefree schedule_free"),
    **_each("galore_adamw", "", "", "galore"),
    **_each("apollo_adamw", "", "", "apollo"),
    **_each("came", "", "", "came_pytorch"),
    **_each("warmup_stable_decay", "", "", "wsd WSD"),
    **_each("cosine", "", "", "cosine_annealing cosine_decay"),
    **_each("cosine_with_min_lr", "", "", "cosine_min_lr cosine_warmup_with_min_lr"),
    **_each("cosine_with_restarts", "", "", "cosine_hard_restarts cosine_annealing_with_warm_restarts"),
    **_each("constant_with_warmup", "", "", "constant_warmup"),
    **_each("linear", "", "", "linear_warmup linear_decay"),
    **_each("polynomial", "", "", "poly"),
    **_each("inverse_sqrt", "", "", "rsqrt inv_sqrt inverse-square-root"),
    **_each("reduce_lr_on_plateau", "", "", "plateau"),
    **_each("best_fit", "", "", "True bfd"),
    **_each("bf16", "", "", "bfloat16 bf16-mixed"),
    **_each("fp16", "", "", "float16 half 16-mixed"),
    **_each("fp32", "", "", "float32 float"),
    **_each("nf4", "", "", "bnb 4bit bitsandbytes bnb_4bit bnb_nf4"),
    **_each("fp4", "", "", "bnb_fp4"),
    **_each("int8", "", "", "8bit bnb_8bit llm_int8"),
    **_each("quanto_int8", "", "", "quanto"),
    **_each("robust", "", "", "cdpo"),
    **_each("bco_pair", "", "", "bco"),
}


_PIPELINES: Mapping[str, str] = {  # that train by a method, as peers call it
    **{name: name for name in ("cpt", "sft", "dpo", "kto", "orpo", "simpo", "grpo", "reward")},
    "pt": "cpt", "rm": "reward", "ppo": "rlhf-ppo",
}  # fmt: skip
Answer = list[str] | str  # overrides, or a text where none is needed


def _of_method(value: object, stages: Node) -> Answer:
    """A method, or a loss of DPO: the pipeline that trains by it, or the field of a stage that is there."""
    name = str(value).lower()
    if name in _PIPELINES:
        here = _PIPELINES[name] in stages
        return f"nothing: the pipeline has the stage {name}" if here else [f"pipeline={_PIPELINES[name]}"]
    loss, alone = VALUES.get(name, name), [] if name == "sigmoid" else ["stages.dpo.method.sft_weight=null"]
    return [*([] if "dpo" in stages else ["pipeline=dpo"]), f"stages.dpo.method.loss_type={loss}", *alone]


def _precision(key: str, value: object) -> Answer:
    if isinstance(value, bool):
        return _off([f"precision={'fp16' if key in ('fp16', 'float16') else 'bf16'}"], value)
    return [f"precision={VALUES.get(str(value), value)}"]


def _adapter(value: object) -> Answer:
    if value in (False, "full"):
        return "nothing: all weights are trained where no adapter is set"
    return [f"adapter={'lora' if value is True else value}"]


def _bits(key: str, value: object) -> Answer:
    eight = value == 8 or key == "load_in_8bit"
    return _off(["adapter=lora", "quantization=int8"] if eight else ["adapter=qlora"], value)


def _sharding(value: object) -> Answer:
    stage = re.search(r"(?:zero|_z|stage\W*)[_-]?([123])", str(value).lower())
    more = f"resources.num_workers=N resources.sharding={f'zero{stage[1]}' if stage else 'fsdp'}"
    return f"nothing where one worker trains; with more: {more}"


def _kwargs(value: object) -> Answer:
    """Arguments of ``from_pretrained``: those that are settings of a stage, and those of the model."""
    found: list[str] = []
    for key, each in node_of(value).items():
        if key in ("dtype", "torch_dtype"):
            found += _precision(key, each)
        elif key == "revision":
            found.append(f"sources.base.revision={each}")
        elif key != "attn_implementation" or each in ("eager", "sdpa"):
            ours = "resources.attention" if key == "attn_implementation" else f"sources.base.model_kwargs.{key}"
            found.append(f"{ours}={value_text(each)}")
    return found or _FASTEST


def _per_epoch(path: str, value: object) -> Answer:
    return [f"{path}={1 / value:g}"] if isinstance(value, int | float) and value else "nothing: none is made"


def _joined(value: object) -> str:
    names = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return "all-linear" if names in ("all", "all-linear") else f'"{names}"' if "," in names else names


_FASTEST = "nothing: resources.attention=auto takes the fastest that is installed"


def _off(overrides: Sequence[str], value: object) -> Answer:
    return [*overrides] if value else "nothing: it is off where it is not set"


# Keys of peers whose value has another form here: key, value and stages -> the answer; None: the form is the same.
_FORMS: Mapping[tuple[str, ...], Callable[[str, object, Node], Answer | None]] = {
    ("packing", "sample_packing", "neat_packing"): lambda key, value, stages: (
        _off([f"{_M}.packing={'best_fit' if value is True else value}"], value)
    ),
    ("padding_free", "pad_to_sequence_len", "group_by_length"): lambda key, value, stages: (
        "nothing: batches have no padding"
    ),
    ("freeze_trainable_layers",): lambda key, value, stages: [f"{_M}.freeze.except_last_layers={value}"],
    ("bf16", "fp16", "pure_bf16", "bfloat16", "float16", "torch_dtype", "dtype", "mixed_precision"): (
        lambda key, value, stages: _precision(key, value)
    ),
    ("use_peft", "finetuning_type", "tuner_type", "train_type"): lambda key, value, stages: _adapter(value),
    ("use_dora",): lambda key, value, stages: _off(["adapter=dora"], value),
    ("load_in_4bit", "load_in_8bit", "quantization_bit", "quant_bits"): lambda key, value, stages: _bits(key, value),
    ("lora_target", "lora_target_modules"): lambda key, value, stages: (
        [f"{_M}.adapter.target_modules={_joined(value)}"]
    ),
    ("optim",): lambda key, value, stages: [f"{_M}.optimizer.name={VALUES.get(str(value), value)}"],
    ("lr_scheduler_type", "lr_scheduler", "lr_decay_style"): lambda key, value, stages: (
        [f"{_M}.schedule.name={VALUES.get(str(value), value)}"]
    ),
    ("adam_beta1",): lambda key, value, stages: [f"{_M}.optimizer.betas=[{value},0.999]"],
    ("adam_beta2",): lambda key, value, stages: [f"{_M}.optimizer.betas=[0.9,{value}]"],
    ("per_device_train_batch_size",): lambda key, value, stages: (
        [f"{_M}.global_batch_size={value}", f"resources.micro_batch_size={value}"]
    ),
    ("evals_per_epoch",): lambda key, value, stages: _per_epoch(f"{_M}.validation.every_epochs", value),
    ("saves_per_epoch",): lambda key, value, stages: _per_epoch("resources.save_epochs", value),
    ("eval_strategy", "evaluation_strategy"): lambda key, value, stages: (
        [f"{_M}.validation.every_epochs=1"] if value == "epoch" else None
    ),
    ("save_strategy",): lambda key, value, stages: ["resources.save_epochs=1"] if value == "epoch" else None,
    ("attn_implementation", "flash_attention", "flash_attn"): lambda key, value, stages: (
        [f"resources.attention={value}"] if value in ("eager", "sdpa") else _FASTEST
    ),
    ("deepspeed",): lambda key, value, stages: _sharding(value),
    ("model_init_kwargs",): lambda key, value, stages: _kwargs(value),
    ("rl", "pref_loss", "rlhf_type", "dpo_loss_type", "trainer"): (
        lambda key, value, stages: _of_method(value, stages)
    ),
    ("revision", "model_revision"): lambda key, value, stages: [f"sources.base.revision={value}"],
    ("reward_funcs",): lambda key, value, stages: None if "grpo" in stages else ["pipeline=grpo"],
}  # fmt: skip
_BY_VALUE = {key: form for keys, form in _FORMS.items() for key in keys}


def value_of(word: object, accepted: str) -> str | None:
    """Our name of a peer's value, where a message that lists what is accepted names it."""
    ours = VALUES.get(str(word))
    return ours if ours and f"'{ours}'" in accepted else None


def problem(cls: type, detail: dict[str, object], where: str, groups: Sequence[str], node: Node) -> str:
    """What is wrong with a value, and how it is written.

    Args:
        cls, where, groups, node: as of ``typed``, whose check found it.
    """
    loc = detail["loc"]
    assert isinstance(loc, tuple)
    path = ".".join(part for part in (where, *map(str, loc)) if part)
    if detail["type"] == "unexpected_keyword_argument":
        accepted = list(dict.fromkeys([*field_names(_class_at(cls, loc[:-1])), *(groups if len(loc) == 1 else ())]))
        key = str(loc[-1])
        stage = ".".join(path.split(".")[:2]) if path.startswith("stages.") else "stages.STAGE"
        peers = FIELDS.get(key, "").replace("stages.STAGE", stage)
        of_stages = " or ".join(_placed(node, key)) if cls is Root and len(loc) == 1 else ""
        if cls is Root and key in node_of(node.get("stages")):
            of_stages = f"stages.{key}"
        place = "" if key in accepted else of_stages or peers or _elsewhere(cls, key, path)
        return f"{path}: unknown key; {f'here it is {place}' if place else f'accepted: {listed(loc[-1], accepted)}'}"
    if detail["type"] in ("missing", "missing_argument"):
        return f"{path}: is not set and has no default; set {path}=..."
    form = _form(cls, detail, loc)
    hint = f"; write {path}={form}" if form else ""
    if detail["type"] == "dataclass_type" and isinstance(named := detail["input"], str):  # optimizer=adam
        inside = field_names(_class_at(cls, loc))
        name = next((each for each in ("name", "type", "format") if each in inside), "")
        hint = f"; write {path}.{name}={VALUES.get(named, named)}" if name else hint
    if str(detail["input"]).lower() in ("none", "off", "no", "false") and _may_be_null(cls, loc):
        hint = f"; {path}=null turns it off"
    if str(detail["type"]).startswith(("float_", "int_")) and not hint:
        hint = f"; write {path}=NUMBER"
    if detail["type"] == "string_type" and isinstance(detail["input"], list) and path.endswith(".path"):
        hint = "; several files are a glob such as 'data=rows-*.jsonl', or a folder"
    if ours := value_of(detail["input"], str(detail["msg"])):
        hint = f"; here it is {path}={ours}"
    if detail["type"] == "string_type" and isinstance(detail["input"], bool):
        hint = f"; where the text is meant, write '{path}=\"{json.dumps(detail['input'])}\"'"
    return f"{path}={json.dumps(detail['input'])}: {str(detail['msg'])[0].lower()}{str(detail['msg'])[1:]}{hint}"


def _may_be_null(cls: type, loc: tuple[str | int, ...]) -> bool:
    """Whether the field at this place may be null."""
    names = [each for each in loc if isinstance(each, str) and each in field_names(_class_at(cls, loc[:-1]))]
    own = next((each for each in fields(_class_at(cls, loc[:-1])) if each.name in names[-1:]), None)
    return own is not None and own.default is None


def _elsewhere(cls: type, key: str, path: str) -> str:
    """Where a field of that name is that is not one of ``cls``: in its settings, or in another part of its stage."""
    parent = path.removesuffix(key)
    if (short := key.removesuffix("_type")) in field_names(cls):  # loss_type, of methods whose field is loss
        return f"{parent}{short}"
    stage = "stages.STAGE" if cls is Root else ".".join(path.split(".")[:2])
    beside = {"resources": Resources, "method": Training} if stage.startswith("stages.") else {}
    others = [f"{stage}.{part}.{key}" for part, known in beside.items() if key in field_names(known)]
    return " or ".join([*(f"{parent}{each}" for each in _within(cls, key)), *others])


def _within(cls: type, key: str) -> list[str]:
    """The fields of a class that are settings with a field of that name, each with it: ``adapter.rank``."""
    found = [each.name for each in fields(cls) for part in _dataclasses(each.type) if key in field_names(part)]
    return [f"{name}.{key}" for name in dict.fromkeys(found)]


def _placed(tree: Node, key: str) -> list[str]:
    """The overrides of stages, resources or sources that a key without its place may stand for, with its value."""
    ours = re.fullmatch(r"(?:stages\.STAGE\.(?:method|resources)|sources\.NAME)\.([\w.]+)", FIELDS.get(key, key))
    path = ours[1] if ours else FIELDS.get(key, key).removesuffix(" of the stage that prepares the rows")
    form = _BY_VALUE.get(key)
    if form and (exact := form(key, tree[key], node_of(tree.get("stages")))) is not None:
        return [exact] if isinstance(exact, str) else _filled(exact, tree)
    name, own, inner, trainings = path.partition(".")[0], list[str](), list[str](), list[str]()
    for stage, cls in _methods(tree):
        own += [f"stages.{stage}.method.{path}"] if name in field_names(cls) else []
        inner += [f"stages.{stage}.method.{each}" for each in _within(cls, path)]
        trainings += [stage] if issubclass(cls, Training) else []
    if not own and name in field_names(Resources):
        own = [f"resources.{path}"]
    if not own and name in field_names(Source):
        own = [f"sources.{each}.{path}" for each in (("base",) if name in OF_BASE else data_sources(tree))]
    if key in FIELDS and not (own or inner):  # more than one field, or none
        if ours and FIELDS[key].startswith(_M):
            return [f"{FIELDS[key]}, which no stage of this pipeline has"]
        text = FIELDS[key].replace("stages.STAGE.resources", "resources")
        return [text.replace("STAGE", trainings[0]) if len(trainings) == 1 else text]
    return [shlex.quote(f"{each}={value_text(tree[key])}") for each in own or inner]


def _methods(tree: Node) -> Iterator[tuple[str, type]]:
    for stage, node in node_of(tree.get("stages")).items():
        with contextlib.suppress(ConfigError):
            yield stage, target_class(str(node_of(node_of(node).get("method")).get("_target_")), stage, (Method,), "")


def _filled(overrides: Sequence[str], tree: Node) -> list[str]:
    """The overrides for each stage that has their field, with a model that has a revision."""
    base = node_of(node_of(tree.get("sources")).get("base"))
    needs_base = "path" not in base and any(each.startswith("sources.base.") for each in overrides)
    line = shlex.join([*(["model=owner/name"] if needs_base else []), *overrides])
    fields_ = re.findall(r"stages\.STAGE\.method\.(\w+)", line)
    if not fields_:
        return [line]
    stages = [stage for stage, cls in _methods(tree) if issubclass(cls, Training) and {*fields_} <= {*field_names(cls)}]
    return [line.replace("STAGE", stage) for stage in stages] or [f"{line}, which no stage of this pipeline has"]


def value_text(value: object) -> str:
    """A value in the grammar of overrides."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {value_text(each)}' for name, each in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(value_text, value))}]"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number else json.dumps(value, ensure_ascii=False).strip('"')


def _form(cls: type, detail: dict[str, object], loc: tuple[int | str, ...]) -> str:
    """How to write the expected list or object in an override; empty: neither was expected."""
    if detail["type"] in ("list_type", "tuple_type"):
        return f"[{detail['input'] if isinstance(detail['input'], str | int | float) else '...'}]"
    if detail["type"] == "dataclass_type":
        return f"{{{', '.join(f'{field.name}: ...' for field in fields(_class_at(cls, loc)))}}}"
    return ""


def _class_at(cls: type, loc: tuple[int | str, ...]) -> type:
    """The dataclass at a location inside ``cls``."""
    for part in loc:
        hints = {field.name: field.type for field in fields(cls)}
        cls = next(_dataclasses(hints.get(str(part))), cls)
    return cls


def _dataclasses(hint: object) -> Iterator[type]:
    """The dataclasses in a type: ``Rule`` in ``Mapping[str, Rule] | None``."""
    if isinstance(hint, type) and is_dataclass(hint):
        yield hint
    for part in get_args(hint):
        yield from _dataclasses(part)
