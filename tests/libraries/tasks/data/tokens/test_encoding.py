"""The tokens are those of the tokenizer, and their places those of its offsets, whatever tokenizer it is."""

import json
import pickle
from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tasks.data.tokens.encoding import (
    DIGITS,
    GPT_2,
    LLAMA_3,
    PROVEN,
    QWEN,
    PrefixEncoder,
    QuickEncoder,
    encoder_of,
    quick_encoder,
)
from tests import tiny

texts = st.text(st.sampled_from("ab \n\té€😀.:'Å\u0958") | st.characters(exclude_categories=["Cs"]), max_size=20)


def bpe(change: Callable[[Tokenizer], object] = lambda tokenizer: None) -> PreTrainedTokenizerBase:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    change(tokenizer)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([" ".join(tiny.WORDS), "\n\n  ab aab é €"] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|im_end|>")


def normalizing(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.NFC()


def spaced(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def swallowing(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken("a", lstrip=True, rstrip=True)])


def sentencepiece() -> PreTrainedTokenizerBase:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([" ".join(tiny.WORDS)] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


TOKENIZERS = {
    "byte level": bpe(), "normalizing": bpe(normalizing), "spaced": bpe(spaced), "swallowing": bpe(swallowing),
    "sentencepiece": sentencepiece(),
}  # fmt: skip


@pytest.mark.parametrize("name", TOKENIZERS)
@given(parts=st.lists(texts, min_size=1, max_size=4))
def test_tokens_and_places_are_those_of_the_tokenizer(name: str, parts: list[str]) -> None:
    tokenizer, text = TOKENIZERS[name], "".join(parts)
    plain = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    (encoded,) = pickle.loads(pickle.dumps(encoder_of(tokenizer))).encode([text])
    assert encoded.ids == plain["input_ids"]
    for count in range(len(parts) + 1):
        place = len("".join(parts[:count]))
        assert encoded.tokens_before(place) == sum(end <= place for _, end in plain["offset_mapping"])


def test_a_text_whose_normal_form_is_as_long_but_moves_its_borders_is_placed_by_offsets() -> None:
    text = "\u212b\u212b\u212b\u0958"  # three letters that become a byte shorter, one that becomes three longer
    tokenizer = TOKENIZERS["normalizing"]
    normal = tokenizer.backend_tokenizer.normalizer.normalize_str(text)
    assert normal != text and len(normal.encode()) == len(text.encode())
    plain = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    (encoded,) = encoder_of(tokenizer).encode([text])
    assert encoded.tokens_before(3) == sum(end <= 3 for _, end in plain["offset_mapping"]) == 6


def test_a_tokenizer_written_in_python_is_asked_for_prefixes() -> None:
    encoder = encoder_of(ByT5Tokenizer())
    assert isinstance(encoder, PrefixEncoder)
    (encoded,) = encoder.encode(["aé€"])
    assert [encoded.tokens_before(place) for place in range(4)] == [0, 1, 3, 6]


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


def test_a_vocabulary_with_a_gap_is_left_to_the_library() -> None:
    parsed = json.loads(built("0").to_str())
    parsed["model"]["vocab"]["zebra"] = len(parsed["model"]["vocab"]) + 50
    assert quick_encoder(Tokenizer.from_str(json.dumps(parsed))) is None


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
