"""Tiny random models of several architectures, for tests that hold for all of them."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.tiny import write_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ARCHITECTURES = ("llama", "qwen2", "mistral", "gemma2", "gemma3_text", "gemma3", "gpt2", "mixtral", "qwen3_moe")
# Learned positions, and a mixture of experts: quick tests of what every architecture does.
FEW = [pytest.param(each, marks=[] if each in ("gpt2", "qwen3_moe") else pytest.mark.slow) for each in ARCHITECTURES]
MIXTURES = ("mixtral", "qwen3_moe")

_TEXT: dict[str, object] = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "pad_token_id": 0, "eos_token_id": 2,
    "bos_token_id": 1,
}  # fmt: skip
_OWN: dict[str, dict[str, object]] = {
    "deepseek_v3": {  # a dense layer, and one with shared experts beside the routed ones
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "moe_intermediate_size": 32, "q_lora_rank": 16, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},
    "qwen3_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "output_router_logits": True,
    },
}  # fmt: skip


def tiny_config(architecture: str, **fields: object) -> "PreTrainedConfig":
    """A configuration of an architecture; all have the same vocabulary, and 512 positions."""
    from transformers import AutoConfig

    configured = {**_TEXT, **fields}
    if architecture == "gpt2":
        own = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "n_inner": 64}
        shared = {"vocab_size": configured["vocab_size"], "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
        return AutoConfig.for_model("gpt2", **{**own, **shared, **fields})
    if architecture == "gemma3":  # text and images
        vision = {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
            "image_size": 28, "patch_size": 14,
        }  # fmt: skip
        config = AutoConfig.for_model("gemma3", text_config=configured, vision_config=vision, mm_tokens_per_image=4)
        config.num_labels = 1
        return config
    return AutoConfig.for_model(architecture, **{**_TEXT, **_OWN.get(architecture, {}), **fields})


def write_model(directory: Path, architecture: str, **fields: object) -> Path:
    """Saves a random causal language model with the tokenizer of ``tests.tiny``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_tokenizer(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(tiny_config(architecture, **{**ids, **fields})).save_pretrained(directory)
    return directory
