"""Models that also read images: rows of text train their text part, and the output has all the rest byte for byte."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from flows.declare.config import load_pipeline
from flows.planning.checks import left_out_notes
from lineage.artifact import Kind
from lineage.errors import DataError, PipelineError
from tasks.context import Resources
from tasks.method import Adapter, Training
from tasks.model import merging
from tasks.train.models import load as models
from tasks.train.models.freeze import unread_by_text
from tasks.train.models.load import save_whole, whole_model
from tests import training
from tests.tiny import write_tokenizer
from tests.tiny_models import write_model
from tests.worker_group import Asked, WorkerGroup

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "bos_token_id": None,
}  # fmt: skip
PLACES: dict[str, object] = {
    "image_token_id": 299,
    "video_token_id": 298,
    "vision_start_token_id": 297,
    "vision_end_token_id": 296,
}
QWEN_VL: dict[str, object] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
}
FAMILIES: Mapping[str, tuple[dict[str, object], dict[str, object], dict[str, object]]] = {  # text, vision, whole
    "qwen3_5": (
        {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
         "layer_types": ["linear_attention", "full_attention"], "mtp_num_hidden_layers": 1},
        {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32,
         "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 16},
        {**PLACES, "tie_word_embeddings": False},
    ),
    "mistral3": (
        {"model_type": "mistral"},
        {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
         "num_attention_heads": 2, "image_size": 16, "patch_size": 4, "head_dim": 16},
        {"image_token_index": 299},
    ),
    "qwen2_5_vl": (
        QWEN_VL,
        {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32,
         "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "fullatt_block_indexes": [0]},
        PLACES,
    ),
    "gemma3": (
        {},
        {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
         "image_size": 28, "patch_size": 14},
        {"mm_tokens_per_image": 4},
    ),
    "mllama": (  # rows of text skip its first layer
        {"cross_attention_layers": [0], "bos_token_id": 1},
        {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_global_layers": 1,
         "attention_heads": 2, "image_size": 28, "patch_size": 14, "intermediate_layers_indices": [0],
         "vision_output_dim": 64},
        {"image_token_index": 300},
    ),
}  # fmt: skip
NOT_LOADED = {"mtp.fc.weight": (32, 64), "mtp.norm.weight": (32,)}  # no class of transformers has them
PROCESSOR = ("preprocessor_config.json", "processor_config.json")
FEW = [pytest.param(each, marks=[] if each in ("qwen3_5", "mistral3") else pytest.mark.slow) for each in FAMILIES]


def write_composite(directory: Path, family: str) -> Path:
    """A random model as it is published: with its processor's files, and in bf16."""
    text, vision, whole = FAMILIES[family]
    write_tokenizer(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(family, text_config={**TEXT, **ids, **text}, vision_config=vision, **whole)
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).bfloat16().save_pretrained(directory)
    file = directory / "model.safetensors"
    extra = {name: torch.randn(shape).bfloat16() for name, shape in NOT_LOADED.items()}
    save_file({**load_file(file), **extra}, file, metadata={"format": "pt"})
    for name in PROCESSOR:
        (directory / name).write_text(json.dumps({"name": name}))
    return directory


def sft(**fields: object) -> Training:
    return training.method("sft", **{"num_steps": 2, "learning_rate": 1e-2, **fields})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training.write_inputs(tmp_path_factory.mktemp("inputs"), num_rows=16)


@pytest.mark.parametrize("adapter", [None, Adapter(rank=2)], ids=["full", "lora"])
@pytest.mark.parametrize("family", FEW)
def test_text_trains_the_text_part_and_the_output_has_all_the_rest(
    root: Path, tmp_path: Path, family: str, adapter: Adapter | None
) -> None:
    policy = write_composite(tmp_path / "policy", family)
    run = training.train(sft(adapter=adapter), root, tmp_path / "output", policy=policy)
    before, after = load_file(policy / "model.safetensors"), load_file(run.output / "model.safetensors")
    assert before.keys() == after.keys()
    tower = ("visual", "vision_tower", "vision_model", "multi_modal_projector", "mtp.")
    tower += ("layers.0.",) if family == "mllama" else ()
    for name, value in before.items():
        if any(part in name for part in tower):
            assert after[name].dtype == value.dtype and torch.equal(after[name], value), name
    changed = {name for name, value in before.items() if not torch.equal(after[name].float(), value.float())}
    assert any(".layers.1." in name for name in changed)
    assert all((run.output / name).read_bytes() == (policy / name).read_bytes() for name in PROCESSOR)
    ours, theirs = (json.loads((each / "config.json").read_text()) for each in (run.output, policy))
    assert ours["architectures"] == theirs["architectures"]
    assert {**ours["vision_config"], "dtype": None} == {**theirs["vision_config"], "dtype": None}
    assert ours["text_config"].get("mtp_num_hidden_layers") == theirs["text_config"].get("mtp_num_hidden_layers")
    again = training.train(sft(num_steps=1), root, tmp_path / "again", policy=run.output)  # the next stage
    assert load_file(again.output / "model.safetensors").keys() == before.keys()


@pytest.mark.parametrize("family", FEW)
def test_rows_of_text_are_what_the_text_part_of_transformers_computes(tmp_path: Path, family: str) -> None:
    policy = write_composite(tmp_path / "policy", family)
    ids = torch.arange(3, 40)[None]
    model = whole_model(Kind.CHECKPOINT, policy).eval()
    known = AutoModelForCausalLM if family in ("qwen3_5", "gemma3") else AutoModelForImageTextToText
    expected = known.from_pretrained(policy, dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, expected(input_ids=ids).logits)
    unread = unread_by_text(model)
    model.train()(input_ids=ids, labels=ids).loss.backward()
    assert unread == {name for name, each in model.named_parameters() if each.grad is None}


def test_what_text_does_not_reach_is_frozen_under_an_adapter_too(root: Path, tmp_path: Path) -> None:
    """Two workers would wait for its gradients."""
    given = training.inputs(root, sft(), policy=write_composite(tmp_path / "policy", "gemma3"))
    _, trainer, _ = training.fitted(sft(adapter=Adapter(rank=2), num_steps=1), given, tmp_path / "output")
    trained = {name for name, each in trainer.model.named_parameters() if each.requires_grad}
    assert trained and not [name for name in trained if "vision" in name]


@pytest.mark.slow  # the quick one is the test above
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("adapter", [None, Adapter(rank=2)], ids=["full", "lora"])
def test_two_workers_that_recompute_activations_train_as_one(
    root: Path, tmp_path: Path, two_workers: WorkerGroup, family: str, adapter: Adapter | None
) -> None:
    """Parameters that text does not reach have no gradients, for which workers would wait."""
    write_composite(tmp_path / "inputs" / "policy", family)
    (tmp_path / "inputs" / "conversations").symlink_to(root / "conversations")
    stage = sft(adapter=adapter, num_steps=2)
    one = training.train(stage, tmp_path / "inputs", tmp_path / "one" / "output")
    resources = Resources(micro_batch_size=2, gradient_checkpointing="on", save_steps=1, save_minutes=None)
    asked = Asked(stage=stage, root=tmp_path / "inputs", folder=tmp_path / "two", resources=resources)
    done, _ = two_workers.train(asked)
    assert done.metric("loss") == pytest.approx(one.losses, rel=1e-5)
    found = load_file(tmp_path / "two" / "output" / "model.safetensors")
    for name, value in load_file(one.output / "model.safetensors").items():
        torch.testing.assert_close(found[name], value, atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("family", ["mllama", pytest.param("qwen2_5_vl", marks=pytest.mark.slow)])
def test_a_reward_model_of_text_has_all_but_the_head(root: Path, tmp_path: Path, family: str) -> None:
    """Of families that transformers has no class with a head of scores for."""
    policy = write_composite(tmp_path / "policy", family)
    run = training.train(training.method("reward", num_steps=1), root, tmp_path / "output", policy=policy)
    before, after = (set(load_file(each / "model.safetensors")) for each in (policy, run.output))
    assert after - before == {"score.weight"}
    assert all("lm_head" in name or name.startswith("mtp.") for name in before - after)


def test_a_reward_model_names_what_it_leaves_out_and_its_config_is_true(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    policy = write_composite(tmp_path / "policy", "qwen3_5")
    run = training.train(training.method("reward", num_steps=1), root, tmp_path / "output", policy=policy)
    assert "left_out=lm_head.weight, mtp.fc.weight, mtp.norm.weight" in caplog.text
    assert run.metrics["weights_left_out"] == 3
    [note] = left_out_notes(load_pipeline([f"model={policy}", "tracking=none"]), ["cpt", "reward"])
    assert note.startswith("reward: a reward model has no place for lm_head.weight, mtp.fc.weight, mtp.norm.weight:")
    names = load_file(run.output / "model.safetensors")
    assert any("visual" in name for name in names) and not any("mtp" in name for name in names)
    assert json.loads((run.output / "config.json").read_text())["text_config"]["mtp_num_hidden_layers"] == 0


def test_an_output_that_lacks_a_weight_of_its_input_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = write_composite(tmp_path / "policy", "mistral3")
    monkeypatch.setattr(models, "add_weights", lambda directory, tensors: None)
    with pytest.raises(PipelineError, match=r"out lacks weights of .*policy: .*mtp.fc.weight"):
        save_whole(whole_model(Kind.CHECKPOINT, policy), policy, tmp_path / "out")
    monkeypatch.setattr(models, "add_weights", merging.add_weights)
    save_whole(whole_model(Kind.CHECKPOINT, policy), policy, tmp_path / "whole")


def test_a_row_with_a_token_that_has_no_embedding_is_refused_before_a_step(root: Path, tmp_path: Path) -> None:
    """Tokens that no row has are harmless: published models have such."""
    policy = write_model(tmp_path / "policy", "llama")
    tokenizer = AutoTokenizer.from_pretrained(policy)
    tokenizer.add_tokens(["<|unused|>", "<|more|>"] if len(tokenizer) == 300 else [f"<|{n}|>" for n in range(300)])
    tokenizer.save_pretrained(policy)
    assert training.train(sft(num_steps=1), root, tmp_path / "output", policy=policy).losses
    word = "list"
    tokenizer.add_tokens([word])
    tokenizer.save_pretrained(policy)
    with pytest.raises(DataError, match=r"has the token 'list' \(id \d+\), and the model has 300 embeddings"):
        training.train(sft(num_steps=1), root, tmp_path / "refused", policy=policy)
    tokenizer.add_special_tokens({"additional_special_tokens": [word]})
    tokenizer.save_pretrained(policy)
    with pytest.raises(DataError, match=r"rows spell the token 'list' \(id \d+\), and the model has 300 embeddings"):
        training.train(sft(num_steps=1), root, tmp_path / "spelled", policy=policy)
    assert training.train(sft(num_steps=1, control_tokens="text"), root, tmp_path / "as_text", policy=policy).losses
