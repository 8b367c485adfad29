"""Each term of the formulas by hand, for two models."""

import math
from dataclasses import replace

import pytest

from lineage.errors import ConfigError
from tasks.context import Resources
from tasks.distill import Distillation
from tasks.dpo import DPO
from tasks.grpo import GRPO
from tasks.judgement import estimate
from tasks.judgement.estimate import (
    Architecture,
    architecture,
    flops_per_token,
    memory,
    num_weights,
    traffic,
    trained_weights,
    work,
)
from tasks.method import Adapter, Optimizer, Quantization
from tasks.ppo import PPO
from tasks.reward_functions import RewardFunction
from tasks.reward_model import RewardModel
from tasks.sft import SFT
from tasks.train.generation.generating import Sampling
from tasks.train.sharding import BUCKET_ELEMENTS

LLAMA = {  # SmolLM2-135M
    "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "vocab_size": 100, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None}
STAGE = {"num_steps": 10, "global_batch_size": 8, "max_length": 64}
CPU = Resources(micro_batch_size=2)


def of(config: dict[str, object]) -> Architecture:
    found = architecture(config)
    assert found
    return found


def test_weights_of_two_models_by_hand():
    llama = of(LLAMA)
    layer = 576 * 576 * 2 + 2 * 576 * 192 + 3 * 576 * 1536 + 2 * 576
    assert trained_weights(SFT(**STAGE), llama.shapes()).base == 49152 * 576 + 30 * layer + 576 == 134_515_008
    mixtral = of(MIXTRAL)
    layer = 8 * 8 * 2 + 2 * 8 * 4 + 4 * 3 * 8 * 16 + 4 * 8 + 2 * 8
    assert trained_weights(SFT(**STAGE), mixtral.shapes()).base == 2 * 100 * 8 + 2 * layer + 8


@pytest.mark.parametrize(
    ("installed", "fields", "resources", "expected"),
    [
        ((), {}, {}, "transformers (liger-kernel is not installed: pip install 'posttrain[gpu]')"),
        (("liger_kernel",), {}, {}, "Liger where it has the architecture (liger-kernel 0.8.5 is installed)"),
        (("liger_kernel",), {"precision": "fp32"}, {}, "transformers (precision=fp32)"),
        (("liger_kernel",), {}, {"deterministic": True}, "transformers (Liger is not deterministic)"),
        ((), {}, {"liger": True}, "Liger (resources.liger=true)"),
        (
            (),
            {},
            {"liger": False, "compile": True},
            "transformers (resources.liger=false), compiled (resources.compile=true)",
        ),
    ],
)
def test_the_layers_of_a_gpu_are_named_with_their_reason(installed, fields, resources, expected, monkeypatch):
    monkeypatch.setattr(estimate, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(estimate, "version", lambda name: "0.8.5")
    method = SFT(**{**STAGE, "precision": "bf16", **fields})
    gpu = Resources(gpus_per_worker=1, **resources)
    assert estimate.kernels_in_use(method, gpu) == {"layers": expected}
    assert estimate.uses_fused_layers(method, gpu) == expected.startswith("Liger")
    assert estimate.kernels_in_use(method, CPU) == {}
    split = replace(method, optimizer=Optimizer(weights="bf16"))
    steps = "adamw_torch_fused, which keeps the lower 16 bits of weights in bf16 (optimizer.weights=bf16)"
    assert [estimate.kernels_in_use(split, each).get("steps") for each in (gpu, CPU)] == [steps, steps]


@pytest.mark.parametrize(
    ("installed", "fields", "expected"),
    [
        ((), {}, "a CUDA graph a token where the architecture is plain attention (vLLM is not installed)"),
        (("vllm",), {"vllm": "colocate"}, "vLLM (method.vllm=colocate)"),
        (
            ("vllm",), {"sampling": Sampling(repetition_penalty=1.1)},
            "transformers (sampling.repetition_penalty; method.vllm=colocate, which changes the recipe, takes vLLM)",
        ),
    ],
)  # fmt: skip
def test_what_samples_on_a_gpu_is_named_with_its_reason(installed, fields, expected, monkeypatch):
    monkeypatch.setattr(estimate, "find_spec", lambda name: name if name in installed else None)
    gpu, method = Resources(gpus_per_worker=1), GRPO(num_steps=1, **fields)
    assert estimate.kernels_in_use(method, gpu)["completions"] == expected
    if not fields:
        divided = estimate.kernels_in_use(method, replace(gpu, sharding="fsdp"))["completions"]
        assert divided == "transformers (sharding=fsdp divides the weights; vLLM is not installed)"


def test_eight_billion_weights_in_bf16_fit_a_card_of_80_gb():
    config = {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
    }  # fmt: skip
    found = of(config)
    gpu = Resources(gpus_per_worker=1, micro_batch_size="auto", gradient_checkpointing="on")
    fields = {"num_steps": 10, "global_batch_size": 64, "max_length": 4096, "precision": "bf16"}
    linear, others = 8_030_261_248 - 128256 * 4096 - 65 * 4096, 128256 * 4096 + 65 * 4096
    method = SFT(**fields, optimizer=Optimizer(name="adamw_8bit", weights="bf16"))
    terms = memory(method, gpu, found, found.shapes(), 4096, mean=1000, capacity=80 * 2**30)
    assert terms.weights == terms.gradients == 2 * linear + 4 * others
    assert terms.optimizer == 2 * linear + 2 * (linear + others)
    assert estimate.tokens_at_once(method, gpu, found, found.shapes(), int(80e9)) > 4096  # a row
    plain = memory(SFT(**fields, optimizer=Optimizer(name="adamw_8bit")), gpu, found, found.shapes(), 4096)
    assert plain.model > 80e9


@pytest.mark.parametrize(("config", "weights"), [(LLAMA, 134_515_008), (MIXTRAL, 5160)])
def test_what_is_trained_has_gradients_and_moments(config, weights):
    assert trained_weights(SFT(**STAGE), of(config).shapes()).base == weights
    found = memory(SFT(**STAGE), CPU, of(config), of(config).shapes(), 64)
    assert (found.weights, found.gradients, found.optimizer) == (4 * weights, 4 * weights, 8 * weights)
    plain = memory(SFT(**STAGE, optimizer=Optimizer(name="sgd")), CPU, of(config), of(config).shapes(), 64)
    assert plain.optimizer == 0
    shared = replace(CPU, zero_stage=2, num_workers=4)
    divided = memory(SFT(**STAGE), shared, of(config), of(config).shapes(), 64)
    # ZeRO steps a copy of its part of the weights, and has a buffer of gradients.
    assert (divided.weights, divided.optimizer) == (4 * weights, 3 * weights)
    assert divided.gradients == weights + 4 * min(weights, BUCKET_ELEMENTS)


def test_workers_hold_the_gradients_of_accumulated_micro_batches_beside_the_buckets():
    llama = of(LLAMA)

    def gradients(method, **resources: int) -> float:
        found = memory(method, replace(CPU, **resources), llama, llama.shapes(), 64)
        return found.gradients / 4 / 134_515_008

    sft = SFT(**STAGE)
    assert gradients(sft, num_workers=1, micro_batch_size=1) == 1
    assert gradients(sft, num_workers=4, micro_batch_size=2) == 1  # 8 rows: each micro batch is exchanged
    assert gradients(sft, num_workers=4, micro_batch_size=1) == 2
    ppo = PPO(num_steps=1, max_length=64, max_completion_length=32, global_batch_size=8)
    assert gradients(ppo, num_workers=4, micro_batch_size=1) == 2  # of two models, and its loop has no buckets


@pytest.mark.parametrize(
    ("config", "per_token"), [(LLAMA, 30 * (9 * 576 + 2 * 192 + 4 * 1536)), (MIXTRAL, 2 * (9 * 8 + 2 * 4 + 4 * 16 * 2))]
)
def test_activations_and_logits_by_hand(config, per_token):
    found = memory(SFT(**STAGE), CPU, of(config), of(config).shapes(), 64)
    assert found.activations == 2 * 64 * per_token * 4
    assert found.logits == 2 * 64 * int(config["vocab_size"]) * 4 * 3
    halves = memory(SFT(**STAGE, precision="bf16"), CPU, of(config), of(config).shapes(), 64)
    layers = int(config["num_hidden_layers"])
    probabilities = layers * int(config["num_attention_heads"]) * 64 // 2  # of a token: half of the pairs of its row
    assert halves.activations == found.activations / 2 + 2 * 64 * probabilities * 2
    kept = memory(SFT(**STAGE), replace(CPU, gradient_checkpointing="on"), of(config), of(config).shapes(), 64)
    assert kept.activations == 2 * 64 * (layers * int(config["hidden_size"]) + per_token // layers) * 4
    smaller = memory(SFT(**STAGE), replace(CPU, micro_batch_size=1), of(config), of(config).shapes(), 32)
    assert (smaller.activations, smaller.logits) == (found.activations / 4, found.logits / 4)


def test_pairs_a_reference_and_a_head():
    shapes = of(LLAMA).shapes()
    sft = memory(SFT(**STAGE), CPU, of(LLAMA), shapes, 64)
    dpo = memory(DPO(**STAGE), CPU, of(LLAMA), shapes, 64)
    assert (dpo.frozen, dpo.activations, dpo.logits) == (sft.weights, 2 * sft.activations, 2 * sft.logits)
    assert memory(DPO(**STAGE), replace(CPU, precompute_reference=True), of(LLAMA), shapes, 64).frozen == 0
    reward = memory(RewardModel(**STAGE), CPU, of(LLAMA), shapes, 64)
    assert (reward.frozen, reward.logits) == (0, 2 * 2 * 4)  # a number per sequence


def test_all_completions_of_a_worker_are_generated_at_once():
    llama, grpo = of(LLAMA), GRPO(num_steps=1, max_length=64, max_completion_length=32, global_batch_size=16)
    found = memory(grpo, CPU, llama, llama.shapes(), 64)
    assert found.cache == 2 * 30 * 3 * 64 * 64 * 16 * 4  # keys and values: layers, heads, head, tokens, rows, fp32
    assert memory(grpo, replace(CPU, num_workers=2), llama, llama.shapes(), 64).cache == found.cache / 2
    assert memory(grpo, replace(CPU, micro_batch_size=1), llama, llama.shapes(), 64).cache == found.cache
    assert memory(SFT(**STAGE), CPU, llama, llama.shapes(), 64).cache == 0


def test_a_teacher_and_a_reward_model_have_their_own_size_and_an_empty_slot_has_none():
    llama = of(LLAMA)
    distilled = memory(Distillation(**STAGE), CPU, llama, llama.shapes(), 64, {"teacher": 1000})
    assert distilled.frozen == 4000
    grpo = GRPO(num_steps=1, max_length=64, max_completion_length=32)
    assert memory(grpo, CPU, llama, llama.shapes(), 64, {}).frozen == 0
    assert memory(grpo, CPU, llama, llama.shapes(), 64, {"reward_model": 7}).frozen == 28
    near = replace(grpo, beta=0.1)
    assert memory(near, CPU, llama, llama.shapes(), 64, {}).frozen == 4 * 134_515_008  # the reference


def test_an_adapter_and_few_bits():
    shapes, adapter = of(LLAMA).shapes(), Adapter(type="lora", rank=8)
    ranks = 30 * 8 * ((576 + 576) * 2 + (576 + 192) * 2 + (576 + 1536) * 3)
    lora = memory(DPO(**STAGE, adapter=adapter), CPU, of(LLAMA), shapes, 64)
    assert (lora.weights, lora.gradients, lora.optimizer) == (4 * (134_515_008 + ranks), 4 * ranks, 8 * ranks)
    assert lora.frozen == 0  # the reference is the policy without its adapter
    stacked = memory(DPO(**STAGE, adapter=adapter, adapter_in="stack"), CPU, of(LLAMA), shapes, 64)
    assert stacked.frozen == 4 * 134_515_008  # and of an adapter on another one a model of its own
    gpu = replace(CPU, gpus_per_worker=1)
    bits = DPO(**STAGE, adapter=adapter, precision="bf16", quantization=Quantization(format="nf4"))
    linear = 30 * (576 * 576 * 2 + 2 * 576 * 192 + 3 * 576 * 1536)
    qlora = memory(bits, gpu, of(LLAMA), shapes, 64)
    assert qlora.weights == int(linear / 2 * 1.03) + (134_515_008 - linear) * 2 + 4 * ranks


def test_arithmetic_by_hand():
    llama, full = of(LLAMA), SFT(**STAGE)
    weights = 30 * (576 * 576 * 2 + 2 * 576 * 192 + 3 * 576 * 1536) + 576 * 49152
    forward = 2 * weights + 30 * 2 * 576 * 64
    assert flops_per_token(llama, full, CPU, 64) == 3 * forward
    assert flops_per_token(llama, DPO(**STAGE), CPU, 64) == 4 * forward
    assert flops_per_token(llama, SFT(**STAGE, adapter=Adapter(type="lora")), CPU, 64) == 2 * forward
    assert flops_per_token(llama, full, replace(CPU, gradient_checkpointing="on"), 64) == 4 * forward
    # A reward model has no head over the vocabulary.
    scored = forward - 2 * 576 * 49152
    assert flops_per_token(llama, RewardModel(**STAGE), CPU, 64) == 3 * scored
    # PPO samples, measures policy and reference, and trains the policy in each of four epochs; the value model, without
    # such a head, is measured and trained as often; and a reward model scores.
    ppo = PPO(num_steps=1, max_length=64, max_completion_length=32)
    assert flops_per_token(llama, ppo, CPU, 64) == (1 + 2 + 4 * 3) * forward + (1 + 4 * 3 + 1) * scored
    rewards = {"exact": RewardFunction(function="exact")}
    grpo = GRPO(num_steps=1, max_length=64, max_completion_length=32, rewards=rewards)
    assert flops_per_token(llama, grpo, CPU, 64) == 4 * forward
    assert flops_per_token(llama, grpo, CPU, 64, {"reward_model"}) == 4 * forward + scored
    found = work(full, CPU, llama, llama.shapes(), num_steps=10, tokens=64)
    assert (found.tokens, found.passes, found.flops) == (10 * 8 * 64, 40, 10 * 8 * 64 * 3 * forward)


def test_an_mlp_without_a_gate_has_two_matrices():
    gpt2 = architecture(GPT2)
    assert gpt2 and not gpt2.gated and of(LLAMA).gated
    weights = 12 * (4 * 768 * 768 + 2 * 768 * 3072) + 768 * 50257
    assert flops_per_token(gpt2, SFT(**STAGE), CPU, 64) == 3 * (2 * weights + 12 * 2 * 768 * 64)
    linear = sum(math.prod(shape) for name, shape in gpt2.shapes().items() if "proj" in name)
    assert linear == 12 * (4 * 768 * 768 + 2 * 768 * 3072)  # 84.9M, as the released model


def test_a_config_without_the_numbers_is_unknown():
    assert architecture({"model_type": "mamba", "hidden_size": 8}) is None
    gpt2 = of({"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 10})
    assert (gpt2.intermediate, gpt2.head, gpt2.tied) == (32, 4, True)


H100 = int(79.2 * 2**30 * 0.95) - 2**29


@pytest.mark.parametrize(
    ("fields", "resources", "peak_gib"),
    [
        ({}, {}, 69.67),
        ({}, {"gradient_checkpointing": "on"}, 21.47),
        ({"adapter": Adapter(rank=16)}, {}, 45.60),
        ({"adapter": Adapter(rank=16, quantization="nf4")}, {}, 44.25),
    ],
    ids=["full", "checkpointed", "lora", "nf4"],
)
def test_memory_on_an_h100_is_foretold(monkeypatch, fields, resources, peak_gib):
    """The peaks of bench/baselines: rows of 527 tokens in the mean, 64 in a step."""
    monkeypatch.setattr(estimate, "find_spec", lambda name: name)
    method = SFT(precision="bf16", max_length=2048, num_steps=10, global_batch_size=64, **fields)
    where = Resources(gpus_per_worker=1, micro_batch_size="auto", **resources)
    config = {
        "model_type": "llama", "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    }  # fmt: skip
    found = architecture(config)
    total = memory(method, where, found, found.shapes(), 2048, mean=527, capacity=H100).total
    assert total / 2**30 == pytest.approx(peak_gib, rel=0.1)


def test_the_weights_of_the_files_count_and_not_names_of_the_llama_family() -> None:
    shapes = {"wte.weight": (16, 8), "h.0.attn.c_attn.weight": (8, 24), "h.0.mlp.c_fc.weight": (8, 32)}
    adapted = SFT(**STAGE, adapter=Adapter(type="lora", rank=2, target_modules="c_attn"))
    assert trained_weights(adapted, shapes).trained == 2 * (8 + 24)
    with pytest.raises(ConfigError, match="no linear layer c_attn"):
        trained_weights(adapted, of(GPT2).shapes())  # the names of the Llama family


@pytest.mark.parametrize(
    ("sharding", "weights", "gradients", "optimizer"),
    [
        ("zero1", 4, 4, 12 / 4),
        ("zero2", 4, 4 / 4, 12 / 4),
        ("zero2_offload", 4, 2 * 4 / 4, 12 / 4),  # on a CPU there is one memory; gradients of two passes
        ("zero3", 4 / 4, 4 / 4, 12 / 4),
        ("fsdp", 4 / 4, 4 / 4, 8 / 4),
        ("fsdp_grad", 4 / 4 + 4, 4 / 4, 8 / 4),
        ("fsdp_hybrid", 4 / 2, 4 / 2, 8 / 2),
    ],
)
def test_workers_hold_a_part_of_what_the_sharding_divides(sharding, weights, gradients, optimizer):
    """Of many layers: what is whole for a moment is a small share."""
    llama = of({**LLAMA, "num_hidden_layers": 1000, "vocab_size": 100})
    base = trained_weights(SFT(**STAGE), llama.shapes()).base
    resources = replace(CPU, num_workers=4, num_nodes=2 if sharding == "fsdp_hybrid" else 1, micro_batch_size=1)
    found = memory(SFT(**STAGE), resources.sharded(sharding), llama, llama.shapes(), 64)
    assert found.weights / base == pytest.approx(weights, rel=0.02)
    buffer = 4 * BUCKET_ELEMENTS if sharding.startswith("zero") else 0
    assert (found.gradients - buffer) / base == pytest.approx(gradients, rel=0.02)
    assert found.optimizer / base == pytest.approx(optimizer, rel=0.02)


def test_what_a_worker_sends_in_a_step():
    llama, sft, mib = of(LLAMA), SFT(**STAGE), 2**20
    weights = num_weights(llama.shapes())
    ends = 49152 * 576 + 576
    four = replace(CPU, num_workers=4, micro_batch_size=1)

    def sent(sharding: str, **fields: object) -> float:
        return traffic(sft, replace(four.sharded(sharding), **fields), llama.shapes(), 2) / mib

    assert sent("none") == pytest.approx(0.75 * 8 * weights / mib)
    assert sent("zero1") == pytest.approx(0.75 * 12 * weights / mib)
    assert sent("zero2") == pytest.approx(0.75 * 20 * weights / mib)  # in two passes
    assert sent("zero3") == pytest.approx(2 * 0.75 * 12 * weights / mib)
    assert sent("fsdp") == pytest.approx(2 * 0.75 * 4 * (2 * (weights - ends) + ends + weights) / mib)
    assert sent("fsdp_grad") == pytest.approx(2 * 0.75 * 8 * weights / mib)
    hybrid = 2 * (0.5 * 4 * (2 * (weights - ends) + ends + weights) + 2 * 0.5 * 2 * weights)
    assert sent("fsdp_hybrid", num_nodes=2) == pytest.approx(hybrid / mib)
    assert sent("fsdp") - sent("fsdp", reduce_dtype="bf16") == pytest.approx(2 * 0.75 * 2 * weights / mib)
    assert traffic(sft, CPU, llama.shapes(), 2) == 0
