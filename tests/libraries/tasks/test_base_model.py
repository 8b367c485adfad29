"""A base model from scratch: what it writes loads, says any text back, and is the same for the same rows."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from lineage.artifact import Kind
from lineage.errors import ConfigError
from tasks.base_model import BaseModel
from tasks.context import TrainContext
from tasks.method import Input
from tasks.model.tokenizers import tokenizer_of
from tasks.model.vision import processor_of
from tests.prepared import named
from tests.tiny import text_rows, write_rows

SMALL = BaseModel(vocab_size=300, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, max_positions=64)


def build(directory: Path, method: BaseModel = SMALL, out: str = "base") -> dict[str, bytes]:
    rows = write_rows(directory / "rows", text_rows(40), text_rows(1))
    given = Input(name="corpus", kind=Kind.TEXT, fingerprint="", path=rows)
    context = TrainContext(output_dir=directory / out, work_dir=directory)
    named(method, {"rows": given}, method.run({"rows": given}, context))
    return {file.name: file.read_bytes() for file in sorted((directory / out).iterdir())}


def test_the_output_loads_says_any_text_back_and_is_the_same_whatever_the_global_state(tmp_path):
    torch.manual_seed(1)
    files = build(tmp_path)
    torch.manual_seed(2)
    assert build(tmp_path, out="second") == files
    assert files.keys() >= {"model.safetensors", "chat_template.jinja", "tokenizer.json"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base", local_files_only=True)
    assert model.config.vocab_size == len(tokenizer) <= 300
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert model.generation_config.eos_token_id == [tokenizer.eos_token_id, tokenizer.pad_token_id]
    text = "def f(x):\n\n    return  'ü→🙂' "
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    roles = ("system", "user", "assistant", "user", "assistant")
    messages = [{"role": role, "content": f"{role} {index}"} for index, role in enumerate(roles)]
    whole = tokenizer.apply_chat_template(messages)["input_ids"]
    for count in range(1, 5):  # a beginning is rendered as the beginning of the whole
        begin = tokenizer.apply_chat_template(messages[:count], add_generation_prompt=roles[count] == "assistant")
        assert whole[: len(begin["input_ids"])] == begin["input_ids"]
    assert whole[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 280), ("hidden_size", 32), ("intermediate_size", 48), ("num_layers", 2), ("num_heads", 4),
        ("max_positions", 128), ("tie_embeddings", False), ("seed", 1),
    ],
)  # fmt: skip
def test_each_field_changes_the_model(tmp_path: Path, field: str, value: int) -> None:
    assert build(tmp_path, replace(SMALL, **{field: value}), "changed") != build(tmp_path, out="plain")


def test_heads_of_an_odd_width_are_refused() -> None:
    with pytest.raises(ConfigError) as refusal:
        BaseModel(hidden_size=190, num_heads=6)
    assert str(refusal.value) == (
        "hidden_size=190 over num_heads=6 is not an even number of dimensions per head; "
        "give a hidden_size that is a multiple of 12"
    )


def test_a_model_that_reads_images_has_a_tower_and_its_processor(tmp_path):
    files = build(tmp_path, replace(SMALL, image_size=32))
    assert build(tmp_path, replace(SMALL, image_size=32), out="second") == files
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "base", local_files_only=True)
    tokenizer = tokenizer_of(tmp_path / "base")
    processor = processor_of(tmp_path / "base", tokenizer, {})
    content = [{"type": "image"}, {"type": "text", "text": "list"}]
    text = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    assert text == "<|im_start|>user\n<image>list<|im_end|>"
    seen = processor(text=[text], images=[[Image.new("RGB", (40, 20), "red")]], return_tensors="pt")
    assert seen["input_ids"][0].tolist().count(model.config.image_token_id) == 16  # patches of 8 pixels
    with torch.no_grad():
        assert model(**seen).logits.shape[1] == seen["input_ids"].shape[1]
