"""Every type and initialization of an adapter trains its own weights, and its output is the model in training."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config
from trl.trainer.utils import use_adapter

from lineage.artifact import Kind
from lineage.errors import ConfigError
from tasks.context import Resources
from tasks.judgement.disk_need import adapter_weights, model_shapes, percent_trained
from tasks.method import Adapter, Quantization, Training
from tasks.train.kernels import padding_free
from tasks.train.models.adapted import continued, peft_config, stacked
from tasks.train.models.adapters import ADAPTERS, MIXTURES, NOT_ON_CONV1D, why_not_stacked
from tasks.train.models.freeze import Freeze
from tasks.train.models.load import whole_model
from tests import tiny, tiny_models, training
from tests.training import answers

SIZES: dict[str, dict[str, object]] = {
    "oft": {"block_size": 8}, "boft": {"block_size": 8}, "fourierft": {"num_frequencies": 50}, "ia3": {},
    "ln_tuning": {},
}  # fmt: skip
TYPES = {name: Adapter(type=name, **SIZES.get(name, {"rank": 4})) for name in ADAPTERS}  # type: ignore[arg-type]
INITS = {
    name: Adapter(init=name, rank=4)
    for name in (
        "gaussian",
        "xavier",
        "xavier_uniform",
        "pissa",
        "pissa_niter_4",
        "olora",
        "orthogonal",
        "mica",
        "eva",
        "lora_ga",
    )
}
CHOICES = {
    "rslora": Adapter(rank=4, rslora=True),
    "rslora_pissa": Adapter(rank=4, rslora=True, init="pissa"),
    "attention": Adapter(rank=4, target_modules="attention"),
    "mlp": Adapter(rank=4, target_modules="mlp"),
    "glob": Adapter(rank=4, target_modules="*.q_proj,*.1.*.v_proj"),
    "excluded": Adapter(rank=4, exclude_modules="*.0.*,k_proj"),
    "layers": Adapter(rank=4, layers=(1,)),
    "vera_mlp": Adapter(type="vera", rank=4, target_modules="mlp"),
    "ln_layers": Adapter(type="ln_tuning", layers=(0,)),
    "dropout": Adapter(rank=4, dropout=0.3),
    "dropout_post": Adapter(rank=4, dropout=0.3, dropout_position="post"),
    "modules_to_save": Adapter(rank=4, modules_to_save="norm"),
    "ln_modules_to_save": Adapter(type="ln_tuning", modules_to_save="v_proj"),
    "tokens": Adapter(rank=4, trainable_token_indices=(5, 6)),
    "lora_ga_mlp": Adapter(rank=4, init="lora_ga", target_modules="mlp"),
}  # fmt: skip
OTHER = {
    "rank": 2, "alpha": 8, "dropout": 0.5, "block_size": 4, "num_frequencies": 40, "target_rank": 1, "rslora": True,
    "init": "orthogonal", "trainable_token_indices": (5, 6),
}  # fmt: skip
SHARED = ("rank", "alpha", "dropout")
ALL = {**TYPES, **INITS, **CHOICES}
SLOW = pytest.mark.slow
# Tried quickly: one type of each construction, the initializations that read the base or rows, and each option.
QUICK_TYPES = ("lora", "dora", "adalora", "vera", "oft", "ia3", "ln_tuning")
QUICK = (
    *QUICK_TYPES, "pissa", "eva", "lora_ga", "rslora", "glob", "excluded", "layers", "ln_layers", "dropout_post",
    "modules_to_save", "tokens",
)  # fmt: skip


def exact_answers(model: torch.nn.Module) -> torch.Tensor:
    """Computed in float64, so that only the rounding of saved weights is left between two models."""
    return answers(copy.deepcopy(model).double()).float()


@pytest.fixture(scope="module")
def seen() -> dict[tuple[float, ...], str]:
    """The losses of each training of this file."""
    return {}


def in_training(method: Training, output: Path, root: Path, policy: Path | None = None):
    """The run, the losses, and what the model in training answers at the end."""
    run, trainer, losses = training.fitted(method, training.inputs(root, method, policy=policy), output)
    return run, tuple(losses), exact_answers(trainer.model.get_base_model())


@pytest.mark.parametrize("name", [pytest.param(each, marks=[] if each in QUICK else SLOW) for each in ALL])
def test_an_adapter_trains_its_own_weights_and_is_saved_as_it_was_trained(
    root: Path, tmp_path: Path, seen: dict[tuple[float, ...], str], name: str
) -> None:
    method = training.method("sft", adapter=ALL[name], num_steps=8, learning_rate=1e-2)
    run, losses, found = in_training(method, tmp_path / "output", root)
    assert seen.setdefault(losses, name) == name  # no two are the same training
    assert not torch.equal(exact_answers(whole_model(Kind.CHECKPOINT, root / "policy")), found)
    run.save()
    torch.testing.assert_close(exact_answers(whole_model(Kind.CHECKPOINT, tmp_path / "output")), found)
    upon = whole_model(Kind.CHECKPOINT, root / "policy", last=tmp_path / "output" / "adapter")
    torch.testing.assert_close(exact_answers(upon), found, atol=2e-5, rtol=1e-5)
    trained, saved = adapter_weights(ALL[name], model_shapes(root / "policy"))
    assert run.share["trained_parameters"] == trained
    if not ALL[name].changes_the_base:  # saved with twice the rank
        assert sum(each.numel() for each in _saved(tmp_path / "output").values()) == saved


@pytest.mark.parametrize(
    ("name", "field"),
    [
        # How a type takes a field that others have too is a table: quick of one type, slow of the others.
        pytest.param(name, field, marks=[] if name == "lora" or (name in QUICK_TYPES and field not in SHARED) else SLOW)
        for name, row in ADAPTERS.items()
        for field in row.reads
        # Biases: below; DoRA refuses it; the position of dropout: above.
        if field not in ("bias", "dropout_position") and (name, field) != ("dora", "init")
    ],
)
def test_every_field_that_a_type_reads_changes_its_training(
    root: Path, tmp_path: Path, plain: dict[str, list[float]], name: str, field: str
) -> None:
    steps = 8 if name == "adalora" else 3
    for each in (None, OTHER[field]):
        if each is None and name in plain:
            continue
        adapter = TYPES[name] if each is None else replace(TYPES[name], **{field: each})
        method = training.method("sft", adapter=adapter, num_steps=steps, learning_rate=1e-2)
        losses = training.train(method, root, tmp_path / str(each)).losses
        if each is None:
            plain[name] = losses
    assert losses != plain[name]


@pytest.fixture(scope="module")
def plain() -> dict[str, list[float]]:
    """The losses of each type before a field is changed."""
    return {}


def _saved(output: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(output / "adapter" / "adapter_model.safetensors")


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_biases_are_trained_and_the_reference_of_dpo_keeps_its_own(root: Path, tmp_path: Path, bias: str) -> None:
    policy = tiny.write_tokenizer(tmp_path / "gpt2")
    config = GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=2, n_positions=256)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(policy)
    for stage in ("sft", "dpo"):
        adapter = Adapter(rank=4, bias=bias)  # type: ignore[arg-type]
        method = training.method(stage, adapter=adapter, learning_rate=1e-2)
        run, losses, logits = in_training(method, tmp_path / stage, root, policy)
        plain = replace(method, adapter=Adapter(rank=4))
        assert in_training(plain, tmp_path / f"{stage}-plain", root, policy)[1] != losses
        run.save()
        torch.testing.assert_close(exact_answers(whole_model(Kind.CHECKPOINT, tmp_path / stage)), logits)
        upon = whole_model(Kind.CHECKPOINT, policy, last=tmp_path / stage / "adapter")
        torch.testing.assert_close(exact_answers(upon), logits, atol=2e-5, rtol=1e-5)
        assert run.share["trained_parameters"] == adapter_weights(adapter, model_shapes(policy))[0]
    with pytest.raises(ConfigError, match=r"adapter.bias=.*llama.* has no biases"):
        training.train(training.method("sft", adapter=Adapter(bias=bias)), root, tmp_path / "none")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("architecture", "adapter"),
    [
        ("llama", TYPES["ln_tuning"]),
        ("llama", CHOICES["modules_to_save"]),
        ("llama", Adapter(rank=4, trainable_token_indices=(70, 80))),
        ("gpt2", Adapter(rank=4, bias="all")),
    ],
    ids=["ln_tuning", "modules_to_save", "tokens", "bias"],
)
def test_what_peft_copies_from_a_base_in_bf16_is_saved_and_continued_as_it_was_trained(
    root: Path, tmp_path: Path, architecture: str, adapter: Adapter
) -> None:
    policy = tiny_models.write_model(tmp_path / "policy", architecture)
    method = training.method("sft", adapter=adapter, precision="bf16", num_steps=2, learning_rate=1e-3)
    training.train(method, root, tmp_path / "output", policy=policy, resources=Resources(weights="bf16"))
    saved = _saved(tmp_path / "output")
    copied = {name: each for name, each in saved.items() if ".lora_" not in name}
    assert not training.same(copied, {name: each.bfloat16() for name, each in copied.items()})
    model = whole_model(Kind.CHECKPOINT, policy, held="bf16")
    adapted = continued(model, adapter, peft_config(adapter, model, 2), tmp_path / "output" / "adapter")
    assert training.same(saved, get_peft_model_state_dict(adapted))
    if why_not_stacked(adapted.peft_config["default"].to_dict()) is None:
        below = stacked(whole_model(Kind.CHECKPOINT, policy, held="bf16"), [tmp_path / "output" / "adapter"])
        assert training.same(saved, get_peft_model_state_dict(below, adapter_name="stacked0"))
        assert not any(
            each.requires_grad for each in below.get_base_model().parameters() if each.dtype != torch.float32
        )


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (Adapter(target_modules="*.nothing"), r"no linear layer \*.nothing; it has down_proj"),
        (Adapter(exclude_modules="w2"), "exclude_modules=w2: the model has no linear layer w2"),
        (Adapter(layers=(7,)), r"in no layer 7; they are in 0, 1"),
        (Adapter(exclude_modules="*"), "no module is left"),
        (Adapter(modules_to_save="nothing"), "no module nothing; it has"),
        (Adapter(modules_to_save="embed_tokens"), "one matrix"),
        (Adapter(type="oft", block_size=24), "32 inputs, which do not divide.*block_size=16"),
        (Adapter(type="fourierft", num_frequencies=10**6), "has at most 512 frequencies"),
        (Adapter(type="adalora"), "at least 8"),
    ],
)
def test_what_would_be_ignored_is_refused_before_the_first_step(
    root: Path, tmp_path: Path, adapter: Adapter, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        training.train(training.method("sft", adapter=adapter), root, tmp_path / "output")


def test_a_reward_model_of_a_tied_base_trains_its_embedding_whole(root: Path, tmp_path: Path) -> None:
    """It has no head over the vocabulary, with which the embedding would be one matrix."""
    method = training.method("reward", adapter=Adapter(rank=4, modules_to_save="embed_tokens"), learning_rate=1e-2)
    training.train(method, root, tmp_path / "output")
    found = whole_model(Kind.REWARD_MODEL, tmp_path / "output").state_dict()
    start = training.weights(root / "policy")["model.embed_tokens.weight"]
    assert not torch.equal(found["model.embed_tokens.weight"], start)
    upon = whole_model(Kind.REWARD_MODEL, root / "policy", last=tmp_path / "output" / "adapter").state_dict()
    torch.testing.assert_close(upon, found, atol=2e-5, rtol=1e-5)


def test_adalora_prunes_ranks_and_keeps_their_mean(root: Path, tmp_path: Path) -> None:
    method = training.method("sft", adapter=Adapter(type="adalora", rank=4, target_rank=1), num_steps=8)
    run, _, _ = in_training(method, tmp_path / "output", root)
    run.save()
    ranks = [int((each != 0).sum()) for name, each in _saved(tmp_path / "output").items() if "lora_E" in name]
    assert len(ranks) == 14 and 0 < sum(ranks) <= 14 < 4 * 14


@pytest.mark.parametrize(
    ("architecture", "name", "fields"),
    [
        ("llama", "sft", {"adapter": Adapter(rank=4)}),
        ("llama", "reward", {"adapter": Adapter(rank=4)}),
        ("llama", "reward", {"adapter": Adapter(rank=4, modules_to_save="embed_tokens")}),
        ("llama", "reward", {"freeze": Freeze(except_last_layers=1)}),
        pytest.param("llama", "sft", {"adapter": Adapter(type="vera", rank=4)}, marks=SLOW),
        ("gpt2", "sft", {"adapter": Adapter(type="dora", rank=4, bias="all")}),
        pytest.param("gpt2", "sft", {"adapter": Adapter(type="ia3")}, marks=SLOW),
        ("mixtral", "sft", {"adapter": Adapter(rank=4)}),
        pytest.param("mixtral", "sft", {"adapter": Adapter(type="ia3")}, marks=SLOW),
        ("qwen3_moe", "sft", {"adapter": Adapter(rank=4)}),
        pytest.param("qwen3_moe", "sft", {"adapter": Adapter(rank=4, layers=(1,))}, marks=SLOW),
        ("qwen3_moe", "sft", {"adapter": Adapter(rank=4), "quantization": Quantization(format="nf4")}),
    ],
)
def test_the_plan_counts_what_is_trained_of_every_architecture(
    root: Path, tmp_path: Path, architecture: str, name: str, fields: dict[str, object]
) -> None:
    policy = tiny_models.write_model(tmp_path / "policy", architecture)
    method = training.method(name, num_steps=1, **fields)
    run = training.train(method, root, tmp_path / "output", policy=policy)
    assert run.metrics["percent_trained"] == pytest.approx(percent_trained(method, model_shapes(policy)))


MLP, SHARED = "layers.0.mlp.", "layers.1.mlp.shared_experts."


@pytest.mark.parametrize(
    ("fields", "changed", "unchanged"),
    [
        ({}, (MLP, SHARED, "layers.1.mlp.experts.", "layers.0.self_attn."), ()),
        ({"target_modules": "*shared*"}, (SHARED,), (MLP, "layers.1.mlp.experts.", "self_attn")),
        ({"target_modules": "gate_proj"}, (f"{MLP}gate", f"{SHARED}gate"), ("experts.0.", f"{MLP}up", "self_attn")),
        ({"layers": (0,)}, (MLP, "layers.0.self_attn."), ("layers.1.",)),
    ],
)
def test_dense_and_shared_layers_of_a_mixture_get_the_adapter_and_experts_only_where_all_do(
    root: Path, tmp_path: Path, fields: dict[str, object], changed: tuple[str, ...], unchanged: tuple[str, ...]
) -> None:
    """PEFT takes their names for those of the routed experts, and would adapt these in their place."""
    policy = tiny_models.write_model(tmp_path / "policy", "deepseek_v3")
    method = training.method("sft", num_steps=2, learning_rate=1e-2, adapter=Adapter(rank=4, **fields))
    run = training.train(method, root, tmp_path / "output", policy=policy)
    assert run.metrics["trained_parameters"] == adapter_weights(method.adapter, model_shapes(policy))[0]
    before, after = load_file(policy / "model.safetensors"), load_file(run.output / "model.safetensors")
    moved = {name for name, each in before.items() if not torch.equal(each, after[name])}
    for part in changed:
        assert any(part in name for name in moved), part
    for part in unchanged:
        assert not any(part in name for name in moved), part


@pytest.mark.parametrize("fields", [{"type": "dora"}, {"dropout": 0.1}])
def test_what_cannot_be_put_on_the_weights_of_such_layers_is_refused(
    root: Path, tmp_path: Path, fields: dict[str, object]
) -> None:
    policy = tiny_models.write_model(tmp_path / "policy", "deepseek_v3")
    method = training.method("sft", num_steps=1, adapter=Adapter(rank=4, target_modules="*shared*", **fields))
    ((field, _),) = fields.items()
    with pytest.raises(ConfigError, match=rf"PEFT takes 3 linear layers .* does not go with {field}=.*=attention"):
        training.train(method, root, tmp_path / "refused", policy=policy)


@pytest.mark.parametrize("adapter", [Adapter(type="ia3"), Adapter(layers=(1,)), Adapter(type="lokr", rank=4)])
def test_experts_that_get_no_adapter_are_logged(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, adapter: Adapter
) -> None:
    policy = tiny_models.write_model(tmp_path / "policy", "mixtral")
    training.train(training.method("sft", num_steps=1, adapter=adapter), root, tmp_path / "output", policy=policy)
    (line,) = [each for each in caplog.messages if "the experts of a mixture get no adapter" in each]
    assert "model.layers.0.mlp.experts.gate_up_proj" in line


@pytest.mark.parametrize("fields", [{"type": "dora"}, {"dropout": 0.1}, {"init": "pissa"}, {"init": "eva"}])
def test_what_cannot_be_put_on_experts_is_refused_and_on_attention_it_trains(
    root: Path, tmp_path: Path, fields: dict[str, object]
) -> None:
    policy = tiny_models.write_model(tmp_path / "policy", "mixtral")
    method = training.method("sft", num_steps=1, adapter=Adapter(rank=4, **fields))
    ((field, _),) = fields.items()
    with pytest.raises(ConfigError, match=f"adapter.{field}=.*the experts of a mixture.*=k_proj,o_proj,q_proj,v_proj"):
        training.train(method, root, tmp_path / "refused", policy=policy)
    of_attention = replace(method, adapter=Adapter(rank=4, target_modules="attention", **fields))
    training.train(of_attention, root, tmp_path / "output", policy=policy)


@pytest.mark.parametrize("name", ["eva", "adalora"])
def test_what_reads_every_layer_trains_the_language_model_of_one_that_reads_images(
    root: Path, tmp_path: Path, name: str
) -> None:
    policy = tiny_models.write_model(tmp_path / "policy", "gemma3")
    method = training.method("sft", num_steps=8, adapter=ALL[name])
    with pytest.raises((IndexError, TypeError)):  # the plan refuses it
        training.train(method, root, tmp_path / "all", policy=policy)
    of_text = replace(method, adapter=replace(ALL[name], target_modules="*language_model*"))
    training.train(of_text, root, tmp_path / "output", policy=policy)


def test_the_mixtures_are_those_of_peft() -> None:
    from peft.utils import transformers_weight_conversion as peft_table

    fused = {name for name, targets in peft_table._MOE_FUSED_TARGETS.items() if targets}
    known = {name for name, like in peft_table._MODEL_TO_CONVERSION_PATTERN.items() if like in fused}
    assert set(MIXTURES) <= known


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[] if each in ("lora", "oft", "ia3") else SLOW) for each in TYPES]
)
def test_on_gpt2_every_type_trains_but_those_that_the_plan_refuses(root: Path, tmp_path: Path, name: str) -> None:
    policy = tiny_models.write_model(tmp_path / "policy", "gpt2")
    method = training.method("sft", num_steps=8 if name == "adalora" else 2, adapter=TYPES[name], learning_rate=1e-2)
    if name in NOT_ON_CONV1D:
        with pytest.raises((TypeError, RuntimeError)):
            training.train(method, root, tmp_path / "output", policy=policy)
    else:
        assert len(set(training.train(method, root, tmp_path / "output", policy=policy).losses)) > 1


@pytest.mark.parametrize("max_logits", [2**27, 1], ids=["whole", "in_chunks"])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2"])
def test_rows_of_a_head_that_is_the_embedding_are_trained(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, max_logits: int
) -> None:
    monkeypatch.setattr(padding_free, "MAX_LOGITS", max_logits)
    policy = tiny_models.write_model(tmp_path / "policy", architecture, tie_word_embeddings=True)
    method = training.method("sft", adapter=Adapter(rank=2, trainable_token_indices=(5, 70)), learning_rate=1e-2)
    run = training.train(method, root, tmp_path / "output", policy=policy)
    before, after = (
        AutoModelForCausalLM.from_pretrained(each).get_output_embeddings().weight for each in (policy, run.output)
    )
    changed = (before != after).any(1).nonzero().flatten().tolist()
    assert changed and set(changed) <= {5, 70}


def test_a_freeze_leaves_the_named_weights_and_trains_the_others(root: Path, tmp_path: Path) -> None:
    before = training.weights(root / "policy")
    method = training.method("sft", freeze=Freeze(except_last_layers=1))
    run = training.train(method, root, tmp_path / "output")
    changed = {name for name, value in training.weights(run.output).items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if ".layers.1." in name or name == "model.norm.weight"}
    assert run.metrics["percent_trained"] == pytest.approx(percent_trained(method, model_shapes(root / "policy")))


@pytest.mark.parametrize("sft_weight", [None, 0.5], ids=["trl", "pair_loss"])
def test_noise_on_embeddings_goes_without_the_proof_of_step_zero_and_the_log_says_so(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, sft_weight: float | None
) -> None:
    method = training.method("dpo", neftune_alpha=5.0, sft_weight=sft_weight, adapter=Adapter(rank=4))
    assert training.train(method, root, tmp_path / "output").losses
    assert "reference=unproven: neftune_alpha=5" in caplog.text


@pytest.mark.parametrize("name", ["dpo", "kto"])
@pytest.mark.parametrize("init", [None, "eva"], ids=["adapter_off", "frozen_copy"])
def test_the_noise_on_embeddings_is_in_the_policy_and_not_in_its_reference(
    root: Path, tmp_path: Path, name: str, init: str | None
) -> None:
    """Under an adapter both are one model; without one the reference is another, and was always clean."""
    method = training.method(name, neftune_alpha=5.0, adapter=Adapter(rank=4, init=init), num_steps=1)
    _, trainer, _ = training.fitted(method, training.inputs(root, method), tmp_path / "output")
    model, ids = trainer.model.train(), torch.arange(3, 60)[None]

    def hidden() -> torch.Tensor:
        with torch.no_grad():
            return model.get_base_model().model(input_ids=ids).last_hidden_state

    assert not torch.equal(hidden(), hidden())
    with use_adapter(model, "ref" if init else None):
        assert torch.equal(hidden(), hidden())
    assert method.recipe()["neftune_version"] == 2
    for same in (replace(method, adapter=None), replace(method, neftune_alpha=None)):
        assert "neftune_version" not in same.recipe()
    assert "neftune_version" not in training.method("sft", neftune_alpha=5.0, adapter=Adapter()).recipe()
