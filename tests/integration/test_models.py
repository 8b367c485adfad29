"""What is known of a model before it trains: how many tokens it takes, and which of its dropout is off."""

import copy
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl.trainer.utils import add_fused_lm_head

from lineage.artifact import Kind
from lineage.errors import ConfigError
from tasks.context import Resources, TrainContext
from tasks.evaluate.scoring import Scored, logps, padded
from tasks.method import Adapter, Training
from tasks.model.positions import LEARNED_POSITIONS, learned_positions, reads_padding, require_positions, why_not_causal
from tasks.train.generation.rollouts import number_real_tokens
from tasks.train.kernels.padding_free import has_own_head, keep_own_head, logits
from tasks.train.losses.rewards import sequence_scores
from tasks.train.models.load import disable_dropout, whole_model
from tasks.train.run import TrainingRun
from tests import tiny, training
from tests.model_directories import edit

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, Trainer

POSITIONS = 16
COMPUTED = (
    "llama", "qwen2", "mistral", "gemma3_text", "gpt_neox", "falcon", "bloom", "phi", "starcoder2", "stablelm", "xglm",
)  # fmt: skip
# Of every architecture that has a field of such a name.
_SMALL: dict[str, object] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "emb_dim", "dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "dff", "decoder_ffn_dim", "encoder_ffn_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "num_decoder_layers", "num_encoder_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    "vocab_size": 100, "num_key_value_heads": 2, "head_dim": 8, "rotary_dim": 4, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "is_decoder": True, "causal": True, "attention_types": [[["global", "local"], 1]],
    "embedding_size": 32,
    "input_embedding_size": 32, "output_embedding_size": 32, "enable_pronunciation": False, "enable_shape": False,
    "languages": ["en_XX"], "default_language": "en_XX",
    "vision_config": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 28,
        "patch_size": 14,
    },
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), POSITIONS),
}  # fmt: skip


def config_of(architecture: str) -> "PreTrainedConfig":
    known = AutoConfig.for_model(architecture).to_dict()
    return AutoConfig.for_model(architecture, **{name: value for name, value in _SMALL.items() if name in known})


def model_of(architecture: str) -> "PreTrainedModel":
    return AutoModelForCausalLM.from_config(config_of(architecture)).eval()


def ask(model: "PreTrainedModel", num_tokens: int) -> torch.Tensor:
    ids = torch.full((1, num_tokens), 5)
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    return logits


@pytest.mark.parametrize("architecture", sorted(LEARNED_POSITIONS))
def test_a_model_with_a_table_of_positions_takes_as_many_tokens_as_is_reported(architecture: str) -> None:
    model = model_of(architecture)
    positions = learned_positions(model.config.to_dict())
    assert positions is not None
    require_positions(model.config, positions)
    ask(model, positions)
    with pytest.raises((IndexError, RuntimeError)):
        ask(model, positions + 1)
    with pytest.raises(ConfigError, match=rf"set max_length={positions} or less"):
        require_positions(model.config, positions + 1)


@pytest.mark.parametrize("architecture", COMPUTED)
def test_a_model_that_computes_its_positions_takes_more(architecture: str) -> None:
    model = model_of(architecture)
    assert learned_positions(model.config.to_dict()) is None
    assert ask(model, 3 * POSITIONS).isfinite().all()
    require_positions(model.config, 3 * POSITIONS)


def test_roberta_counts_its_positions_from_the_pad_token_on() -> None:
    assert learned_positions({"model_type": "roberta", "max_position_embeddings": 514}) == 512
    assert learned_positions({"model_type": "gpt2"}) is None, "a config.json that states no number: the stage checks"


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("gpt2", {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5}),
        ("gpt_bigcode", {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5}),
        ("llama", {"attention_dropout": 0.5}),
        ("opt", {"dropout": 0.5, "attention_dropout": 0.5, "layerdrop": 0.5}),
        ("mpt", {"resid_pdrop": 0.5, "emb_pdrop": 0.5}),
        ("dbrx", {
            "attn_config": {"attn_pdrop": 0.5, "kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
            "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 64}, "resid_pdrop": 0.5, "emb_pdrop": 0.5,
        }),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)  # fmt: skip
def test_all_dropout_is_switched_off(architecture: str, fields: dict[str, object]) -> None:
    config = config_of(architecture)
    configured = {**{name: value for name, value in _SMALL.items() if name in config.to_dict()}, **fields}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **configured)).train()
    for module in model.modules():
        if hasattr(module, "attn_dropout_p"):  # MPT's, of a config field that takes whole numbers alone
            module.attn_dropout_p = 0.5
    ids = torch.arange(5, 13).unsqueeze(0)

    def logits() -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model(input_ids=ids, use_cache=False).logits
        return found

    assert any(not torch.equal(logits(), logits()) for _ in range(4)), "it draws dropout"
    disable_dropout(model)
    assert all(torch.equal(logits(), logits()) for _ in range(4))


@pytest.mark.parametrize("in_config", [False, True], ids=["tokenizer", "config"])
@pytest.mark.parametrize("adapter", [None, Adapter(rank=2)], ids=["full", "lora"])
def test_a_reward_model_scores_in_plain_transformers_as_here_where_pad_is_the_end(
    tmp_path: Path, adapter: Adapter | None, in_config: bool
) -> None:
    """transformers would read the token before the last one."""
    root = training.write_inputs(tmp_path / "inputs", num_rows=16)
    tokenizer = AutoTokenizer.from_pretrained(root / "policy")
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(root / "policy")
    if in_config:
        edit(root / "policy/config.json", pad_token_id=tokenizer.eos_token_id)
    stage = training.method("reward", num_steps=2, learning_rate=1e-2, adapter=adapter)
    output = training.train(stage, root, tmp_path / "output").output
    tokenizer, model = AutoTokenizer.from_pretrained(output), AutoModelForSequenceClassification.from_pretrained(output)
    for row in tiny.preference_rows(3):
        messages = [*row["prompt"], *row["chosen"]]  # type: ignore[misc]
        ids = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=False)
        ids = ids[:, : int((ids[0] == tokenizer.eos_token_id).nonzero().max()) + 1]  # as a row ends
        with torch.no_grad():
            expected = sequence_scores(model.eval(), ids, torch.ones_like(ids))
            torch.testing.assert_close(model(input_ids=ids).logits[:, 0], expected)


OWN_HEADS = ("electra", "modernbert-decoder", "recurrent_gemma", "roberta", "xlstm")  # layers, or a cap by another name


def drawn(architecture: str) -> "PreTrainedModel":
    """A model whose biases and norms are random too, with logits that a cap changes."""
    torch.manual_seed(0)
    model = model_of(architecture)
    with torch.no_grad():
        for each in model.parameters():
            each.add_(0.2 * torch.randn_like(each))
    return model


@pytest.mark.parametrize("architecture", [*OWN_HEADS, "llama", "gemma2", "cohere", "granite", "gpt2", "opt"])
def test_losses_see_the_logits_of_the_models_own_forward(architecture: str) -> None:
    """TRL's fused head multiplies hidden states with the head's weights, and knows some factors and caps."""
    model = drawn(architecture)
    assert has_own_head(model) == (architecture in OWN_HEADS)
    ids = torch.randint(3, 100, (2, 12))
    rows = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    with torch.no_grad():
        expected = model(**rows).logits
        found = logits(model, model.base_model(**rows).last_hidden_state.flatten(0, 1))
        add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy", "is_top1"))
        keep_own_head(model)
        fused = model(**rows, labels=ids, fused_lm_head=True)
        torch.testing.assert_close(model(**rows).logits, expected)
    torch.testing.assert_close(found.view_as(expected), expected, atol=1e-4, rtol=1e-4)
    logps = (expected[:, :-1] / 0.7).log_softmax(-1)
    torch.testing.assert_close(
        fused.log_probs, logps.gather(2, ids[:, 1:, None]).squeeze(2), atol=1e-4, rtol=1e-4
    )  # fmt: skip
    torch.testing.assert_close(fused.entropy, -(logps.exp() * logps).sum(-1), atol=1e-4, rtol=1e-4)
    assert fused.is_top1.equal(logps.argmax(-1) == ids[:, 1:])


@pytest.mark.parametrize(
    "architecture", ["llama", "gpt2", "hunyuan_v1_dense", "xglm", "recurrent_gemma", "rwkv", "roberta"]
)
def test_no_row_depends_on_the_padding_before_it(architecture: str) -> None:
    model = drawn(architecture)
    rows = [torch.randint(3, 100, (length,)) for length in (5, 11, 8, 11)]
    scored = [Scored(input_ids=row.tolist(), mask=[1] * len(row)) for row in rows]
    with torch.no_grad():
        alone = [model(input_ids=row[None], use_cache=False).logits[0] for row in rows]
    sums = [
        float(each[:-1].log_softmax(-1).gather(1, row[1:, None]).sum()) for row, each in zip(rows, alone, strict=True)
    ]
    assert logps(model, scored, 8) == pytest.approx(sums, abs=1e-4)
    if architecture in ("recurrent_gemma", "rwkv", "roberta"):
        assert reads_padding(model.config.to_dict())
        return
    number_real_tokens(model)
    ids, mask = padded([row.tolist() for row in rows], model.device, left=True)
    with torch.no_grad():
        found = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    for index, expected in enumerate(alone):
        torch.testing.assert_close(found[index, -len(expected) :], expected)


@pytest.mark.parametrize(
    ("architecture", "right"),
    [
        ("bert", {"is_decoder": True}), ("roberta", {"is_decoder": True}), ("xlm", {"causal": True}),
        ("gemma3_text", {"use_bidirectional_attention": False}), ("xlnet", None),
    ],
)  # fmt: skip
def test_a_model_that_sees_later_tokens_is_refused(architecture: str, right: dict[str, object] | None) -> None:
    """It would be trained on what it reads; transformers makes a causal class of an encoder's files."""
    seen = {"is_decoder": False, "use_bidirectional_attention": True, "causal": False}
    for changes in (seen, right):
        if changes is None:
            continue
        torch.manual_seed(0)
        known = AutoConfig.for_model(architecture).to_dict()
        configured = {
            name: value for name, value in {**_SMALL, **changes}.items() if name in {**known, "is_decoder": 0}
        }
        config = AutoConfig.for_model(architecture, **{**configured, "initializer_range": 0.2})
        model = AutoModelForCausalLM.from_config(config).eval()
        ids = torch.arange(5, 17)[None]
        other = torch.cat([ids[:, :-1], ids[:, :1]], dim=1)
        with torch.no_grad():
            before, after = (model(input_ids=each, use_cache=False).logits[0, :-1] for each in (ids, other))
        is_causal = torch.allclose(before, after, atol=1e-5)
        assert is_causal == (changes is right)
        if is_causal:
            require_positions(config, 8)
            continue
        with pytest.raises(ConfigError, match=r"reads later tokens at each place.*causal attention is accepted"):
            require_positions(config, 8)
        assert why_not_causal(config.to_dict())


@pytest.mark.parametrize("name", ["grpo", "ppo", "on_policy_distill"])
def test_a_model_that_reads_its_padding_does_not_generate(root: Path, tmp_path: Path, name: str) -> None:
    policy = write_drawn(tmp_path / "policy", "recurrent_gemma")
    with pytest.raises(ConfigError, match=r"\(recurrent_gemma\) reads the padding before a prompt"):
        training.train(training.method(name), root, tmp_path / "output", policy=policy)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training.write_inputs(tmp_path_factory.mktemp("inputs"), num_rows=16)


def write_drawn(directory: Path, architecture: str) -> Path:
    """Saves a model of 300 tokens and 256 positions with its tokenizer."""
    tiny.write_tokenizer(directory)
    config = config_of(architecture)
    for name, value in {"vocab_size": 300, "max_position_embeddings": 256, "initializer_range": 0.3}.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("name", ["sft", "dpo", "orpo", pytest.param("grpo", marks=pytest.mark.slow)])
def test_layers_between_hidden_states_and_head_are_in_the_loss(root: Path, tmp_path: Path, name: str) -> None:
    policy = write_drawn(tmp_path / "policy", "modernbert-decoder")
    run = training.train(training.method(name, num_steps=2), root, tmp_path / "output", policy=policy)
    before, after = (load_file(each / "model.safetensors") for each in (policy, run.output))
    assert not before["lm_head.dense.weight"].equal(after["lm_head.dense.weight"]), "trained too"
    if name == "dpo":
        assert run.losses[0] == pytest.approx(math.log(2), abs=1e-5)
    if name == "grpo":
        assert run.metrics["sampler/logp_difference_max"] < 1e-4
    if name == "sft":
        trainer = built(training.method(name, num_steps=2), root, tmp_path, policy)
        batch = trainer.data_collator([trainer.train_dataset[index] for index in range(8)])
        with torch.no_grad():
            plain = AutoModelForCausalLM.from_pretrained(policy).eval()(**batch)
        assert run.losses[0] == pytest.approx(plain.loss.item(), abs=1e-5)


def built(stage: Training, root: Path, tmp_path: Path, policy: Path) -> "Trainer":
    """The trainer of a stage, before its first step."""
    ctx = TrainContext(
        output_dir=tmp_path / "none", work_dir=tmp_path / "work", resources=Resources(micro_batch_size=8)
    )
    return stage.trainer(TrainingRun(stage, training.inputs(root, stage, policy=policy), ctx))


def test_a_reward_head_of_several_layers_is_refused(root: Path, tmp_path: Path) -> None:
    policy = write_drawn(tmp_path / "policy", "modernbert-decoder")
    with pytest.raises(ConfigError, match="ModernBertDecoderForSequenceClassification scores rows by more than one"):
        training.train(training.method("reward"), root, tmp_path / "output", policy=policy)


@pytest.mark.parametrize("slot", ["policy", "teacher"])
def test_files_that_lack_a_weight_are_refused(root: Path, tmp_path: Path, slot: str) -> None:
    """transformers would draw it at random."""
    inputs = tmp_path / "inputs"
    shutil.copytree(root, inputs)
    file = inputs / slot / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.0.self_attn.q_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    for name in ("sft", "reward") if slot == "policy" else ("distill",):
        with pytest.raises(ConfigError, match=r"1 of 21 weights .* such as model.layers.0.self_attn.q_proj.weight"):
            training.train(training.method(name, num_steps=1), inputs, tmp_path / name)


ROPES: dict[str, dict[str, object]] = {
    "longrope": {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": POSITIONS},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": POSITIONS},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 4.0, "original_max_position_embeddings": POSITIONS, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("scaling", "architecture"),
    [("longrope", "phi3"), ("dynamic", "gemma3_text"), *((each, "llama") for each in ROPES)],
)
def test_a_row_above_the_original_length_does_not_change_its_neighbours(
    tmp_path: Path, scaling: str, architecture: str
) -> None:
    """Padded, or end to end, and whatever was read before, each row is what it is alone."""
    rope: dict[str, object] = {"rope_type": scaling, "rope_theta": 1e4, **ROPES[scaling]}
    if architecture == "gemma3_text":
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    config = AutoConfig.for_model(
        architecture, vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, pad_token_id=0, rope_parameters=rope, initializer_range=0.1,
        max_position_embeddings=POSITIONS if scaling == "dynamic" else 128,
        **({"original_max_position_embeddings": POSITIONS} if architecture == "phi3" else {}),
        **({"layer_types": ["full_attention", "sliding_attention"]} if architecture == "gemma3_text" else {}),
    )  # fmt: skip
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config).eval()
    plain.save_pretrained(tmp_path)
    model = whole_model(Kind.CHECKPOINT, tmp_path).eval()
    rows = [torch.randint(3, 100, (length,)) for length in (POSITIONS + 9, 5, POSITIONS, POSITIONS + 4)]
    with torch.no_grad():
        alone = [copy.deepcopy(plain)(input_ids=row[None], use_cache=False).logits[0] for row in rows]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        padded = model(input_ids=ids, attention_mask=(ids != 0).long(), use_cache=False).logits
        places = torch.cat([torch.arange(len(row)) for row in rows])[None]
        line = model(input_ids=torch.cat(rows)[None], position_ids=places, use_cache=False).logits[0]
        mixed = plain(input_ids=ids, attention_mask=(ids != 0).long(), use_cache=False).logits
        again = [model(input_ids=row[None], use_cache=False).logits[0] for row in rows]
    for index, (row, expected) in enumerate(zip(rows, alone, strict=True)):
        torch.testing.assert_close(padded[index, : len(row)], expected)
    by_length = scaling in ("longrope", "dynamic")
    assert torch.allclose(mixed[1, :5], alone[1], atol=1e-5) != by_length, "transformers lets the longest row decide"
    for found, expected in zip(again, alone, strict=True):
        torch.testing.assert_close(found, expected)
    for row, expected in zip(line.split([len(row) for row in rows]), alone, strict=True):
        torch.testing.assert_close(row, expected)
