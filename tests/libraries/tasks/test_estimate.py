"""The formulas against what torch allocates for a tiny model; the peak of this machine."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForImageTextToText, LlamaConfig, LlamaForCausalLM, LlamaModel

from tasks.context import Resources
from tasks.data.images import Images
from tasks.judgement.disk_need import parts_trained
from tasks.judgement.estimate import architecture, memory
from tasks.method import Adapter
from tasks.sft import SFT
from tasks.train.kernels.fast_lora import speed_up
from tasks.train.loop.speed import measured_peak
from tasks.train.models.freeze import freeze_unread


def kept_bytes(model: torch.nn.Module, forward: Callable[[], object]) -> int:
    """The bytes that a forward pass keeps for the backward pass, beside the weights."""
    kept = dict[int, torch.UntypedStorage]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
    return sum(each.nbytes() for place, each in kept.items() if place not in weights)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_formulas_are_what_torch_allocates(kv_heads):
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=kv_heads, tie_word_embeddings=kv_heads == 1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.arange(2 * 40).reshape(2, 40) % 50
    saved = kept_bytes(model, lambda: model(input_ids=tokens, labels=tokens))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    found = architecture(config.to_dict())
    assert found
    method = SFT(num_steps=1, global_batch_size=2, max_length=40)
    own = memory(method, Resources(micro_batch_size=2), found, found.shapes(), 40)
    gradients = sum(each.grad.nbytes for each in model.parameters())
    moments = sum(value.nbytes for state in optimizer.state.values() for value in state.values() if value.ndim)
    assert own.weights == sum(each.nbytes for each in model.parameters())
    assert (own.gradients, own.optimizer) == (gradients, moments)
    assert own.activations + own.logits == pytest.approx(saved, rel=0.25)


@pytest.mark.parametrize("adapter", [None, Adapter(rank=8)])
@pytest.mark.parametrize(
    ("hidden", "inner", "heads", "kv_heads", "layers"), [(256, 1024, 8, 2, 3), (128, 384, 4, 4, 5)]
)
def test_activations_of_a_gpu_are_what_layers_keep_in_bf16(hidden, inner, heads, kv_heads, layers, adapter):
    """Without Liger, whose layers no CPU can run; beside them the formula has half a layer's gradients."""
    config = LlamaConfig(
        vocab_size=50, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads,
    )  # fmt: skip
    model, tokens = LlamaModel(config), torch.arange(2 * 128).reshape(2, 128) % 50
    if adapter:
        model = get_peft_model(model.bfloat16(), LoraConfig(r=8, target_modules="all-linear"))
        assert speed_up(model, on_cpu=True) == 7 * layers
    with torch.autocast("cpu", torch.bfloat16):
        counted = kept_bytes(model, lambda: model(input_ids=tokens))
    found = architecture(config.to_dict())
    assert found
    method = SFT(num_steps=1, global_batch_size=2, max_length=128, precision="bf16", adapter=adapter)
    gpu = Resources(micro_batch_size=2, gpus_per_worker=1, liger=False)
    own = memory(method, gpu, found, found.shapes(), 128).activations
    linear = layers * hidden * (2 * hidden + 2 * hidden // heads * kv_heads + 3 * inner)
    casts = 0 if adapter else 2 * linear
    assert casts + (own - casts) * layers / (layers + 0.5) == pytest.approx(counted, rel=0.1)


TEXT = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2}  # fmt: skip
WIDE = {"hidden_size": 64, "intermediate_size": 256, "out_hidden_size": 32}
SEEING: dict[str, tuple[dict[str, object], dict[str, object], int]] = {  # config, what it reads of two images, tokens
    "llava": (
        {"text_config": {**TEXT, "model_type": "llama"}, "image_token_index": 49, "vision_feature_layer": -1,
         "vision_config": {**WIDE, "model_type": "clip_vision_model", "num_hidden_layers": 4,
                           "num_attention_heads": 4, "image_size": 112, "patch_size": 14}},
        {"pixel_values": torch.randn(2, 3, 112, 112)}, 64,
    ),
    "qwen2_5_vl": (
        {"text_config": {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                     "mrope_section": [2, 3, 3]}},
         "vision_config": {**WIDE, "depth": 4, "num_heads": 4, "patch_size": 4, "window_size": 16},
         "image_token_id": 49},
        {"pixel_values": torch.randn(2 * 256, 96), "image_grid_thw": torch.tensor([[1, 16, 16]] * 2)}, 64,
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", SEEING)
def test_what_reads_images_is_in_the_estimate(family: str) -> None:
    """Its weights, and what the backward pass keeps of it where it is trained, counted as above."""
    fields, seen, count = SEEING[family]
    config = AutoConfig.for_model(family, **fields)
    model = AutoModelForImageTextToText.from_config(config)
    tokens = torch.tensor([[1, *[49] * count, *range(2, 10)]] * 2)
    types = {"mm_token_type_ids": (tokens == 49).int()} if family == "qwen2_5_vl" else {}
    found = architecture(config.to_dict(), {"max_pixels": 4**2 * 256})
    assert found
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    counted, estimated = [], []
    for trains in (None, ("vision",), ("vision", "projector")):
        method = SFT(num_steps=1, global_batch_size=2, max_length=tokens.shape[1], images=Images(trains=trains))
        for each in model.parameters():
            each.requires_grad_(True)
        freeze_unread(model, parts_trained(method))
        inputs = {"input_ids": tokens, "labels": tokens, **seen, **types}
        counted.append(kept_bytes(model, lambda inputs=inputs: model(**inputs)))
        own, text = (
            memory(each, Resources(micro_batch_size=2), found, shapes, tokens.shape[1])
            for each in (method, replace(method, images=None))
        )
        estimated.append(own.activations - text.activations)
        assert own.weights == sum(each.nbytes for each in model.parameters())
        assert own.gradients == sum(each.nbytes for each in model.parameters() if each.requires_grad)
    assert 0 < estimated[0] < estimated[1] / 2  # the tower keeps nothing
    assert estimated[1:] == [pytest.approx(each - counted[0], rel=0.15) for each in counted[1:]]


def test_a_cpu_has_a_peak_and_the_random_numbers_of_the_training_stay():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert 1e8 < measured_peak(False, "fp32") < 1e14
    assert torch.equal(torch.get_rng_state(), before)
