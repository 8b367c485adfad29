"""The key of tokens changes with what decides them, and with nothing else."""

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from lineage.artifact import Kind
from tasks.data.tokens import cache as module
from tasks.data.tokens.cache import tokens_key
from tasks.data.tokens.tokenization import Tokenization
from tests import tiny

SFT = Tokenization(kind=Kind.CONVERSATIONS, max_length=64)
PACKED = replace(SFT, packing="best_fit")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny.write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 8}')
    return tmp_path


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("sentencepiece.bpe.model", "pieces"),
        ("tekken.json", "{}"),
        ("ctrl-vocab.json", "{}"),
        ("tokenizer_config.json", "{}"),
        ("config.json", '{"model_type": "qwen2", "hidden_size": 8}'),
    ],
)
def test_each_file_that_a_tokenizer_is_made_from_decides(model: Path, file: str, content: str) -> None:
    before = tokens_key(SFT, "rows", model)
    (model / file).write_text(content)
    assert tokens_key(SFT, "rows", model) != before


def test_weights_and_settings_of_a_model_do_not(model: Path) -> None:
    before = tokens_key(SFT, "rows", model)
    (model / "config.json").write_text('{"model_type": "llama", "hidden_size": 16}')
    for name in ("model.safetensors", "generation_config.json"):
        (model / name).write_text("{}")
    assert tokens_key(SFT, "rows", model) == before


@pytest.mark.parametrize("library", ["fastokens", "jinja2", "tokenizers", "transformers", "trl"])
def test_releases_of_what_makes_tokens_decide(model: Path, monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    before = [tokens_key(options, "rows", model) for options in (SFT, PACKED)]
    monkeypatch.setattr(module, "version", lambda name: "0.0" if name == library else version(name))
    same = [tokens_key(options, "rows", model) == key for options, key in zip((SFT, PACKED), before, strict=True)]
    assert same == [library == "trl", False]  # trl packs, and does nothing else
