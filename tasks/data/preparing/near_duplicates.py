"""Rows that say nearly the same, found by MinHash: Broder 1997, "On the resemblance and containment of documents".

A row's signature is 128 minima of hashes of its word 5-grams, of which the lowest byte is kept (b-bit minwise hashing:
Li and Koenig 2010, arXiv:0910.3349). Eight of them are a band. Rows that share one of the 16 bands are compared
(Leskovec, Rajaraman and Ullman, "Mining of Massive Datasets", ch. 3.4), and found where the estimate of their Jaccard
index, with its error of about 0.03, is 0.8 or more: of pairs at 0.7 hardly any, of those at 0.8 about half, at 0.85 19
of 20, at 0.9 all. Rows of at most five words are compared as a whole: there 1 + 1 and 1 - 1 are two questions.

A word is what stands between white space, punctuation and symbols, in lower case: none of these makes two texts differ.
In a script that sets no spaces between words, such as that of Chinese, each character is one.
"""

import string
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from rensa import RMinHash

from tasks.data.preparing.report import NEAR_DUPLICATES, NUM_LISTED, Likeness

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

Hashes = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]
Texts: TypeAlias = "Sequence[str] | pa.Array"

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: Knuth, The Art of Computer Programming 3, 6.4
_BLOCK = 8  # bytes of a word that are hashed at once
_MAX_BLOCKS = 8  # a longer word, such as an encoded image, is hashed by itself
_LOW_BYTES = np.array([2 ** (8 * count) - 1 for count in range(_BLOCK + 1)], dtype=np.uint64)
_TO_SPACES = bytes.maketrans(string.whitespace.encode(), b" " * len(string.whitespace))
_BORDERS = (string.punctuation + string.whitespace).encode()
_TO_WORDS = bytes.maketrans(
    _BORDERS + string.ascii_uppercase.encode(), b" " * len(_BORDERS) + string.ascii_lowercase.encode()
)


@dataclass(frozen=True, kw_only=True)
class Shingles:
    """The n-grams of rows, one row after another.

    Args:
        hashes: of each n-gram.
        offsets: [rows + 1]: row i has ``hashes[offsets[i]:offsets[i + 1]]``.
    """

    hashes: Hashes
    offsets: Places


def shingles(texts: Texts, size: int) -> Shingles:
    """The n-grams of ``size`` words of each text; of a shorter text one, of all its words; of no words none."""
    words, offsets = _word_hashes(texts)
    num_words = np.diff(offsets)
    # Zeros after each row keep a window from reaching into the next one.
    shift = np.arange(len(texts)) * (size - 1)
    padded = np.zeros(len(words) + (len(texts) + 1) * (size - 1), dtype=np.uint64)
    padded[np.arange(len(words)) + np.repeat(shift, num_words)] = words
    counts = np.where(num_words == 0, 0, np.maximum(num_words - size + 1, 1))
    firsts = np.concatenate([[0], np.cumsum(counts)])
    places = np.arange(firsts[-1]) + np.repeat(offsets[:-1] + shift - firsts[:-1], counts)
    rolled = padded[: len(padded) - size + 1]
    for step in range(1, size):
        rolled = rolled * _MULTIPLIER + padded[step : step + len(rolled)]
    return Shingles(hashes=_mixed(rolled[places]), offsets=firsts)


def whole_hashes(texts: Texts, places: Places) -> Hashes:
    """Of all that some of the texts say, punctuation too, but neither case nor the kind of white space."""
    given = texts if isinstance(texts, pa.Array) else pa.array(texts, type=pa.large_string())
    return np.array([_whole_hash(text) for text in given.take(pa.array(places)).to_pylist()], dtype=np.uint64)


def _whole_hash(text: str) -> int:
    """A third of the time that ``" ".join(text.lower().split())`` takes."""
    folded = text.lower().encode().translate(_TO_SPACES)
    while b"  " in folded:
        folded = folded.replace(b"  ", b" ")
    return xxhash.xxh3_64_intdigest(folded.strip())


def _word_hashes(texts: Texts) -> tuple[Hashes, Places]:
    """The hash of every word; and where each row begins among them, with the end of the last."""
    data, offsets, of_words = _lower_words(texts)
    is_word = np.frombuffer(data, dtype=np.uint8) != ord(" ")
    is_edge = np.ones(len(data) + 1, dtype=np.bool_)
    is_edge[1:-1] = is_word[1:] != is_word[:-1]
    is_edge[offsets] = True  # two rows share no word
    is_edge[of_words] = True
    edges = np.flatnonzero(is_edge)
    begins_word = is_word[edges[:-1]]
    starts, ends = edges[:-1][begins_word], edges[1:][begins_word]
    return _block_hashes(data, starts, ends - starts), np.searchsorted(starts, offsets)


def _lower_words(texts: Texts) -> tuple[bytes, Places, Places]:
    """All texts in one, words in lower case, spaces between them; where each text begins; where words meet else."""
    given = texts if isinstance(texts, pa.Array) else pa.array(texts, type=pa.large_string())
    data, places = _joined(given.cast(pa.large_string()))
    of_words = np.empty(0, dtype=np.int64)
    if not data.isascii():
        data, places = _joined(pc.utf8_lower(given).cast(pa.large_string()))
        data, of_words = spaced(data)
    # Below 128 a byte is no part of a longer UTF-8 character, so the bytes may be exchanged one by one.
    return data.translate(_TO_WORDS), places, of_words


def _joined(array: pa.LargeStringArray) -> tuple[bytes, Places]:
    _, offsets, data = array.buffers()
    places = np.frombuffer(offsets, dtype=np.int64)[array.offset : array.offset + len(array) + 1]
    return data.slice(places[0], places[-1] - places[0]).to_pybytes() if data else b"", places - places[0]


def _block_hashes(data: bytes, starts: Places, lengths: Places) -> Hashes:
    """Of each word, eight bytes at a time; of the few long ones at once."""
    blocks: npt.NDArray[np.uint64] = np.ndarray(
        len(data) + 1, dtype="<u8", buffer=data + bytes(_BLOCK), strides=(1,)
    )  # at every byte the eight that begin there
    hashes = lengths.astype(np.uint64)
    is_long = lengths > _MAX_BLOCKS * _BLOCK
    long = zip(starts[is_long].tolist(), lengths[is_long].tolist(), strict=True)
    hashes[is_long] = [xxhash.xxh3_64_intdigest(data[start : start + length]) for start, length in long]
    left = np.flatnonzero(~is_long)
    for block in range(_MAX_BLOCKS):
        left = left[lengths[left] > block * _BLOCK]
        if not len(left):
            break
        given = _LOW_BYTES[np.minimum(lengths[left] - block * _BLOCK, _BLOCK)]
        hashes[left] = _mixed((hashes[left] ^ (blocks[starts[left] + block * _BLOCK] & given)) * _MULTIPLIER)
    return hashes


def _mixed(hashes: Hashes) -> Hashes:
    """Multiplication moves nothing downwards; this does."""
    return hashes ^ (hashes >> np.uint64(32))


_PART, _BORDER, _WORD = 0, 1, 2  # of a word, between words, a word of its own
_UNSPACED = (  # scripts that set no spaces between words: of these each character is one
    (0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF),  # Thai and Lao, Burmese, Khmer
    (0x2E80, 0x2FDF), (0x3005, 0x3007), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF),  # Chinese
    (0x3040, 0x30FF), (0x31F0, 0x31FF), (0xFF66, 0xFF9F),  # Japanese syllables
)  # fmt: skip
_IDEOGRAPHS = 0x20000  # and all beyond


def spaced(text: bytes) -> tuple[bytes, npt.NDArray[np.int64]]:
    """Marks the words of a text in UTF-8.

    Returns:
        The text with spaces for its punctuation, symbols and white space beyond ASCII, of as many bytes; and the places
        where characters that are words begin and end.
    """
    characters = np.frombuffer(text.decode().encode("utf-32-le"), dtype="<u4")
    characters = characters[characters >= 0x80]
    found = np.frombuffer(text, dtype=np.uint8).copy()
    starts = np.flatnonzero(found >= 0xC0)
    sizes = 2 + (characters >= 0x800) + (characters >= 0x10000)
    roles = _roles()[np.minimum(characters, _IDEOGRAPHS)]
    for place in range(4):
        found[starts[(roles == _BORDER) & (sizes > place)] + place] = ord(" ")
    words = roles == _WORD
    return found.tobytes(), np.concatenate([starts[words], starts[words] + sizes[words]])


@cache
def _roles() -> npt.NDArray[np.uint8]:
    """Of each character up to the ideographs beyond the basic plane."""
    roles = np.full(_IDEOGRAPHS + 1, _PART, dtype=np.uint8)
    for first, last in _UNSPACED:
        roles[first : last + 1] = _WORD
    is_border = [unicodedata.category(chr(code))[0] in "PSZ" for code in range(_IDEOGRAPHS)]
    roles[:-1][is_border] = _BORDER
    roles[-1] = _WORD
    return roles


NUM_BANDS = 16
BANDS = tuple(f"band_{band}" for band in range(NUM_BANDS))  # the columns that hold them
THRESHOLD = 0.8  # of the estimated Jaccard index

_NUM_MINIMA = NUM_BANDS * 8  # a byte each
_NUM_WORDS = 5
_NO_WORDS = 2**64 - 1  # the first band of a row that has none: such rows are not compared
_ROWS_AT_ONCE = 128  # whose arrays stay in the cache of a processor: twice as fast as a thousand
_BY_CHANCE = 1 / 256  # how often two bytes are equal that have nothing to do with each other


def band_hashes(texts: Texts) -> Hashes:
    """Signatures of texts: uint64 [rows, NUM_BANDS], each with eight bytes of the signature."""
    pieces = [texts[start : start + _ROWS_AT_ONCE] for start in range(0, len(texts), _ROWS_AT_ONCE)]
    return np.concatenate([np.empty((0, NUM_BANDS), dtype=np.uint64), *map(_signatures, pieces)])


def _signatures(texts: Texts) -> Hashes:
    grams = shingles(texts, _NUM_WORDS)
    short = np.flatnonzero(np.diff(grams.offsets) == 1)
    grams.hashes[grams.offsets[short]] = whole_hashes(texts, short)
    minima = RMinHash.digest_matrix_from_flat_token_hashes(
        grams.hashes, grams.offsets.astype(np.uint64), num_perm=_NUM_MINIMA, seed=0
    )
    return np.array(minima.to_rows(), dtype=np.uint32).astype(np.uint8).view(np.uint64)


def find(connection: "DuckDBPyConnection", keys: str, directory: Path) -> tuple[int, list[Likeness]]:
    """The rows that say nearly the same as an earlier one, exact copies apart.

    A row is compared with the first that has a band in common, of each of its bands, so that a thousand rows alike are
    a thousand pairs and not a million. ``near_duplicates.parquet`` gets all that are found, each with the row that it
    is most like.

    Args:
        keys: what a query can read from, with ``ordinal``, ``content``, which exact copies share, ``row_id`` and
            ``BANDS``.
    Returns:
        How many there are, and the first of them.
    """
    bands = ", ".join(f"any_value({band}) AS {band}" for band in BANDS)
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE near_rows AS "
        f"SELECT min(row_id) AS row_id, min(ordinal) AS ordinal, {bands} FROM {keys} "
        f"WHERE band_0 <> {_NO_WORDS} GROUP BY content"
    )
    connection.execute("CREATE OR REPLACE TEMP TABLE near_candidates (ordinal BIGINT, first BIGINT)")
    for band in BANDS:
        connection.execute(
            "INSERT INTO near_candidates SELECT ordinal, first FROM near_rows JOIN "
            f"(SELECT {band}, min(ordinal) AS first FROM near_rows GROUP BY {band} HAVING count(*) > 1) USING ({band}) "
            "WHERE ordinal > first"
        )
    connection.execute(f"COPY ({_found()}) TO '{_quoted(directory / NEAR_DUPLICATES)}' (FORMAT parquet)")
    connection.execute("DROP TABLE near_rows")
    connection.execute("DROP TABLE near_candidates")
    found = connection.read_parquet(str(directory / NEAR_DUPLICATES))
    count = found.count("*").fetchall()[0][0]
    listed = [
        Likeness(row_id=row_id, other_row_id=other, similarity=round(similarity, 3))
        for row_id, other, similarity in found.limit(NUM_LISTED).fetchall()
    ]
    return count, listed


def _found() -> str:
    """The query of the candidates that are alike, in the order of the rows."""
    equal = " + ".join(_equal_bytes(f"xor(one.{band}, other.{band})") for band in BANDS)
    similarity = f"greatest(0, (({equal}) / {_NUM_MINIMA} - {_BY_CHANCE}) / (1 - {_BY_CHANCE}))"
    return (
        "SELECT row_id, other_row_id, similarity FROM (SELECT DISTINCT ON (ordinal) * FROM ("
        "SELECT one.ordinal, first, one.row_id, other.row_id AS other_row_id, "
        f"{similarity} AS similarity FROM (SELECT DISTINCT ordinal, first FROM near_candidates) candidate "
        "JOIN near_rows one ON one.ordinal = candidate.ordinal "
        "JOIN near_rows other ON other.ordinal = candidate.first"
        f") WHERE similarity >= {THRESHOLD} ORDER BY ordinal, similarity DESC, first) ORDER BY ordinal"
    )


def _equal_bytes(differing: str) -> str:
    """How many of eight bytes are zero: Warren, "Hacker's Delight", ch. 6-1."""
    low, high = 0x7F7F7F7F7F7F7F7F, 0x8080808080808080
    return f"(8 - bit_count(((({differing} & {low}) + {low}) | {differing}) & {high}::UBIGINT)::INTEGER)"


def _quoted(path: Path) -> str:
    return str(path).replace("'", "''")
