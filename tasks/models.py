"""Loading what a stage starts from, and saving what it made so that it loads alone."""

import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tasks.method import Input, LoRA

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from tasks.context import TrainContext

logger = logging.getLogger(__name__)

# Copied byte for byte from a stage's input: a tokenizer that was used saves other bytes than it was loaded from.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
)
CHAT_TEMPLATE_FILE = "chat_template.jinja"
ADAPTER_DIR = "adapter"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A model and its tokenizer, as a stage starts from them."""

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"


def load_tokenizer(policy: Input) -> "PreTrainedTokenizerBase":
    """The tokenizer of a model; a missing pad token is filled in memory only, padding is never trained."""
    return tokenizer_of(policy.path)


def tokenizer_of(directory: Path) -> "PreTrainedTokenizerBase":
    """As ``load_tokenizer``, of a directory that holds one."""
    from transformers import AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # of weights that are loaded and written: it fills logs, and says nothing
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        directory, trust_remote_code=False, local_files_only=True
    )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_policy(policy: Input) -> Policy:
    """A causal language model in fp32: what optimizers step; bf16 is the trainer's autocast."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        policy.path, dtype=torch.float32, use_safetensors=True, trust_remote_code=False, local_files_only=True
    )
    return Policy(model=model, tokenizer=load_tokenizer(policy))


def load_reward_model(policy: Input, seed: int) -> Policy:
    """The policy's backbone under a new head with one output, drawn from ``seed``."""
    import torch
    from transformers import AutoModelForSequenceClassification, set_seed
    from trl.trainer.reward_trainer import suppress_seqcls_warning

    tokenizer = load_tokenizer(policy)
    set_seed(seed)
    with suppress_seqcls_warning():
        model = AutoModelForSequenceClassification.from_pretrained(
            policy.path,
            num_labels=1,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
        )
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return Policy(model=model, tokenizer=tokenizer)


def lora_config(adapter: LoRA | None, task: Literal["CAUSAL_LM", "SEQ_CLS"]) -> "LoraConfig | None":
    """PEFT's form of ``adapter``; a new score head is trained and saved in full."""
    if adapter is None:
        return None
    from peft import LoraConfig

    names = adapter.target_modules
    return LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=names if names == "all-linear" else [name.strip() for name in names.split(",")],
        task_type=task,
        modules_to_save=["score"] if task == "SEQ_CLS" else None,
    )


def save_output(model: "PreTrainedModel | PeftModel", ctx: "TrainContext", policy: Input) -> None:
    """Writes a full model with the tokenizer and chat template of its input; rank 0 only.

    A LoRA is merged into the weights, and kept by itself in ``adapter/``.
    """
    from peft import PeftModel

    if ctx.rank != 0:
        return
    if isinstance(model, PeftModel):
        _save_adapter(model, ctx.output_dir / ADAPTER_DIR, policy)
        model = model.merge_and_unload()
    model.save_pretrained(ctx.output_dir, safe_serialization=True)
    copy_tokenizer(policy.path, ctx.output_dir)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copies every file that makes the tokenizer and its chat template."""
    for name in TOKENIZER_FILES:
        path = source / name
        if path.is_dir():
            shutil.copytree(path, target / name, dirs_exist_ok=True)
        elif path.exists():
            shutil.copyfile(path, target / name)


def _save_adapter(model: "PeftModel", directory: Path, policy: Input) -> None:
    """Saves the adapter with bytes that depend on the training only: no paths, sorted module names."""
    model.save_pretrained(directory, safe_serialization=True)
    (directory / "README.md").unlink(missing_ok=True)  # PEFT's model card, which names a local path
    path = directory / "adapter_config.json"
    config = json.loads(path.read_text())
    config["base_model_name_or_path"] = policy.fingerprint
    for key in ("target_modules", "modules_to_save"):
        if isinstance(config.get(key), list):
            config[key] = sorted(config[key])
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
