"""The formulas against what torch allocates for a tiny model; the peak of this machine."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tasks.context import Resources
from tasks.judgement.estimate import architecture, memory
from tasks.sft import SFT
from tasks.train.loop.speed import measured_peak


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_formulas_are_what_torch_allocates(kv_heads):
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=kv_heads, tie_word_embeddings=kv_heads == 1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    kept = set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.add((tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()))
        return tensor

    tokens = torch.arange(2 * 40).reshape(2, 40) % 50
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(input_ids=tokens, labels=tokens)
    storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved = sum(size for place, size in kept if place not in storages)
    out.loss.backward()
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


def test_a_cpu_has_a_peak_and_the_random_numbers_of_the_training_stay():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert 1e8 < measured_peak(False, "fp32") < 1e14
    assert torch.equal(torch.get_rng_state(), before)
