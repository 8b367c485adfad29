"""In a pack, a row has the loss and the gradients that it has alone; models that cannot do that are refused."""

import copy
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from trl.trainer.utils import add_fused_lm_head

from lineage.errors import ConfigError
from tasks.data.tokens.tokenization import PACKABLE, why_not_packable
from tasks.train.kernels.padding_free import Example, collator_for, install

PACKS = [[9, 4, 14], [20, 5]]  # lengths of rows: some exceed the window, some do not
WINDOW = 6
_WINDOWED = ["sliding_attention", "full_attention", "sliding_attention"]
_PATTERNED = {"layer_types": _WINDOWED}
EXTRA: dict[str, dict[str, object]] = {
    "cohere2": _PATTERNED,
    "exaone4": _PATTERNED,
    "gemma2": {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 0.5},
    "gemma3_text": {**_PATTERNED, "query_pre_attn_scalar": 8},
    "ministral": _PATTERNED,
    "olmo3": _PATTERNED,
    "olmoe": {"sliding_window": None},
    "qwen2_moe": {"sliding_window": None, "use_sliding_window": False},
}


def model_of(architecture: str) -> PreTrainedModel:
    """Three layers of random weights, without dropout."""
    torch.manual_seed(0)
    heads = {"num_key_value_heads": 4 if architecture in ("gpt_neox", "phi", "olmoe") else 2}
    settings = {
        "vocab_size": 60, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "n_embd": 32,
        "num_hidden_layers": 3, "n_layer": 3, "num_attention_heads": 4, "n_head": 4, "head_dim": 8, "num_experts": 4,
        "num_experts_per_tok": 2, "max_position_embeddings": 64, "n_positions": 64, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        "shared_expert_intermediate_size": 16, "initializer_range": 0.2, "num_local_experts": 4,
        "sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1,
        **heads, **EXTRA.get(architecture, {}),
    }  # fmt: skip
    for name in ("attention_dropout", "residual_dropout", "embedding_dropout", "hidden_dropout"):
        settings[name] = 0.0
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **settings)).train()


def packs(lengths: Sequence[Sequence[int]] = PACKS) -> list[Example]:
    """Packs of random rows; a third of each is not trained."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for rows in lengths:
        pack: Example = {"input_ids": [], "labels": [], "seq_lengths": list(rows)}
        for length in rows:
            ids = torch.randint(3, 60, (length,), generator=generator).tolist()
            pack["input_ids"] += ids
            pack["labels"] += [-100 if place < length // 3 else token for place, token in enumerate(ids)]
        found.append(pack)
    return found


def losses_alone(model: PreTrainedModel, examples: Sequence[Example]) -> torch.Tensor:
    """The loss of each trained token, of each row in a forward of its own as transformers has it."""
    found = []
    for pack in examples:
        ends = torch.tensor(pack["seq_lengths"]).cumsum(0).tolist()
        for end, length in zip(ends, pack["seq_lengths"], strict=True):
            ids, labels = (torch.tensor([pack[name][end - length : end]]) for name in ("input_ids", "labels"))
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
            found.append(F.cross_entropy(logits, labels[0, 1:], reduction="none")[labels[0, 1:] != -100])
    return torch.cat(found)


def packed(model: PreTrainedModel) -> PreTrainedModel:
    """A copy as SFT trains it."""
    found = copy.deepcopy(model)
    add_fused_lm_head(found, outputs=("log_probs", "entropy", "is_top1"))
    install(found, packs=True)
    return found


def losses_packed(model: PreTrainedModel, examples: list[Example]) -> torch.Tensor:
    batch = collator_for(model, lambda _: {}, packs=True)(examples)
    outputs = model(**batch, fused_lm_head=True, use_cache=False)
    return -outputs.log_probs[outputs.label_mask]


# Those of text within Qwen-VL are in test_vision.py: transformers has no causal class of them alone.
@pytest.mark.parametrize("architecture", sorted(each for each in PACKABLE if not each.endswith("_vl_text")))
def test_a_row_in_a_pack_has_the_loss_and_the_gradients_that_it_has_alone(architecture: str) -> None:
    alone = model_of(architecture)
    model = packed(alone)
    expected, found = losses_alone(alone, packs()), losses_packed(model, packs())
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    weights = torch.linspace(0.5, 1.5, len(expected))
    for losses in (expected, found):
        (losses * weights).mean().backward()
    assert alone.get_input_embeddings().weight.grad.abs().max() > 1e-3
    for (name, left), right in zip(alone.named_parameters(), model.parameters(), strict=True):
        if left.grad is None:
            assert right.grad is None or not right.grad.any(), name
        else:
            torch.testing.assert_close(right.grad, left.grad, atol=1e-5, rtol=1e-4, msg=name)


def test_no_layer_of_a_pack_works_on_more_than_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention included: no kernel gets a mask of all tokens, and the scores are those of the rows."""
    scores, sdpa = [], F.scaled_dot_product_attention

    def counted(query: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        scores.append(query.shape[0] * query.shape[2] ** 2)
        return sdpa(query, *args, **kwargs)

    model = packed(model_of("qwen3_moe"))
    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    losses_packed(model, packs())
    assert sum(scores) == 3 * sum(length**2 for pack in PACKS for length in pack)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_bf16_packs_train(checkpointing: bool) -> None:
    alone = model_of("qwen2_moe")
    model = packed(alone)
    if checkpointing:
        model.gradient_checkpointing_enable()
    with torch.autocast("cpu", torch.bfloat16):
        losses = losses_packed(model, packs())
    assert losses.mean().item() == pytest.approx(losses_alone(alone, packs()).mean().item(), rel=0.02)
    losses.mean().backward()
    assert all(torch.isfinite(each.grad).all() for each in model.parameters() if each.grad is not None)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "bloom"}, "no test shows"),
        ({"model_type": "llama4"}, "no test shows"),
        ({"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]}, "layers of linear_att"),
        ({"model_type": "qwen2_moe", "sliding_window": 4096, "use_sliding_window": True}, "sliding window"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "not causal"),
    ],
)
def test_a_model_that_would_mix_rows_is_refused(config: dict[str, object], message: str) -> None:
    reason = why_not_packable(config)
    assert reason is not None and message in reason and str(config["model_type"]) in reason


def test_a_model_from_the_hub_is_refused_before_the_first_step() -> None:
    with pytest.raises(ConfigError, match=r"packing=best_fit: on a model of type bloom, .*packing=null"):
        collator_for(model_of("bloom"), lambda _: {}, packs=True)
