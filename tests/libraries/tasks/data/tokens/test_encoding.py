"""The tokens are those of the tokenizer, and their places those of its offsets, whatever tokenizer it is."""

import pickle
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tasks.data.tokens.encoding import FastEncoder, PrefixEncoder, encoder_of
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


def test_only_tokens_that_are_bytes_are_counted_as_bytes() -> None:
    counted = {name: encoder_of(tokenizer).num_bytes is not None for name, tokenizer in TOKENIZERS.items()}
    assert counted == {
        "byte level": True, "normalizing": True, "spaced": False, "swallowing": False, "sentencepiece": False,
    }  # fmt: skip


def test_a_text_whose_normal_form_is_as_long_but_moves_its_borders_is_placed_by_offsets() -> None:
    text = "\u212b\u212b\u212b\u0958"  # three letters that become a byte shorter, one that becomes three longer
    tokenizer = TOKENIZERS["normalizing"]
    normal = tokenizer.backend_tokenizer.normalizer.normalize_str(text)
    assert normal != text and len(normal.encode()) == len(text.encode())
    plain = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    (encoded,) = encoder_of(tokenizer).encode([text])
    assert encoded.tokens_before(3) == sum(end <= 3 for _, end in plain["offset_mapping"]) == 6


def test_many_texts_keep_their_order_and_the_tokenizer_its_settings() -> None:
    tokenizer = bpe()
    tokenizer.backend_tokenizer.enable_truncation(2)
    texts = [tiny.sentence(index, 9) for index in range(40)]
    encoder = encoder_of(tokenizer)
    assert isinstance(encoder, FastEncoder)
    assert tokenizer.backend_tokenizer.truncation is not None
    assert [each.ids for each in encoder.encode(texts)] == tokenizer(texts, add_special_tokens=False)["input_ids"]


def test_a_tokenizer_written_in_python_is_asked_for_prefixes() -> None:
    encoder = encoder_of(ByT5Tokenizer())
    assert isinstance(encoder, PrefixEncoder)
    (encoded,) = encoder.encode(["aé€"])
    assert [encoded.tokens_before(place) for place in range(4)] == [0, 1, 3, 6]


def test_a_token_across_a_border_belongs_to_what_follows() -> None:
    (encoded,) = encoder_of(TOKENIZERS["byte level"]).encode(["list returns"])
    tokens = TOKENIZERS["byte level"].convert_ids_to_tokens(encoded.ids)
    assert tokens[-1] == "Ġreturns"
    assert {encoded.tokens_before(place) for place in range(len("list"), len("list returns"))} == {len(tokens) - 1}
