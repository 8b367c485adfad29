"""Encodes texts as tokens, and counts the tokens before a position in the text."""

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerBase

_TEXTS_PER_CALL = 16  # more do not fit a core's cache: a call with a thousand texts takes twice as long per text


def encoder_of(tokenizer: "PreTrainedTokenizerBase") -> "Encoder":
    """The fastest encoder for a tokenizer that also gives positions."""
    if not tokenizer.is_fast:
        return PrefixEncoder(tokenizer=tokenizer)
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())  # a copy: what is set here stays here
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    num_bytes = _bytes_per_token(backend)
    quick = None if num_bytes is None else quick_encoder(backend)
    return FastEncoder(backend=backend, num_bytes=num_bytes, quick=quick)


@dataclass(frozen=True, kw_only=True)
class FastEncoder:
    """A tokenizer of the ``tokenizers`` library.

    Args:
        num_bytes: token -> number of UTF-8 bytes that it stands for; None: tokens do not stand for fixed bytes.
        quick: gives the same tokens much faster; None: this is not tested for this tokenizer.
    """

    backend: "Tokenizer"
    num_bytes: Sequence[int] | None
    quick: "QuickEncoder | None"

    def encode(self, texts: Sequence[str]) -> "Iterator[Encoded]":
        if self.quick:
            yield from (self._by_bytes(text, self.quick.ids(text)) for text in texts)
            return
        for place in range(0, len(texts), _TEXTS_PER_CALL):
            part = texts[place : place + _TEXTS_PER_CALL]
            if self.num_bytes is None:
                found = self.backend.encode_batch(part, add_special_tokens=False)
                yield from map(_by_offsets, part, found)
            else:
                fast = self.backend.encode_batch_fast(part, add_special_tokens=False)
                yield from (self._by_bytes(text, each.ids) for text, each in zip(part, fast, strict=True))

    def _by_bytes(self, text: str, ids: list[int]) -> "Encoded":
        """Finds the ends of tokens from their lengths, in a tenth of the time of offsets."""
        assert self.num_bytes is not None
        normalizer = self.backend.normalizer
        if normalizer is None or normalizer.normalize_str(text) == text:
            ends = list(accumulate(map(self.num_bytes.__getitem__, ids)))
            size = len(text) if text.isascii() else len(text.encode())
            if size == (ends[-1] if ends else 0):
                return Placed(text=text, ids=ids, ends=ends, in_bytes=size != len(text))
        return _by_offsets(text, self.backend.encode(text, add_special_tokens=False))


def _by_offsets(text: str, encoding: "Encoding") -> "Encoded":
    ends = list(accumulate((end for _, end in encoding.offsets), max))
    return Placed(text=text, ids=encoding.ids, ends=ends, in_bytes=False)


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Tokens whose places are known.

    Args:
        ends: where each token ends, ascending: in characters, or in bytes of UTF-8.
    """

    text: str
    ids: list[int]
    ends: Sequence[int]
    in_bytes: bool

    def tokens_before(self, place: int) -> int:
        """How many tokens end at or before the ``place``-th character; one across it belongs to the text after it."""
        return bisect_right(self.ends, len(self.text[:place].encode()) if self.in_bytes else place)


def _bytes_per_token(backend: "Tokenizer") -> list[int] | None:
    """The length of each token of a byte-level BPE whose tokens concatenate to exactly the bytes of the text."""
    from tokenizers import decoders, models, pre_tokenizers

    added = backend.get_added_tokens_decoder()
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if not (
        isinstance(backend.model, models.BPE)
        and isinstance(backend.decoder, decoders.ByteLevel)
        and vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet())  # else bytes become unknown tokens
        and not any(token.lstrip or token.rstrip for token in added.values())  # these stand for blanks too
        and b'"add_prefix_space":true' not in backend.pre_tokenizer.__getstate__()  # this adds a byte
    ):
        return None
    lengths = [0] * (max(vocabulary.values()) + 1)
    for token, index in vocabulary.items():
        lengths[index] = len(token)  # one character for each byte
    for index, special in added.items():
        lengths[index] = len(special.content.encode())
    return lengths


@dataclass(frozen=True, kw_only=True)
class PrefixEncoder:
    """A tokenizer written in Python, which gives no positions: prefixes of the text are tokenized too."""

    tokenizer: "PreTrainedTokenizerBase"

    def encode(self, texts: Sequence[str]) -> "Iterator[Encoded]":
        return (Unplaced(text=text, ids=self.ids(text), encoder=self) for text in texts)

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


@dataclass(frozen=True, kw_only=True)
class Unplaced:
    """Tokens whose places are not known."""

    text: str
    ids: list[int]
    encoder: PrefixEncoder

    def tokens_before(self, place: int) -> int:
        return common_prefix(self.encoder.ids(self.text[:place]), self.ids)


Encoded = Placed | Unplaced  # the tokens of one text
Encoder = FastEncoder | PrefixEncoder  # adds no special tokens around a text; can be pickled


def common_prefix(first: Sequence[object], second: Sequence[object]) -> int:
    """The length of the common prefix of two sequences of tokens or characters."""
    for place, (left, right) in enumerate(zip(first, second, strict=False)):
        if left != right:
            return place
    return min(len(first), len(second))


# A much faster byte-level BPE, where tests show that it gives exactly the same tokens: ``fastokens`` reads the same
# tokenizer and splits text by code of its own for each pattern. It is used at one version, and for the patterns below
# alone, on which tests hold it equal to ``tokenizers``.

GPT_2 = "GPT-2"  # the pattern that is built into ByteLevel
DIGITS = "digits"  # each digit is a token
_CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = _CONTRACTED + r"\p{N}" + _OTHERS
LLAMA_3 = _CONTRACTED + r"\p{N}{1,3}" + _OTHERS  # OLMo 2 too
PROVEN = ((GPT_2,), (DIGITS, GPT_2), (QWEN,), (LLAMA_3,))


class QuickEncoder:
    """Encodes one text at a time, without special tokens around it. Can be pickled."""

    def __init__(self, definition: str) -> None:
        from fastokens import Tokenizer

        self._definition = definition
        self._tokenizer = Tokenizer.from_json_str(definition)

    def __reduce__(self) -> tuple[type["QuickEncoder"], tuple[str]]:
        return QuickEncoder, (self._definition,)

    def ids(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return found


def quick_encoder(backend: "Tokenizer") -> QuickEncoder | None:
    """A quick encoder with the same tokens; None: no test shows that they would be the same."""
    definition = backend.to_str()
    stated = json.loads(definition)
    model, normalizer = stated["model"], stated["normalizer"] or {"type": "NFC"}
    known = model["type"] == "BPE" and not model["dropout"] and normalizer == {"type": "NFC"}
    if not known or backend.encode_special_tokens or _patterns(stated["pre_tokenizer"]) not in PROVEN:
        return None
    return QuickEncoder(definition)


def _patterns(pre_tokenizer: dict[str, object] | None) -> tuple[str, ...] | None:
    """The patterns that split a text before BPE, in order; None: one of them is unknown here."""
    parts = [pre_tokenizer]
    if pre_tokenizer and pre_tokenizer["type"] == "Sequence":
        listed = pre_tokenizer["pretokenizers"]
        assert isinstance(listed, list)
        parts = listed
    found: list[str] = []
    for part in parts:
        match part:
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
                found.append(GPT_2)
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}:
                continue
            case {"type": "Digits", "individual_digits": True}:
                found.append(DIGITS)
            case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}:
                found.append(pattern)
            case _:
                return None
    return tuple(found)
