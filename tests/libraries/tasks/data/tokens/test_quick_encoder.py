"""The quick encoder gives the tokens of `tokenizers`, or is not used."""

import pickle
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from tasks.data.tokens.encoding import encoder_of
from tasks.data.tokens.quick_encoder import DIGITS, GPT_2, LLAMA_3, PROVEN, QWEN, QuickEncoder, quick_encoder
from tests import tiny

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Where patterns and tokenizers disagree if they do: borders of scripts, blanks, contractions, digits, added tokens.
PIECES = [
    *SPECIAL, "<tool_call>", "foo_bar", "word", "words", "<|", "|>", "a", "The", "WORLD", "camelCase", " ", "  ", "\n",
    "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\u200b", "1", "2345", "'s", "'LL", "'Re", "'\u017f", "!!", "...\n", "_",
    "é", "e\u0301", "\u0301", "Ω", "ё", "中", "文字", "한국", "हिन्दी", "ก็", "😀", "👩\u200d👧", "\x00", "\x1f",
    "\ufffd", "İ", "\ufb01", "\u212a", "ǅ", "\u202e",
]  # fmt: skip
TEXTS = st.one_of(st.lists(st.sampled_from(PIECES), max_size=40).map("".join), st.text(max_size=60))


def tokenizer(*patterns: str, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    """A small byte-level BPE that splits by these patterns first."""
    built = Tokenizer(models.BPE())
    if normalizer:
        built.normalizer = normalizer
    parts: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Digits(individual_digits=True)
        if pattern == DIGITS
        else pre_tokenizers.Split(Regex(pattern), "isolated")
        for pattern in patterns
        if pattern != GPT_2
    ]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=GPT_2 in patterns)
    built.pre_tokenizer = pre_tokenizers.Sequence([*parts, level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    built.train_from_iterator([" ".join(PIECES), *(row["text"] for row in tiny.text_rows(50))], trainer)
    built.add_tokens(
        [AddedToken("<tool_call>", normalized=False), AddedToken("foo_bar"), AddedToken("word", single_word=True)]
    )
    return built


NAMES = (*map(str, range(len(PROVEN))), "NFC")


@cache
def built(name: str) -> Tokenizer:
    if name == "NFC":
        return tokenizer(QWEN, normalizer=normalizers.NFC())
    return tokenizer(*PROVEN[int(name)])


@cache
def quick_of(name: str) -> QuickEncoder | None:
    return quick_encoder(built(name))


@pytest.mark.parametrize("name", NAMES)
@given(text=TEXTS)
def test_its_tokens_are_those_of_the_library(name: str, text: str) -> None:
    quick = quick_of(name)
    assert quick is not None
    assert quick.ids(text) == built(name).encode(text, add_special_tokens=False).ids


def test_it_survives_the_way_to_another_process() -> None:
    quick = quick_of("0")
    assert pickle.loads(pickle.dumps(quick)).ids("The words") == quick.ids("The words")


def test_what_is_not_proven_is_left_to_the_library() -> None:
    assert quick_encoder(tokenizer(r"\w+|[^\w\s]+|\s+")) is None
    assert quick_encoder(tokenizer(LLAMA_3, normalizer=normalizers.Lowercase())) is None
    dropping = tokenizer(GPT_2)
    dropping.model.dropout = 0.1
    assert quick_encoder(dropping) is None
    splitting = tokenizer(GPT_2)
    splitting.encode_special_tokens = True
    assert quick_encoder(splitting) is None


def test_the_quickstart_is_tokenized_quickly(tmp_path) -> None:
    from transformers import AutoTokenizer

    assert encoder_of(AutoTokenizer.from_pretrained(tiny.write_tokenizer(tmp_path))).quick
