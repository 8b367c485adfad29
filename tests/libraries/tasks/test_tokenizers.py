"""The tokens of a model are those of the ``tokenizer.json`` that travels with it, whatever its class."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from lineage.errors import ConfigError
from tasks.model.fetch_model import split_as_in_gguf
from tasks.model.tokenizers import PROBE, read_otherwise, require_ends, tokenizer_of
from tests.tiny_gguf import write_gguf

THREE_DIGITS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def own() -> Tokenizer:
    """A tokenizer that keeps up to three digits together."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(THREE_DIGITS), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator([" ".join(map(str, range(1000, 2024))), PROBE] * 3, trainer)
    return tokenizer


def written(directory: Path, own: Tokenizer, model_type: str, **configured: object) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    own.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", **configured}))
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    return directory


BODIES = [
    ("qwen2", "PreTrainedTokenizerFast"), ("qwen2", None), ("qwen3_5", "TokenizersBackend"),
    ("qwen3_5_moe", "Qwen2Tokenizer"), ("qwen4_exp", "TokenizersBackend"), ("llama", "GPT2Tokenizer"),
    ("gemma", "GemmaTokenizerFast"), ("cohere", "CohereTokenizer"),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "tokenizer_class"), BODIES)
def test_the_tokens_are_those_of_the_file(
    tmp_path: Path, own: Tokenizer, model_type: str, tokenizer_class: str | None
) -> None:
    configured = {"tokenizer_class": tokenizer_class} if tokenizer_class else {}
    directory = written(tmp_path, own, model_type, **configured)
    expected = own.encode(PROBE, add_special_tokens=False).ids
    found = tokenizer_of(directory)
    assert found(PROBE, add_special_tokens=False)["input_ids"] == expected
    assert found.decode(expected, clean_up_tokenization_spaces=False) == PROBE


READ_BY = [
    ("qwen2", None, "Qwen2Tokenizer"),
    ("llama", "GPT2Tokenizer", "GPT2Tokenizer"),
    ("gemma", None, "GemmaTokenizer"),
    ("llama", "T5TokenizerFast", "T5TokenizerFast"),  # it cannot read the vocabulary
]


@pytest.mark.parametrize(("model_type", "tokenizer_class", "name"), [*READ_BY, ("llama", "TokenizersBackend", None)])
def test_what_a_user_reads_with_auto_tokenizer_is_known(
    tmp_path: Path, own: Tokenizer, model_type: str, tokenizer_class: str | None, name: str | None
) -> None:
    configured = {"tokenizer_class": tokenizer_class} if tokenizer_class else {}
    assert read_otherwise(written(tmp_path, own, model_type, **configured)) == name


def test_what_a_class_reads_otherwise_behind_a_special_token_alone_is_known(tmp_path: Path, own: Tokenizer) -> None:
    """Llama 2's file puts a blank before each section of text, and the class before the first one alone."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator([PROBE], trainer)
    directory = written(tmp_path, tokenizer, "llama", tokenizer_class="LlamaTokenizer", eos_token="</s>")
    plain, found = AutoTokenizer.from_pretrained(directory), tokenizer_of(directory)
    assert plain(PROBE, add_special_tokens=False)["input_ids"] == found(PROBE, add_special_tokens=False)["input_ids"]
    assert read_otherwise(directory) == "LlamaTokenizer"


def test_tokens_that_are_drawn_are_refused(tmp_path: Path, own: Tokenizer) -> None:
    directory = written(tmp_path, own, "llama")
    document = json.loads((directory / "tokenizer.json").read_text())
    document["model"]["dropout"] = 0.1
    (directory / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=r"dropout=0\.1, which draws other tokens of one text each time"):
        tokenizer_of(directory)


def test_special_tokens_that_no_file_names_are_those_of_the_class(tmp_path: Path, own: Tokenizer) -> None:
    directory = written(tmp_path, own, "gpt2", tokenizer_class="GPT2Tokenizer")
    found, plain = tokenizer_of(directory), AutoTokenizer.from_pretrained(directory)
    assert found.special_tokens_map == plain.special_tokens_map | {"pad_token": "<|im_end|>"}
    assert (found.bos_token, found.eos_token) == ("<|endoftext|>", "<|im_end|>")
    assert found.get_vocab() == plain.get_vocab()


def test_a_pad_token_without_an_embedding_is_replaced_in_memory(tmp_path: Path, own: Tokenizer) -> None:
    directory = written(tmp_path, own, "llama", pad_token="[PAD]")
    assert tokenizer_of(directory).pad_token == "[PAD]"
    size = own.get_vocab_size()
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": size}))
    assert tokenizer_of(directory).pad_token == "<|im_end|>"
    (directory / "tokenizer_config.json").write_text(json.dumps({"pad_token": "[PAD]", "eos_token": "[END]"}))
    found = tokenizer_of(directory)
    assert found.pad_token_id == size - 1
    with pytest.raises(
        ConfigError, match=r"^base: the eos_token of its tokenizer is '\[END\]'.*sources\.base\.eos_token="
    ):
        require_ends(found, "base", size)
    require_ends(found, "base", size + 2)


def as_vocabulary(directory: Path, own: Tokenizer) -> None:
    """Replaces ``tokenizer.json`` by the two files of older tokenizers."""
    (directory / "tokenizer.json").unlink()
    own.model.save(str(directory))


def test_a_class_that_splits_otherwise_is_refused_without_a_file(tmp_path: Path, own: Tokenizer) -> None:
    directory = written(tmp_path / "qwen2", own, "qwen2", tokenizer_class="GPT2Tokenizer")
    as_vocabulary(directory, own)
    with pytest.raises(ConfigError, match="names GPT2Tokenizer, transformers takes Qwen2Tokenizer"):
        tokenizer_of(directory)
    alike = written(tmp_path / "gpt2", own, "gpt2", tokenizer_class="GPT2TokenizerFast")
    as_vocabulary(alike, own)
    assert tokenizer_of(alike)("a 1")["input_ids"] == AutoTokenizer.from_pretrained(alike)("a 1")["input_ids"]


def test_a_sentencepiece_file_is_read_by_its_class_or_refused(
    tmp_path: Path, own: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for model_type in ("llama", "qwen2"):
        directory = written(tmp_path / model_type, own, model_type, tokenizer_class="LlamaTokenizer", eos_token="</s>")
        (directory / "tokenizer.json").unlink()
        (directory / "tokenizer.model").write_bytes(b"pieces")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "sentencepiece", None)
        with pytest.raises(ConfigError, match=r"tokenizer\.model may need the package sentencepiece"):
            tokenizer_of(tmp_path / "llama")
    sentencepiece = pytest.importorskip("sentencepiece")

    as_llama = {"model_type": "bpe", "normalization_rule_name": "identity", "remove_extra_whitespaces": False}

    def train(**options: object) -> None:
        sentencepiece.SentencePieceTrainer.train(
            input=str(tmp_path / "text"), model_prefix=str(tmp_path / "llama/tokenizer"), vocab_size=500,
            byte_fallback=True, minloglevel=2, hard_vocab_limit=False, **options,
        )  # fmt: skip

    # What the class leaves out: the kind, that no blank is put before a text, and what is done to characters.
    others = ({"model_type": "unigram"}, {"add_dummy_prefix": False}, {"normalization_rule_name": "nmt_nfkc"})
    for changed, told in ((others[0], ""), *((each, PROBE) for each in others)):
        (tmp_path / "text").write_text(f"a bc 123 a bc de two, then two\n{told}\n" * 20)
        train(**{**as_llama, **changed})
        with pytest.raises(ConfigError, match=r"LlamaTokenizer for it, which makes other tokens .* tokenizer\.model"):
            tokenizer_of(tmp_path / "llama")
    train(**as_llama)
    shutil.copyfile(tmp_path / "llama/tokenizer.model", tmp_path / "qwen2/tokenizer.model")
    found = tokenizer_of(tmp_path / "llama")
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "llama/tokenizer.model"))
    assert found("a bc 123", add_special_tokens=False)["input_ids"] == pieces.encode("a bc 123")
    with pytest.raises(ConfigError, match="Qwen2Tokenizer"):
        tokenizer_of(tmp_path / "qwen2")


def test_files_that_travel_are_read_alike_at_both_ends(tmp_path: Path, own: Tokenizer) -> None:
    from tasks.model.tokenizers import copy_tokenizer_files

    source = written(tmp_path / "a", own, "qwen2")
    copy_tokenizer_files(source, tmp_path)
    shutil.copyfile(source / "config.json", tmp_path / "config.json")
    assert (tmp_path / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert tokenizer_of(tmp_path)(PROBE)["input_ids"] == tokenizer_of(source)(PROBE)["input_ids"]


GGUF_TEXT = "f(x):\n\n  x+1 `a` <= 12345 café 你好12。 IT'S  \n"
GGUF_SPLITS = {  # by the patterns that llama.cpp has for each name, applied one after the other with `regex`
    "smollm": "f|(|x|):|\n\n | x|+|1| `|a|`| <=| |1|2|3|4|5| café| 你好|1|2|。| IT|'|S|  \n",
    "command-r": "f|(|x|):|\n\n | x|+|1| `|a|`| <=| |1|2|3|4|5| café| 你好|1|2|。| IT|'|S|  \n",
    "exaone": "f|(|x|):|\n\n | x|+|1| `|a|`| <=| |1|2|3|4|5| café| 你好|1|2|。| IT|'|S|  \n",
    "gpt-2": "f|(|x|):|\n\n | x|+|1| `|a|`| <=| 12345| café| 你好|12|。| IT|'|S|  \n",
    "exaone4": "f|(|x|):|\n\n | x|+|1| `|a|`| <=| 12345| café| 你好|12|。| IT|'|S|  \n",
    "stablelm2": "f|(x|):\n\n| | x|+|1| `|a|`| <=| |1|2|3|4|5| café| 你好|1|2|。| IT|'S|  \n",
    "glm4": "f|(x|):\n\n| | x|+|1| `|a|`| <=| |123|45| café| 你好|12|。| IT|'S|  \n",
    "deepseek-v3": "f|(x|):\n\n| | x|+|1| `|a|`| <=| |123|45| café| |你好|12|。| IT|'S|  \n",
    "deepseek-coder": "f|(|x|):|\n|\n| | x|+|1| `|a|` <= |1|2|3|4|5| café| |你好|1|2|。| IT|'|S|  |\n",
    "falcon": "f|(|x|):|\n\n | x|+|1| |`|a|`| |<=| |123|45| café| 你好|12|。| IT|'|S|  \n",
    "default": "f|(|x|):|\n\n | x|+|1| `|a|`| |<=| |123|45| café| 你好|12|。| IT|'|S|  \n",
    "bloom": "f|(|x|)|:|\n\n | x+1| `a`| <=| 12345| café| 你好12|。| IT'S|  \n",
    "viking": "f|(|x|)|:|\n\n | x+|1| `a`| <=| |1|2|3|4|5| café| 你好|1|2|。| IT'S|  \n",
    "seed-coder": "f|(x|):|\n\n| | x|+|1| `|a|`| <=| |1|2|3|4|5| café| 你好|1|2|。| IT|'S|  \n",
    "deepseek-llm": "f|(|x|):|\n|\n| | x|+|1| `|a|`| <=| |12345| caf|é| |你好|12|。| IT|'|S|  |\n",
    "kimi-k2": "f|(x|):\n\n| | x|+|1| `|a|`| <=| |123|45| café| |你好|12|。| IT'S|  \n",
    "youtu": "f|(x|):\n\n| | x|+|1| `|a|`| <=| |1|2|3|4|5| café| |你好|1|2|。| IT'S|  \n",
    "tiny_aya": "f|(x|):\n\n| | x|+|1| `|a|`| <=| |12|345| café| 你好|12|。| IT'S|  \n",
    "cohere2moe": "f|(x|):\n\n| | x|+|1| `|a|`| <=| |12|345| café| 你好|12|。| IT'S|  \n",
    "bailingmoe": "f|(x|):\n\n| | x|+|1| `|a|`| <=| |1|2|3|4|5| café| 你好|1|2|。| IT|'S|  \n",
    "exaone-moe": "f|(x|):\n|\n| | x|+|1| `|a|`| <=| |1|2|3|4|5| café 你好|1|2|。| IT|'S|  \n",
    "laguna": "f|(x|):|\n\n| | x|+|1| `|a|`| <=| |1|2|3|4|5| café| 你好|1|2|。| IT|'S|  |\n",
    "minicpm5": "f|(x|):\n\n| | x|+|1| `|a|`| <=| |123|45| café| 你好|12|。| IT|'S|  \n",
    "jais-2": "f|(x|):\n\n| | x|+|1| `|a|`| <=| |123|45| café| 你好|12|。| IT|'S|  \n",
    "gpt-4o": "f|(x|):\n\n| | x|+|1| `|a|`| <=| |123|45| café| 你好|12|。| IT'S|  \n",
    "llama4": "f|(x|):\n\n| | x|+|1| `|a|`| <=| |123|45| café| 你好|12|。| IT'S|  \n",
    "dbrx": "f|(x|):\n\n| | x|+|1| `|a|`| <=| |123|45| café| 你好|12|。| IT|'S|  \n",
    "qwen35": "f|(x|):\n\n| | x|+|1| `|a|`| <=| |1|2|3|4|5| café| 你好|1|2|。| IT|'S|  \n",
    "hunyuan": "f|(x|):\n\n| | x|+|1| `|a|`| <=| |1|2|3|4|5| café| 你好|1|2|。| IT|'S|  \n",
    "mpt": "f|(|x|):|\n\n | x|+|1| `|a|`| <=| 12345| café| 你好|12|。| IT|'|S|  \n",
    "llama-bpe": None,  # as transformers reads it
}  # fmt: skip


@pytest.mark.parametrize(("pre", "expected"), GGUF_SPLITS.items())
def test_a_gguf_file_splits_as_it_states(tmp_path: Path, pre: str, expected: str | None) -> None:
    pytest.importorskip("gguf")
    write_gguf(tmp_path / "m.gguf", pre)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    before = str(tokenizer.backend_tokenizer.pre_tokenizer)
    split_as_in_gguf(tokenizer, tmp_path / "m.gguf")
    splits = tokenizer.backend_tokenizer.pre_tokenizer
    if expected is None:
        assert str(splits) == before
        return
    found = [GGUF_TEXT[start:end] for _, (start, end) in splits.pre_tokenize_str(GGUF_TEXT)]
    assert found == expected.split("|")


@pytest.mark.parametrize(
    ("pre", "expected"), [("llama-bpe", True), ("tekken", True), ("youtu", True), ("qwen2", False)]
)
def test_a_word_of_the_vocabulary_is_a_token_where_llama_cpp_takes_it_as_one(
    tmp_path: Path, pre: str, expected: bool
) -> None:
    """Llama 3 has words that its merges do not reach."""
    pytest.importorskip("gguf")
    write_gguf(tmp_path / "m.gguf", pre, tokens=("xyz",))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    split_as_in_gguf(tokenizer, tmp_path / "m.gguf")
    assert (len(tokenizer("xyz", add_special_tokens=False)["input_ids"]) == 1) is expected


def test_a_gguf_file_with_unknown_splits_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    write_gguf(tmp_path / "m.gguf", "superbpe")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    with pytest.raises(ConfigError, match=r"pre=superbpe: it is unknown.*smollm.*tokenizer\.json"):
        split_as_in_gguf(tokenizer, tmp_path / "m.gguf")
