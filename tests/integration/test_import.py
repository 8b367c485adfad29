"""``posttrain import``: configurations in the forms of other trainers' examples become pipelines that plan."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from flows.peers.datasets import read_values
from flows.peers.importing import DEFAULTS, RULES, TRL_DEFAULTS, convert
from lineage.errors import ConfigError
from tests import tiny
from tests.command import call

# In the shape of each project's examples: keys and their combinations, with small local models and rows.
FACTORY = """\
model_name_or_path: models/chat
trust_remote_code: true
do_train: true
dataset_dir: data
template: qwen
overwrite_cache: true
preprocessing_num_workers: 16
dataloader_num_workers: 4
output_dir: saves/run
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
save_only_model: false
report_to: none
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
ddp_timeout: 180000000
resume_from_checkpoint: null
lr_scheduler_type: cosine
warmup_ratio: 0.1
"""
AXOLOTL = """\
base_model: models/chat
model_type: LlamaForCausalLM
tokenizer_type: AutoTokenizer
dataset_prepared_path: last_run_prepared
output_dir: ./outputs/out
wandb_project:
wandb_entity:
wandb_watch:
wandb_name:
wandb_log_model:
gradient_accumulation_steps: 4
micro_batch_size: 2
lr_scheduler: cosine
learning_rate: 2e-4
tf32: false
gradient_checkpointing: true
resume_from_checkpoint:
logging_steps: 1
flash_attention: true
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
special_tokens:
  pad_token: <|endoftext|>
"""
OUMI = """\
model:
  model_name: models/chat
  model_max_length: 512
  torch_dtype_str: bfloat16
  attn_implementation: sdpa
  trust_remote_code: true
data:
  train:
    datasets: [{dataset_name: text_sft_jsonl, dataset_path: data/chats.jsonl, shuffle: true, seed: 42}]
    collator_name: text_completions_only_with_padding
training:
  save_steps: 0
  per_device_train_batch_size: 2
  gradient_accumulation_steps: 16
  enable_gradient_checkpointing: true
  gradient_checkpointing_kwargs: {use_reentrant: false}
  ddp_find_unused_parameters: false
  dataloader_num_workers: auto
  dataloader_prefetch_factor: 32
  logging_steps: 100
  empty_device_cache_steps: 50
  output_dir: output/run
  include_performance_metrics: true
  enable_wandb: true
"""
TRL = """\
model_name_or_path: models/chat
output_dir: out
logging_steps: 25
eval_strategy: steps
eval_steps: 100
"""
SFT, PAIRS = "dataset: chats\nstage: sft\n", "dataset: pairs\nstage: dpo\n"
LORA = "finetuning_type: lora\nlora_rank: 8\nlora_target: all\n"
CHATS = "datasets: [{path: data/chats.jsonl, type: chat_template, field_messages: messages}]\n"

# name -> peer, the file, the training, and settings of ours that it must have.
EXAMPLES: dict[str, tuple[str, str, str, dict[str, object]]] = {
    "factory_lora_sft": (
        "llamafactory", FACTORY + SFT + LORA + "cutoff_len: 512\nlearning_rate: 1.0e-4\nbf16: true\nmax_samples: 8\n",
        "sft",
        {"adapter.rank": 8, "adapter.alpha": 16, "max_length": 512, "global_batch_size": 8, "precision": "bf16",
         "schedule.warmup": 0.1, "learning_rate": 1e-4, "num_epochs": 3.0},
    ),
    "factory_full_sft": (
        "llamafactory", FACTORY + SFT + "finetuning_type: full\ndeepspeed: examples/deepspeed/ds_z2_config.json\n"
        "pure_bf16: true\nval_size: 0.2\nper_device_eval_batch_size: 1\neval_strategy: steps\neval_steps: 50\n", "sft",
        {"adapter": None, "validation.every_steps": 50, "learning_rate": 5e-5, "max_length": 2048},
    ),
    "factory_qlora_sft": (
        "llamafactory", FACTORY + SFT + LORA + "quantization_bit: 4\nquantization_method: bnb\n"
        "double_quantization: true\n",
        "sft", {"quantization.format": "nf4", "quantization.double": True},
    ),
    "factory_pretrain": (
        "llamafactory", FACTORY + LORA + "stage: pt\ndataset: books\npacking: true\nmax_steps: 20\n", "cpt",
        {"num_steps": 20, "num_epochs": None},
    ),
    "factory_dpo": (
        "llamafactory", FACTORY + PAIRS + LORA + "pref_beta: 0.2\npref_loss: hinge\nlearning_rate: 5.0e-6\n", "dpo",
        {"beta": 0.2, "loss_type": "hinge", "learning_rate": 5e-6},
    ),
    "factory_orpo": (
        "llamafactory", FACTORY + PAIRS + LORA + "pref_loss: orpo\npref_beta: 0.1\n", "orpo", {"beta": 0.1},
    ),
    "factory_simpo": (
        "llamafactory", FACTORY + PAIRS + LORA + "pref_loss: simpo\npref_beta: 2.0\nsimpo_gamma: 1.0\n", "simpo",
        {"beta": 2.0, "gamma": 1.0},
    ),
    "factory_reward": (
        "llamafactory", FACTORY + LORA + "stage: rm\ndataset: pairs\nneftune_noise_alpha: 5\n", "reward",
        {"neftune_alpha": 5},
    ),
    "axolotl_lora": (
        "axolotl", AXOLOTL + CHATS + "adapter: lora\nlora_r: 32\nlora_alpha: 16\nlora_dropout: 0.05\n"
        "lora_target_linear: true\nsequence_len: 1024\nsample_packing: true\npad_to_sequence_len: true\nnum_epochs: 2\n"
        "optimizer: adamw_bnb_8bit\nval_set_size: 0.2\nwarmup_steps: 10\nbf16: auto\neval_sample_packing: false\n",
        "sft",
        {"adapter.rank": 32, "packing": "best_fit", "optimizer.name": "adamw_8bit", "schedule.warmup": 10,
         "validation.every_epochs": 0.25, "global_batch_size": 8, "learning_rate": 2e-4},
    ),
    "axolotl_qlora": (
        "axolotl", AXOLOTL + "datasets: [{path: data/alpaca.jsonl, type: alpaca}]\nadapter: qlora\nload_in_4bit: true\n"
        "load_in_8bit: false\nlora_r: 16\nlora_alpha: 32\nlora_target_modules: [q_proj, v_proj]\nnum_epochs: 1\n"
        "optimizer: paged_adamw_32bit\nwarmup_ratio: 0.1\nearly_stopping_patience: 3\n", "sft",
        {"quantization.format": "nf4", "adapter.target_modules": "q_proj,v_proj", "validation.patience": 3},
    ),
    "axolotl_full": (
        "axolotl", AXOLOTL + CHATS + "chat_template: chatml\nplugins: [axolotl.integrations.liger.LigerPlugin, "
        "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]\nnum_epochs: 3\noptimizer: adamw_torch_fused\n"
        "adam_beta2: 0.95\nmax_grad_norm: 0.5\ncosine_min_lr_ratio: 0.1\nstrict: false\n", "sft",
        {"optimizer.betas": (0.9, 0.95), "max_grad_norm": 0.5, "schedule.min_learning_rate": 2e-5},
    ),
    "axolotl_completion": (
        "axolotl", AXOLOTL + "datasets: [{path: data/books.jsonl, type: completion, field: text}]\nnum_epochs: 4\n",
        "cpt", {"num_epochs": 4, "max_length": 512},
    ),
    "axolotl_dpo": (
        "axolotl", AXOLOTL + "rl: dpo\nrl_beta: 0.05\n"
        "datasets: [{path: data/pairs.jsonl, type: chatml.intel, split: train}]\n"
        "adapter: lora\nlora_r: 8\nlora_alpha: 16\nlora_target_linear: true\nnum_epochs: 1\n", "dpo", {"beta": 0.05},
    ),
    "axolotl_ipo": (
        "axolotl", AXOLOTL + "rl: ipo\ndatasets: [{path: data/pairs.jsonl}]\nnum_epochs: 1\n", "dpo",
        {"loss_type": "ipo"},
    ),
    "trl_sft": (
        "trl", TRL + "trainer: sft\ndataset_name: data/chats.jsonl\nlearning_rate: 2.0e-5\nnum_train_epochs: 1\n"
        "packing: true\nper_device_train_batch_size: 2\ngradient_accumulation_steps: 8\nuse_peft: true\nlora_r: 32\n"
        "push_to_hub: true\n", "sft",
        {"adapter.rank": 32, "adapter.alpha": 32, "adapter.dropout": 0.05, "precision": "auto", "max_length": 1024},
    ),
    "trl_kto": (
        "trl", TRL + "trainer: kto\ndataset_name: data/unpaired.jsonl\nbf16: true\nwarmup_ratio: 0.1\n"
        "desirable_weight: 1.0\nundesirable_weight: 1.5\n", "kto", {"undesirable_weight": 1.5, "beta": 0.1},
    ),
    "trl_grpo": (
        "trl", TRL + "trainer: grpo\ndataset_name: data/prompts.jsonl\nreward_funcs: [exact]\nnum_generations: 4\n"
        "max_completion_length: 64\nmax_prompt_length: 128\ntemperature: 0.9\nscale_rewards: false\n", "grpo",
        {"loss": "dapo", "num_generations": 4, "max_length": 192, "sampling.temperature": 0.9, "scale_rewards": "none"},
    ),
    "trl_grpo_weights": (
        "trl", TRL + "trainer: grpo\ndataset_name: data/prompts.jsonl\nreward_funcs: [exact, think_format_reward]\n"
        "reward_weights: [1.0, 0.5]\nnum_generations: 4\ndataset_prompt_column: prompt\naccelerate_config: zero2\n"
        "system_prompt: Think first.\n", "grpo",
        {"rewards.think_format_reward.weight": 0.5, "rewards.exact.weight": 1.0},
    ),
    "oumi_lora": (
        "oumi", OUMI + "  trainer_type: TRL_SFT\n  use_peft: true\n  num_train_epochs: 1\n"
        "  optimizer: adamw_torch_fused\n"
        "  learning_rate: 3.0e-4\n  lr_scheduler_type: cosine\n  warmup_ratio: 0.1\n  weight_decay: 0.01\n"
        "  compile: false\npeft: {lora_r: 16, lora_alpha: 32, lora_target_modules: [q_proj, k_proj]}\n", "sft",
        {"adapter.rank": 16, "adapter.target_modules": "q_proj,k_proj", "global_batch_size": 32, "max_length": 512},
    ),
    "oumi_qlora": (
        "oumi", OUMI + "  trainer_type: TRL_SFT\n  use_peft: true\n  max_steps: 30\n  mixed_precision_dtype: BF16\n"
        "peft: {q_lora: true, q_lora_bits: 4, bnb_4bit_quant_type: nf4, use_bnb_nested_quant: true, "
        "bnb_4bit_compute_dtype: bfloat16}\n", "sft",
        {"quantization.format": "nf4", "quantization.compute_dtype": "bf16", "precision": "bf16", "num_steps": 30},
    ),
    "oumi_full": (
        "oumi", OUMI.replace("  trust_remote_code: true", "  trust_remote_code: false") + "  trainer_type: OUMI\n"
        "  num_train_epochs: 2\n  max_grad_norm: 0.7\nfsdp: {enable_fsdp: false}\n", "sft", {"max_grad_norm": 0.7},
    ),
}  # fmt: skip
DPO_SCRIPT = """\
#!/bin/sh
accelerate launch --config_file zero3.yaml --num_processes 1 examples/scripts/dpo.py \\
    --model_name_or_path models/chat \\
    --dataset_name data/pairs.jsonl --dataset_train_split train \\
    --learning_rate 5.0e-6 --num_train_epochs 1 --per_device_train_batch_size 2 \\
    --gradient_accumulation_steps=4 --beta 0.3 --loss_type sigmoid --use_peft --lora_r 32 --no_such_key 3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and rows of every kind, as the examples name them."""
    folder = tmp_path_factory.mktemp("peers")
    tiny.write_policy(folder / "models" / "chat")
    alpaca = [{"instruction": f"sort {i}", "input": "", "output": str(i)} for i in range(20)]
    rows = {
        "chats": tiny.conversation_rows(20), "books": tiny.text_rows(20), "pairs": tiny.preference_rows(20),
        "unpaired": tiny.unpaired_rows(20), "alpaca": alpaca,
        "prompts": [{"prompt": f"{i} + 1", "answer": str(i + 1)} for i in range(20)],
    }  # fmt: skip
    (folder / "data").mkdir()
    for name, each in rows.items():
        kept = [{key: value for key, value in row.items() if key not in ("row_id", "kind")} for row in each]
        (folder / "data" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    infos = {name: {"file_name": f"{name}.jsonl", "formatting": "sharegpt"} for name in rows}
    (folder / "tagged").mkdir()
    tagged = {"chats": {**infos["chats"], "tags": {"role_tag": "who"}}}
    (folder / "tagged" / "dataset_info.json").write_text(json.dumps(tagged))
    (folder / "data" / "dataset_info.json").write_text(json.dumps(infos))
    return folder


def imported(folder: Path, peer: str, file: str, text: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    (folder / file).write_text(text)
    return call(["import", peer, file, *overrides], folder, {})


def setting(method: dict, path: str) -> object:
    for part in path.split("."):
        method = method.get(part) if isinstance(method, dict) else None
    return tuple(method) if isinstance(method, list) else method


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_of_a_peer_becomes_a_pipeline_that_plans(folder, name):
    peer, text, training, settings = EXAMPLES[name]
    ran = imported(folder, peer, f"{name}.yaml", text, "--json")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    keys = {*yaml.safe_load(text)} - {"model", "data", "training", "peft", "fsdp", "stage", "rl", "trainer", "datasets"}
    reported = {re.split(r"[.:\[]", key)[0] for key in (*found["mapped"], *found["not_needed"])}
    assert not keys - reported - {"dataset_dir", "dataset_name", "dataset", "pref_loss"}  # every key is answered
    plan = call(["plan", "--json", "--config-dir", "conf", f"pipeline={found['pipeline']}", *found["add"]], folder, {})
    assert plan.returncode == 0, plan.stderr
    assert [each["stage"] for each in json.loads(plan.stdout)["stages"]] == ["data", training]
    method = yaml.safe_load(Path(folder, found["file"]).read_text())["stages"][training]["method"]
    assert {path: setting(method, path) for path in settings} == settings


def test_the_arguments_of_a_script_are_read_and_what_has_no_place_is_refused_by_name(folder):
    ran = imported(folder, "trl", "train.sh", DPO_SCRIPT, "--num-workers", "2")
    assert ran.returncode == 2
    assert "no_such_key=3: it is unknown" in ran.stderr and "--leave-out no_such_key" in ran.stderr
    assert not (folder / "conf" / "pipeline" / "train.yaml").exists()
    ran = imported(
        folder, "trl", "train.sh", DPO_SCRIPT, "--num-workers", "2", "--leave-out", "no_such_key", "--out", "ours.yaml",
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    text = (folder / "ours.yaml").read_text()
    assert "# not carried over: no_such_key\n" in text
    assert {"launcher.config_file", "launcher.num_processes"} <= {*ran.stdout.split()}
    tree = yaml.safe_load(text)
    assert tree["stages"]["dpo"]["method"]["global_batch_size"] == 16
    assert tree["stages"]["dpo"]["resources"] == {"micro_batch_size": 2, "num_workers": 2}


@pytest.mark.parametrize(
    ("peer", "change", "reported"),
    [
        ("llamafactory", SFT + "lr: 1e-4\n", "lr=0.0001: LLaMA-Factory's name of it is learning_rate"),
        ("llamafactory", SFT + "num_epochs: 3\n", "num_epochs=3: LLaMA-Factory's name of it is num_train_epochs"),
        ("axolotl", CHATS + "optim: adamw\nepochs: 2\n", "optim=\"adamw\": axolotl's name of it is optimizer"),
        ("llamafactory", "stage: ppo\n", "stage=ppo: the training is unknown"),
        ("llamafactory", "stage: sft\ndataset: nowhere\n", "dataset_info.json has no such name"),
        ("llamafactory", SFT + "train_on_prompt: true\n", "train_on_prompt=true: the answers alone get loss here"),
        ("llamafactory", SFT + "deepspeed: mine.json\n", "no stage of ZeRO is in its name"),
        ("llamafactory", SFT + "mask_history: true\n", 'those with "loss": false'),
        ("llamafactory", SFT + "dataset_dir: tagged\n", "turns with from and value, or role and content"),
        ("axolotl", "datasets: [{path: data/chats.jsonl, roles: {assistant: [robot]}}]\n", "roles system, user"),
        ("axolotl", CHATS.replace("}", ", roles_to_train: [all]}"), "roles_to_train=[\"all\"]"),
        ("llamafactory", SFT + "use_badam: true\n", "use_badam=true: it is unknown"),
        ("llamafactory", SFT + "freeze_trainable_layers: 2\n", "trains the last norm and the head too: set it by hand"),
        ("llamafactory", SFT + "rank_pattern: {q_proj: 4}\n", "not a setting: all layers have stages.STAGE.method."),
        ("llamafactory", SFT + "do_train: false\ndo_predict: true\n", "trains nothing"),
        ("axolotl", CHATS + "unfrozen_parameters: [lm_head]\n", "it names what is trained; freeze.modules names what"),
        ("llamafactory", SFT + "optim: adamw_of_mine\n", "as a pipeline: stages.sft.method.optimizer.name"),
        ("axolotl", "datasets: [{path: data/chats.jsonl, type: own_format}]\n", "datasets[0].type=\"own_format\""),
        ("trl", "dataset_name: data/chats.jsonl\n", "--training sft"),
        ("trl", "trainer: sft\n", "the file names no rows"),
        ("oumi", "[1, 2]", "KEY: VALUE lines"),
    ],
)  # fmt: skip
def test_what_cannot_be_imported_ends_with_2(folder, peer, change, reported):
    start = {"llamafactory": FACTORY, "axolotl": AXOLOTL, "trl": TRL, "oumi": ""}[peer]
    ran = imported(folder, peer, "wrong.yaml", start + change)
    assert ran.returncode == 2 and reported in ran.stderr, ran.stderr
    assert not (folder / "conf" / "pipeline" / "wrong.yaml").exists()


@pytest.mark.parametrize(
    ("peer", "text", "reported"),
    [
        ("llamafactory", AXOLOTL + CHATS, "of axolotl, with base_model: posttrain import axolotl other.yml"),
        ("axolotl", FACTORY + PAIRS, "of llamafactory, with dataset_dir, template: posttrain import llamafactory o"),
        ("trl", FACTORY + SFT, "posttrain import llamafactory other.yml"),
        ("axolotl", OUMI, "is a configuration of oumi, with model.model_name: posttrain import oumi other.yml"),
        ("axolotl", "model_name_or_path: m\ndataset_name: r\n", "posttrain import trl other.yml"),
        ("llamafactory", "model_name_or_path: m\nadapter_name_or_path: a\ntemplate: qwen\nexport_dir: out\n",
         "export_dir: the file is an export, and trains nothing; of a model of the store: posttrain export merged REF"),
        ("llamafactory", "model_name_or_path: m\ntemplate: qwen\ninfer_backend: huggingface\n", "posttrain chat REF"),
    ],
)  # fmt: skip
def test_a_file_of_another_peer_or_of_no_training_gets_its_own_command(tmp_path, peer, text, reported):
    ran = imported(tmp_path, peer, "other.yml", text)
    assert ran.returncode == 2 and reported in ran.stderr and "--training" not in ran.stderr, ran.stderr


def test_a_file_with_the_name_of_a_pipeline_that_is_shipped_gets_another(folder):
    peer, text, *_ = EXAMPLES["axolotl_dpo"]
    ran = imported(folder, peer, "simpo.yml", text)
    assert ran.returncode == 0, ran.stderr
    assert "wrote conf/pipeline/axolotl-simpo.yaml  (posttrain ships a pipeline simpo too)\n" in ran.stdout
    plan = call(["plan", "pipeline=axolotl-simpo"], folder, {})
    own = "conf/pipeline/axolotl-simpo.yaml"
    assert plan.returncode == 2 and f"{own} is not read by itself; write posttrain plan {own}, or --co" in plan.stderr
    ran = imported(folder, peer, "simpo.yml", text, "--out", "conf/pipeline/sft.yaml")
    assert ran.returncode == 2 and "give another name: --out conf/pipeline/axolotl-sft.yaml" in ran.stderr


ROWS_OF = {
    "axolotl": {"base_model": "m", "datasets": [{"path": "p", "type": "chat_template"}]},
    "trl": {"model_name_or_path": "m", "dataset_name": "p"}, "oumi": {"model": {"model_name": "m"}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("peer", "values", "settings"),
    [
        ("axolotl", {"datasets": [{"path": "p", "field_chosen": "good", "field_rejected": "bad"}], "rl": "dpo",
                     "special_tokens": {"unk_token": "<unk>", "pad_token": "<pad>"}, "eot_tokens": ["<|end|>"]},
         {"rows.columns": ("chosen", "rejected"), "base.pad_token": None}),
        ("axolotl", {"datasets": [{"path": "p"}], "tokens": ["<a>"], "resize_token_embeddings_to_32x": True},
         {"base.added_tokens": ("<a>",)}),
        ("axolotl", {"datasets": [{"path": "p"}], "tokens": {"pad_token": "<pad>", "eos_token": "<e>"},
                     "lr_scheduler_kwargs": {"num_cycles": 0.5}},
         {"base.eos_token": "<e>", "base.pad_token": None, "method.schedule.num_cycles": None}),
        ("oumi", {"data": {"train": {"datasets": [{"dataset_name": "HuggingFaceDataset", "dataset_kwargs": {
            "hf_dataset_path": "o/rows", "prompt_column": "question", "response_column": "solution"}}]}}},
         {"rows.path": "o/rows", "rows.columns": ("prompt", "completion")}),
        ("axolotl", {"datasets": [{"path": "p", "template_thinking_key": "thinking"}], "tensor_parallel_size": 1,
                     "gptq": False, "use_kernels": True, "processor_type": "AutoProcessor", "eta_min": 1e-6,
                     "plugins": ["axolotl.integrations.kernels.KernelsPlugin"]},
         {"method.schedule.min_learning_rate": 1e-6}),
        ("axolotl", {"load_in_4bit": True, "adapter": "lora", "bnb_config_kwargs": {"bnb_4bit_use_double_quant": True}},
         {"method.quantization.double": True, "method.quantization.format": "nf4"}),
        ("trl", {"dataset_name": None, "dataset_mixture": {"test_split_size": 40, "seed": 0, "datasets": [
            {"id": "owner/rows", "config": "default", "split": "train_sft", "columns": ["messages"], "weight": 0.25}]}},
         {"rows.split": "train_sft[:25%]", "data.held_out": 40}),
        ("trl", {"dataset_name": None, "dataset_mixer": {"owner/rows": 1.0}, "dataset_splits": ["train_a", "test_a"]},
         {"rows.split": "train_a", "rows.path": "owner/rows"}),
        ("trl", {"save_steps": 0.1, "num_train_epochs": 2, "eval_steps": 0.25, "packing": True,
                 "packing_strategy": "ffd", "padding_free": True, "max_grad_norm": 0.0, "init_lora_weights": True},
         {"resources.save_epochs": 0.2, "method.validation.every_epochs": 0.5, "method.packing": "best_fit",
          "method.max_grad_norm": 1e9}),
        ("oumi", {"model": {"model_name": "m", "tokenizer_kwargs": {"pad_token": "<pad>"}, "freeze_layers": ["visual"]},
                  "data": {"train": {"datasets": [{"dataset_name": "p", "dataset_kwargs": {"limit": 8}}]}}},
         {"base.pad_token": None, "method.freeze.modules": "visual", "rows.sample_count": 8}),
        ("oumi", {"data": {"train": {"datasets": [{"dataset_name": "p"}]}}, "training": {"use_peft": True},
                  "peft": {"lora_exclude_modules": [".*vision.*"]}},
         {"method.adapter.exclude_modules": "*vision*"}),
        ("llamafactory", {"finetuning_type": "oft", "oft_target": "all", "oft_block_size": 8, "fp8": True},
         {"method.adapter.block_size": 8, "method.adapter.rank": None, "method.precision": "fp8"}),
        ("llamafactory", {"image_max_pixels": 99, "video_fps": 1.0, "freeze_vision_tower": True},
         {"method.images.max_pixels": 99}),
        ("llamafactory", {"adapter_name_or_path": "sft", "finetuning_type": "lora", "model_name_or_path": "m",
                          "create_new_adapter": True, "template": "llama3"},
         {"method.adapter_in": None, "base.chat_template": "llama3"}),
        ("llamafactory", {"adapter_name_or_path": "sft", "finetuning_type": "lora", "model_name_or_path": "m",
                          "disable_gradient_checkpointing": True, "mask_history": False, "template": "yi"},
         {"method.adapter_in": "continue", "resources.gradient_checkpointing": None, "base.chat_template": None}),
        ("axolotl", {"chat_template": "tokenizer_default", "datasets": [{
            "path": "p", "type": "chat_template", "field_messages": "conversations", "roles_to_train": ["assistant"],
            "message_property_mappings": {"role": "from", "content": "value"}, "train_on_eos": "turn",
            "roles": {"user": ["human"], "assistant": ["gpt", "model"]}}]},
         {"rows.columns": None}),
        ("axolotl", {"datasets": [{"path": "p", "field_messages": "dialog", "message_field_role": "from",
                                   "message_field_content": "value", "chat_template": "chatml"}]},
         {"rows.columns": ("conversations",), "rows.columns.conversations": "dialog", "base.chat_template": "chatml"}),
        ("llamafactory", {"freeze_vision_tower": False, "freeze_multi_modal_projector": False,
                          "freeze_language_model": True},
         {"method.images.trains": ("vision", "projector"), "method.images.language": "frozen"}),
        ("llamafactory", {"finetuning_type": "lora", "pissa_init": True, "recompute_granularity": "full"},
         {"method.adapter.init": "pissa", "resources.gradient_checkpointing": "on"}),
        ("axolotl", {"datasets": [{"path": name, "type": f"chatml.{name}"} for name in ("intel", "ultra")]},
         {"base.chat_template": "chatml"}),
        ("axolotl", {"datasets": [{"path": "p", "type": "llama3.argilla"}, {"path": "q", "chat_template": "gemma"}]},
         {"base.chat_template": "llama3"}),
        ("axolotl", {"eval_max_new_tokens": 128, "eval_table_size": 0, "use_tensorboard": True, "streaming": False},
         {"method.packing": None}),
        ("axolotl", {"datasets": [{"path": "p", "type": "sharegpt", "conversation": "chatml"}]},
         {"base.chat_template": "chatml"}),
        ("axolotl", {"cosine_min_lr_ratio": 1.0, "warmup_steps": 5},
         {"method.schedule.name": "constant_with_warmup", "method.schedule.min_learning_rate": None}),
    ],
)  # fmt: skip
def test_keys_of_public_configurations_are_mapped_or_not_needed(tmp_path, peer, values, settings):
    found = convert(peer, {**ROWS_OF.get(peer, {}), **values}, workers=1, training="sft", folder=tmp_path)
    assert {*found.refused} <= ({"model", "dataset"} if peer == "llamafactory" else set())
    for path, value in settings.items():
        part, _, rest = path.partition(".")
        got = setting(found.rows[0] if part == "rows" else getattr(found, part), rest)
        assert (tuple(got) if isinstance(got, dict) else got) == value, path


@pytest.mark.parametrize(
    ("peer", "values", "differs"),
    [
        ("axolotl", {"datasets": [{"path": "p", "type": "alpaca"}]}, {
            "datasets[0].type=alpaca": "written there as \"Below is an instruction ... ### Instruction"}),
        ("axolotl", {"datasets": [{"path": "p", "type": "alpaca_chat"}], "chat_template": "chatml"}, {
            "datasets[0].type=alpaca_chat": "USER: ... ASSISTANT:"}),
        ("axolotl", {"datasets": [{"path": "p", "type": "sharegpt"}]}, {
            "datasets[0].type=vicuna_v1.1": "there is no template of this name here"}),
        ("axolotl", {"datasets": [{"path": name, "type": f"{name}.ultra"} for name in ("llama3", "chatml")]}, {
            "datasets[1].type=chatml": "rendered by the template of datasets[0].type, llama3"}),
        ("llamafactory", {"template": "alpaca"}, {"template=alpaca": "there is no template of this name here"}),
        ("llamafactory", {"template": "llama3"}, {}),
    ],
)  # fmt: skip
def test_words_around_rows_that_no_template_here_writes_are_named_as_differing(tmp_path, peer, values, differs):
    found = convert(peer, {**ROWS_OF.get(peer, {}), **values}, workers=1, training="sft", folder=tmp_path)
    assert found.differs.keys() == differs.keys()
    assert all(what in found.differs[key] for key, what in differs.items())


@pytest.mark.parametrize(
    ("peer", "values", "resources"),
    [
        ("llamafactory", {"deepspeed": "examples/deepspeed/ds_z3_config.json"}, {"sharding": "zero3"}),
        ("llamafactory", {"deepspeed": "ds_z2_offload_config.json"}, {"sharding": "zero2_offload"}),
        ("axolotl", {"deepspeed": "deepspeed_configs/zero1.json"}, {"sharding": "zero1"}),
        ("trl", {"deepspeed": "own.json"}, {"sharding": "zero3_offload"}),  # a file beside it
        ("trl", {"fsdp": "shard_grad_op auto_wrap"}, {"sharding": "fsdp_grad"}),
        ("axolotl", {"fsdp": ["full_shard", "auto_wrap"], "fsdp_config": {
            "fsdp_offload_params": True, "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
            "fsdp_state_dict_type": "FULL_STATE_DICT"}},
         {"sharding": "fsdp", "offload": True, "wrap": "LlamaDecoderLayer"}),
        ("axolotl", {"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": False}}, {"sharding": "fsdp_grad"}),
        ("oumi", {"fsdp": {"enable_fsdp": True, "sharding_strategy": "HYBRID_SHARD", "cpu_offload": False}},
         {"sharding": "fsdp_hybrid"}),
        ("oumi", {"deepspeed": {"enable_deepspeed": True, "zero_stage": "ZERO_2"}}, {"sharding": "zero2"}),
    ],
)  # fmt: skip
def test_how_a_peer_divides_a_model_is_mapped(tmp_path, peer, values, resources):
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "none"}}
    (tmp_path / "own.json").write_text(json.dumps({"zero_optimization": zero, "train_batch_size": "auto"}))
    found = convert(peer, values, workers=2, training="sft", folder=tmp_path)
    assert {*found.refused} == {"model", "dataset"}  # which are not there
    shared = {"micro_batch_size", "num_workers", "gradient_checkpointing"}  # LLaMA-Factory's is on by default
    assert {key: value for key, value in found.resources.items() if key not in shared} == resources
    alone = convert(peer, values, workers=1, training="sft", folder=tmp_path)
    assert {*alone.resources} - shared == set() and "one worker" in str(alone.not_needed)


@pytest.mark.parametrize(
    ("training", "values"), [("grpo", {}), ("sft", {"load_in_4bit": True, "use_peft": True})], ids=["grpo", "qlora"]
)
def test_stage_3_is_divided_by_fsdp_where_the_plan_refuses_zero3(tmp_path, training, values):
    config = "ds_z3_offload_config.json"
    found = convert("trl", {"deepspeed": config, **values}, workers=2, training=training, folder=tmp_path)
    assert (found.resources["sharding"], found.resources["offload"]) == ("fsdp", True)
    assert found.mapped["deepspeed"] == 'resources.sharding="fsdp"'


def test_rewards_of_trl_are_mapped_or_refused_by_name(tmp_path):
    given = {"reward_funcs": ["accuracy_reward", "tag_count", "ours.score"], "reward_weights": [1, 2, 3]}
    found = convert(
        "trl", {**given, "accelerate_config": "zero2", "no_bf16": True}, workers=2, training="grpo", folder=tmp_path
    )
    assert found.method["rewards"] == {
        "accuracy_reward": {"function": "numeric", "column": "solution", "weight": 1},
        "score": {"function": "python:ours.score", "weight": 3},
    }
    assert "here it is format with tags" in found.refused["reward_funcs:tag_count"]
    assert "numeric the last number of each" in found.differs["reward_funcs:accuracy_reward"]
    assert found.resources["sharding"] == "zero2" and "precision" not in found.method
    assert not found.refused.keys() - {"model", "dataset", "reward_funcs:tag_count"}


def test_overrides_of_fields_are_in_the_file_and_decide_whether_it_is_one_of_ours(folder):
    text = "optim: adamw_of_mine\n"
    assert imported(folder, "llamafactory", "own.yaml", FACTORY + SFT + text).returncode == 2
    field = "stages.sft.method.optimizer.name=adamw_torch"
    ran = imported(folder, "llamafactory", "own.yaml", FACTORY + SFT + text, field)
    assert ran.returncode == 0, ran.stderr
    assert "method.optimizer.name=adamw_torch  (as overridden here)" in ran.stdout, ran.stdout
    tree = yaml.safe_load((folder / "conf" / "pipeline" / "own.yaml").read_text())
    assert tree["stages"]["sft"]["method"]["optimizer"]["name"] == "adamw_torch"


def test_what_is_of_the_hub_is_named_since_only_the_plan_reads_it(folder):
    ran = imported(folder, "trl", "hub.yaml", "trainer: sft\nmodel_name_or_path: owner/m\ndataset_name: owner/r\n")
    assert ran.returncode == 0, ran.stderr
    assert "import does not: sources.base.path=owner/m, sources.r.path=owner/r\n" in ran.stdout


def test_a_file_that_refers_to_its_own_values_is_read(tmp_path):
    (tmp_path / "train.yaml").write_text("model: {model_max_length: 64}\ndata: {seq: '${model.model_max_length}'}\n")
    assert read_values("oumi", tmp_path / "train.yaml")["data"] == {"seq": 64}
    (tmp_path / "train.yaml").write_text("data: {seq: '${model.none}'}\n")
    with pytest.raises(ConfigError, match=r"train.yaml: Interpolation key 'model.none' not found; write the value"):
        read_values("oumi", tmp_path / "train.yaml")


def test_a_setting_of_fsdp_that_has_no_place_is_refused_by_name(tmp_path):
    found = convert("axolotl", {"fsdp_config": {"fsdp_unheard": 1}}, workers=2, training="sft", folder=tmp_path)
    assert "fsdp_config.fsdp_unheard=1" in found.refused["fsdp_config.fsdp_unheard"]


DPO_ON_SFT = (
    "model_name_or_path: model\nadapter_name_or_path: saves/sft\nstage: dpo\nfinetuning_type: lora\nlora_rank: 4\n"
    "dataset: chats\ndataset_dir: data\npref_beta: 0.2\nbf16: true\ntemplate: qwen\n"
)


def test_what_a_plan_would_refuse_is_named_and_assumed_values_are_told_from_the_users(folder):
    ran = imported(folder, "llamafactory", "my_dpo.yaml", DPO_ON_SFT)
    assert ran.returncode == 2, ran.stderr  # as of the plan
    lines = ran.stdout.splitlines()
    named = [line for line in lines if line.startswith("mend before a plan: ")]
    assert "sources.base.path=saves/sft: no such folder here" in named[0]
    assert "gives conversations; preferences is accepted" in named[1] and len(named) == 2
    shown = {line.split()[0]: line for line in lines if line.startswith("  ")}
    assert 'base.base_model="model"' in shown["model_name_or_path"]
    assert shown["lora_alpha"].endswith("method.adapter.alpha=8  (LLaMA-Factory's default)")
    assert shown["pref_beta"].endswith("method.beta=0.2") and "data.held_out=1" in shown["held_out"]
    assert shown["template"].endswith('base.chat_template="qwen2_5"')  # the model's own here is another one
    assert "differs: adapter_name_or_path: the same adapter is trained on" in ran.stdout
    assert lines[-1] == (
        "next: mend the rows or conf/pipeline/my-dpo.yaml, which is written, then posttrain plan "
        "conf/pipeline/my-dpo.yaml resources=gpu"
    )


def test_an_imported_pipeline_is_planned_by_its_path(folder):
    peer, text, *_ = EXAMPLES["trl_sft"]
    ran = imported(folder, peer, "own.yaml", text, "--out", "ours/pipeline/mine.yaml")
    assert ran.returncode == 0 and "next: posttrain plan ours/pipeline/mine.yaml" in ran.stdout
    plan = call(["plan", "ours/pipeline/mine.yaml", "resources=gpu", "--json"], folder, {})
    assert plan.returncode == 0, plan.stderr
    assert json.loads(plan.stdout)["pipeline"] == "mine"
    file = folder / "ours/pipeline/mine.yaml"
    assert imported(folder, peer, "own.yaml", text, "--out", "ours/pipeline/mine.yaml").returncode == 0  # the same
    file.write_text(edited := file.read_text() + "# ours\n")
    again = imported(folder, peer, "own.yaml", text, "--out", "ours/pipeline/mine.yaml")
    assert again.returncode == 2 and "mine.yaml: is there already, and may have been edited" in again.stderr
    assert file.read_text() == edited
    elsewhere = call(["plan", "ours/pipeline/mine.yaml", "--config-dir", "conf"], folder, {})
    assert elsewhere.returncode == 2 and "leave --config-dir out" in elsewhere.stderr


def test_what_trl_assumes_is_what_its_configs_have():
    import dataclasses

    import trl

    classes = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "reward": "Reward", "grpo": "GRPO", "rloo": "RLOO"}
    for stage, name in classes.items():
        defaults = {each.name: each.default for each in dataclasses.fields(getattr(trl, f"{name}Config"))}
        defaults |= {each.name: each.default for each in dataclasses.fields(trl.ModelConfig)} | {"bf16": "auto"}
        assumed = {**DEFAULTS["trl"], **TRL_DEFAULTS[stage]}
        assert {key: defaults[key] for key in assumed} == assumed
    assert len(EXAMPLES) >= 20 and RULES
