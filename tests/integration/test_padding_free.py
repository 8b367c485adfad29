"""The padding-free forward gives the numbers of TRL's padded one."""

import itertools
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tasks.train.kernels import padding_free
from tasks.train.kernels.padding_free import (
    PADDING_FREE,
    choose_kernel,
    common_tokens,
    groups_of,
    install,
    is_padding_free,
    pack,
    takes_few_heads,
)
from tests import tiny

LENGTHS = [5, 9, 3, 7]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_policy(tmp_path_factory.mktemp("policy"))


def batch(*, same_start: int = 0) -> dict[str, torch.Tensor]:
    """Four rows; the last two begin like the first two."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 300, (len(LENGTHS), max(LENGTHS)), generator=generator)
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS).unsqueeze(1)).long()
    ids[2:, :same_start] = ids[:2, :same_start]
    return {"input_ids": ids * mask, "attention_mask": mask}


# Those of text within Qwen-VL are in test_vision.py: transformers has no causal class of them alone.
@pytest.mark.parametrize("architecture", sorted(each for each in PADDING_FREE if not each.endswith("_vl_text")))
@pytest.mark.parametrize(
    ("checkpointing", "max_logits", "min_saved"),
    [  # max_logits: one product, or TRL's chunks; min_saved: one grid for attention, or one for each length
        pytest.param(*each, marks=[] if each in ((False, 2**27, 2**17), (True, 1, 1)) else pytest.mark.slow)
        for each in itertools.product([False, True], [2**27, 1], [2**17, 1])
    ],
)
def test_every_packable_architecture_gives_the_numbers_of_its_own_forward(
    architecture: str, checkpointing: bool, max_logits: int, min_saved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(padding_free, "MAX_LOGITS", max_logits)
    monkeypatch.setattr(padding_free, "MIN_SAVED", min_saved)
    settings = {"sliding_window": None, "use_sliding_window": False, "pad_token_id": 0, "bos_token_id": 1}
    config = AutoConfig.for_model(
        architecture, vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=3, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, eos_token_id=2, **settings,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).train()
    inputs = batch(same_start=3)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    labels[:, :2] = -100
    logits = model(**inputs).logits[:, :-1]
    expected = -torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none")
    weights = torch.arange(expected.shape[1])
    (expected * weights).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    assert is_padding_free(model)
    install(model)
    if checkpointing:
        model.gradient_checkpointing_enable()
    layout = pack(inputs["attention_mask"], common_tokens(inputs["input_ids"], inputs["attention_mask"]))
    found = model(**inputs, **layout, labels=labels, use_cache=False)
    torch.testing.assert_close(found.log_probs, expected, atol=1e-5, rtol=0)
    assert (found.label_mask == (labels[:, 1:] != -100)).all()
    assert (found.is_top1 == (logits.argmax(-1) == labels[:, 1:])).all()
    (found.log_probs * weights).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-4, rtol=1e-4, msg=name)


def test_attention_pads_long_rows_apart_from_short_ones() -> None:
    found = [(rows.tolist(), longest) for rows, longest in groups_of([100, 509, 90, 500, 95, 505])]
    assert found == [([1, 3, 5], 509), ([0, 2, 4], 100)]
    assert [rows.tolist() for rows, _ in groups_of(LENGTHS)] == [[0, 1, 2, 3]]  # short ones: not worth another call


def test_an_unknown_architecture_keeps_trls_forward(policy: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(policy)
    model.config.model_type = "something-new"
    assert not is_padding_free(model)
    install(model)
    assert "forward" not in vars(model)


def test_sliding_window_attention_is_not_packed() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, sliding_window=4,
    )  # fmt: skip
    assert not is_padding_free(MistralForCausalLM(config))
    config.sliding_window = None
    assert is_padding_free(MistralForCausalLM(config))


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "capability", "dropout", "softcap", "kernel"),
    [
        ("cuda", BF16, 128, (9, 0), 0.0, None, "varlen"),
        ("cuda", FP16, 64, (8, 0), 0.0, None, "varlen"),
        ("cuda", FP32, 128, (9, 0), 0.0, None, "sdpa"),
        ("cuda", BF16, 128, (7, 5), 0.0, None, "sdpa"),  # no FlashAttention
        ("cuda", BF16, 512, (9, 0), 0.0, None, "sdpa"),
        ("cuda", BF16, 20, (9, 0), 0.0, None, "sdpa"),
        ("cuda", BF16, 128, (9, 0), 0.1, None, "sdpa"),  # varlen_attn drops nothing
        ("cuda", BF16, 128, (9, 0), 0.0, 50.0, "eager"),
        ("cpu", BF16, 128, (0, 0), 0.0, None, "sdpa"),
    ],
)
def test_the_kernel_follows_from_device_and_type(
    device: str,
    dtype: torch.dtype,
    head_dim: int,
    capability: tuple[int, int],
    dropout: float,
    softcap: float | None,
    kernel: str,
) -> None:
    given = (device, dtype, head_dim, capability, dropout, softcap)
    assert choose_kernel("sdpa", *given) == kernel
    assert choose_kernel("eager", *given) == "eager"
    assert choose_kernel("flash_attention_2", *given) == choose_kernel("flash_attention_3", *given) == "flash"


def test_grouped_queries_never_get_the_math_kernel_of_a_gpu() -> None:
    few = partial(takes_few_heads, is_masked=False)
    assert few("cuda", BF16, 128, (9, 0))
    assert not few("cuda", FP32, 128, (9, 0))  # FlashAttention has no fp32
    assert not few("cuda", BF16, 512, (9, 0))
    assert not few("cuda", FP16, 128, (7, 5))  # no FlashAttention
    assert not takes_few_heads("cuda", BF16, 128, (9, 0), is_masked=True)
    assert few("cpu", FP32, 128, (0, 0))


def plain_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    ends_k: torch.Tensor,
    longest: int,
    longest_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """What ``torch.nn.attention.varlen.varlen_attn`` documents, in plain products: it runs on a GPU only."""
    assert longest == longest_k == ends.diff().max() and (ends == ends_k).all() and ends.dtype == torch.int32
    assert enable_gqa == (key.shape[1] < query.shape[1]) and window_size[1] == 0
    found = []
    for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        row_q, row_k, row_v = (
            each[start:end].repeat_interleave(query.shape[1] // each.shape[1], 1).transpose(0, 1)
            for each in (query, key, value)
        )
        distance = torch.arange(end - start).unsqueeze(1) - torch.arange(end - start)
        seen = (distance >= 0) & ((distance <= window_size[0]) | torch.tensor(window_size[0] == -1))
        scores = row_q @ row_k.transpose(1, 2) * (query.shape[-1] ** -0.5 if scale is None else scale)
        found.append((scores.masked_fill(~seen, -torch.inf).softmax(-1) @ row_v).transpose(0, 1))
    return torch.cat(found)


def as_on_a_gpu(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the branches of a GPU: FlashAttention over all rows, or SDPA that takes no fewer key heads."""
    monkeypatch.setattr(padding_free, "choose_kernel", lambda *_: kernel)
    monkeypatch.setattr(padding_free, "takes_few_heads", lambda *_, **__: False)
    monkeypatch.setattr(padding_free, "varlen_attn", plain_varlen)


def plain_flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float | None, causal: bool,
    window_size: tuple[int, int], softcap: float, deterministic: bool,
) -> torch.Tensor:  # fmt: skip
    """What ``flash_attn_varlen_func`` of flash-attn documents, in plain products."""
    assert causal and not softcap and not deterministic
    return plain_varlen(
        query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale=softmax_scale,
        window_size=window_size, enable_gqa=key.shape[1] < query.shape[1],
    )  # fmt: skip


@pytest.mark.parametrize("kernel", ["varlen", "sdpa", "eager", "flash"])
@pytest.mark.parametrize("same_start", [None, 0, 3])
def test_the_branches_of_a_gpu_give_the_numbers_of_a_padded_forward(
    policy: Path, kernel: str, same_start: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_on_a_gpu(kernel, monkeypatch)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=plain_flash))
    model, line = (AutoModelForCausalLM.from_pretrained(policy).train() for _ in range(2))
    install(line, {"flash": "flash_attention_2", "eager": "eager"}.get(kernel))
    inputs = batch(same_start=same_start or 0)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    logits = model(**inputs).logits[:, :-1]
    expected = -torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none")
    shared = None if same_start is None else common_tokens(inputs["input_ids"], inputs["attention_mask"])
    found = line(**inputs, **pack(inputs["attention_mask"], shared), labels=labels, use_cache=False).log_probs
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    for losses in (expected, found):
        losses.sum().backward()
    for (name, left), right in zip(model.named_parameters(), line.parameters(), strict=True):
        torch.testing.assert_close(right.grad, left.grad, atol=1e-4, rtol=1e-4, msg=name)


def test_rows_of_one_length_never_get_the_math_kernel_of_a_gpu(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunks of CPT: no padding to leave out, and no mask."""
    model, line = (AutoModelForCausalLM.from_pretrained(policy).train() for _ in range(2))
    install(line)
    used, sdpa = [], torch.nn.functional.scaled_dot_product_attention
    as_on_a_gpu("sdpa", monkeypatch)
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention",
        lambda *args, **kwargs: used.append(kwargs["enable_gqa"]) or sdpa(*args, **kwargs),
    )  # fmt: skip
    ids = torch.randint(3, 300, (2, 12), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    found = line(**inputs, labels=ids, use_cache=False).log_probs
    assert used == [False, False]
    monkeypatch.undo()
    expected = model(**inputs).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:].unsqueeze(2)).squeeze(2)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
