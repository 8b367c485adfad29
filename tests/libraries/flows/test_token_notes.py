"""The plan's note on bases that AutoTokenizer splits in another way than their tokenizer.json, against transformers."""

import json
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer
from transformers.models.qwen2 import tokenization_qwen2
from transformers.models.qwen3_5 import tokenization_qwen3_5

from flows.declare.config import load_pipeline
from flows.planning.checks import CLASSES, SPLITS, token_notes

TEXT = "e\u0301 12 ab"


def write(folder: Path, pattern: str | None, model_type: str, tokenizer_class: str) -> Path:
    """A base whose tokenizer.json splits by a pattern, or by bytes alone."""
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(
        models.BPE(vocab={each: index for index, each in enumerate([*alphabet, "12"])}, merges=[("1", "2")])
    )
    of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    split = [pre_tokenizers.Split(Regex(pattern), behavior="isolated")] if pattern else []
    plain.pre_tokenizer = pre_tokenizers.Sequence([*split, of_bytes])
    plain.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "architectures": ["X"]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": tokenizer_class}))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_the_patterns_are_those_of_the_classes() -> None:
    assert SPLITS["Qwen2Tokenizer"] == tokenization_qwen2.PRETOKENIZE_REGEX
    assert SPLITS["Qwen3_5Tokenizer"] == tokenization_qwen3_5.PRETOKENIZE_REGEX


@pytest.mark.parametrize("pattern", [None, *SPLITS.values()])
@pytest.mark.parametrize(
    ("model_type", "tokenizer_class"),
    [*((each, "PreTrainedTokenizerFast") for each in CLASSES), ("llama", "PreTrainedTokenizerFast"),
     ("llama", "Qwen2TokenizerFast")],
)  # fmt: skip
def test_a_base_is_noted_where_its_file_and_auto_tokenizer_differ(
    tmp_path: Path, pattern: str | None, model_type: str, tokenizer_class: str
) -> None:
    base = write(tmp_path / "base", pattern, model_type, tokenizer_class)
    pipeline = load_pipeline([f"model={base}", "tracking=none"])
    found = token_notes(pipeline, ["cpt", "sft", "reward"])
    loaded = AutoTokenizer.from_pretrained(base).backend_tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
    own = Tokenizer.from_file(str(base / "tokenizer.json")).pre_tokenizer.pre_tokenize_str(TEXT)
    assert bool(found) == (loaded != own)
    assert len(found) <= 1 and all("source:base: trains on the tokens of its tokenizer.json" in each for each in found)
