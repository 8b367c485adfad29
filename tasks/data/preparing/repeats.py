"""Near-duplicates, and leakage between splits.

**Near-duplicates** say nearly the same, found by MinHash: Broder 1997, "On the resemblance and containment of
documents".

A row's signature is 128 minima of hashes of its word 5-grams, of which the lowest byte is kept (b-bit minwise hashing:
Li and Koenig 2010, arXiv:0910.3349). Eight of them form a band. Rows that share one of the 16 bands are compared
(Leskovec, Rajaraman and Ullman, "Mining of Massive Datasets", ch. 3.4), and reported if their estimated Jaccard index
(error about 0.03) is at least 0.8: hardly any pairs with an index of 0.7, about half of those with 0.8, 19 of 20 with
0.85, all with 0.9. Rows of at most five words are compared as a whole, so that 1 + 1 and 1 - 1 differ.
Words are separated by white space, punctuation and symbols, and lower-cased. In scripts without spaces, such as
Chinese, each character is a word.

**Leakage** are held-out rows that training rows repeat, so that they measure memorization. It is found by n-grams of 13
words, as in Brown et al. 2020 (GPT-3), arXiv:2005.14165, appendix C.
"""

import hashlib
import re
import string
import unicodedata
from collections.abc import Iterator, Sequence
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

from tasks.data.images import MARK
from tasks.data.kinds import kind_of_columns, row_batches, texts_of
from tasks.data.preparing.report import LEAKAGE, NEAR_DUPLICATES, NUM_LISTED, Likeness, Overlap

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

Hashes = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]
Texts: TypeAlias = "Sequence[str] | pa.Array"

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: Knuth, The Art of Computer Programming 3, 6.4
_BLOCK = 8  # bytes that are hashed at once
_MAX_BLOCKS = 8  # longer words, such as encoded images, are hashed separately
_LOW_BYTES = np.array([2 ** (8 * count) - 1 for count in range(_BLOCK + 1)], dtype=np.uint64)
_TO_SPACES = bytes.maketrans(string.whitespace.encode(), b" " * len(string.whitespace))
_BORDERS = (string.punctuation + string.whitespace).encode()
_TO_WORDS = bytes.maketrans(
    _BORDERS + string.ascii_uppercase.encode(), b" " * len(_BORDERS) + string.ascii_lowercase.encode()
)


@dataclass(frozen=True, kw_only=True)
class Shingles:
    """The n-grams of several rows.

    Args:
        hashes: of each n-gram.
        offsets: [rows + 1]; row i has ``hashes[offsets[i]:offsets[i + 1]]``.
    """

    hashes: Hashes
    offsets: Places


def shingles(texts: Texts, size: int) -> Shingles:
    """The n-grams of ``size`` words of each text; a shorter text has one, of all its words; an empty one has none."""
    words, offsets = _word_hashes(texts)
    num_words = np.diff(offsets)
    # Zeros after each row separate its windows from the next row.
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


def by_image(texts: pa.Array) -> pa.Array:
    """Texts whose words differ where their images do: one question about two pictures is two questions."""
    if not pc.any(pc.match_substring(texts, "<image:")).as_py():
        return texts
    return pa.array([_by_image(text) for text in texts.to_pylist()], texts.type)


def _by_image(text: str | None) -> str | None:
    digests = MARK.findall(text or "")
    if not digests:
        return text
    name = hashlib.sha256("".join(digests).encode()).hexdigest()[:8]
    return re.sub(r"\w+", rf"\g<0>{name}", MARK.sub(" image ", str(text)))


def whole_hashes(texts: Texts, places: Places) -> Hashes:
    """Hashes of whole texts, including punctuation, but ignoring case and kind of white space."""
    column = texts if isinstance(texts, pa.Array) else pa.array(texts, type=pa.large_string())
    return np.array([_whole_hash(text) for text in column.take(pa.array(places)).to_pylist()], dtype=np.uint64)


def _whole_hash(text: str) -> int:
    """Hash of a normalized text; takes a third of the time of ``" ".join(text.lower().split())``."""
    folded = text.lower().encode().translate(_TO_SPACES)
    while b"  " in folded:
        folded = folded.replace(b"  ", b" ")
    return xxhash.xxh3_64_intdigest(folded.strip())


def _word_hashes(texts: Texts) -> tuple[Hashes, Places]:
    """The hash of every word, and the offsets of the rows."""
    data, offsets, of_words = _lower_words(texts)
    is_word = np.frombuffer(data, dtype=np.uint8) != ord(" ")
    is_edge = np.ones(len(data) + 1, dtype=np.bool_)
    is_edge[1:-1] = is_word[1:] != is_word[:-1]
    is_edge[offsets] = True  # words do not span rows
    is_edge[of_words] = True
    edges = np.flatnonzero(is_edge)
    begins_word = is_word[edges[:-1]]
    starts, ends = edges[:-1][begins_word], edges[1:][begins_word]
    return _block_hashes(data, starts, ends - starts), np.searchsorted(starts, offsets)


def _lower_words(texts: Texts) -> tuple[bytes, Places, Places]:
    """All texts joined, with lower-case words and spaces; offsets of the texts; further word boundaries."""
    column = texts if isinstance(texts, pa.Array) else pa.array(texts, type=pa.large_string())
    data, places = _joined(column.cast(pa.large_string()))
    of_words = np.empty(0, dtype=np.int64)
    if not data.isascii():
        data, places = _joined(pc.utf8_lower(column).cast(pa.large_string()))
        data, of_words = spaced(data)
    # In UTF-8, bytes below 128 are whole characters, so they can be translated one by one.
    return data.translate(_TO_WORDS), places, of_words


def _joined(array: pa.LargeStringArray) -> tuple[bytes, Places]:
    _, offsets, data = array.buffers()
    places = np.frombuffer(offsets, dtype=np.int64)[array.offset : array.offset + len(array) + 1]
    return data.slice(places[0], places[-1] - places[0]).to_pybytes() if data else b"", places - places[0]


def _block_hashes(data: bytes, starts: Places, lengths: Places) -> Hashes:
    """Hash of each word, eight bytes at a time; the few long ones at once."""
    blocks: npt.NDArray[np.uint64] = np.ndarray(
        len(data) + 1, dtype="<u8", buffer=data + bytes(_BLOCK), strides=(1,)
    )  # the eight bytes from every position
    hashes = lengths.astype(np.uint64)
    is_long = lengths > _MAX_BLOCKS * _BLOCK
    long = zip(starts[is_long].tolist(), lengths[is_long].tolist(), strict=True)
    hashes[is_long] = [xxhash.xxh3_64_intdigest(data[start : start + length]) for start, length in long]
    left = np.flatnonzero(~is_long)
    for block in range(_MAX_BLOCKS):
        left = left[lengths[left] > block * _BLOCK]
        if not len(left):
            break
        masks = _LOW_BYTES[np.minimum(lengths[left] - block * _BLOCK, _BLOCK)]
        hashes[left] = _mixed((hashes[left] ^ (blocks[starts[left] + block * _BLOCK] & masks)) * _MULTIPLIER)
    return hashes


def _mixed(hashes: Hashes) -> Hashes:
    """Mixes high bits into low ones, which multiplication does not."""
    return hashes ^ (hashes >> np.uint64(32))


_PART, _BORDER, _WORD = 0, 1, 2  # part of a word, separator, a word of its own
_UNSPACED = (  # scripts without spaces between words, where each character is a word
    (0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF),  # Thai and Lao, Burmese, Khmer
    (0x2E80, 0x2FDF), (0x3005, 0x3007), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF),  # Chinese
    (0x3040, 0x30FF), (0x31F0, 0x31FF), (0xFF66, 0xFF9F),  # Japanese syllables
)  # fmt: skip
_IDEOGRAPHS = 0x20000  # and all beyond


def spaced(text: bytes) -> tuple[bytes, npt.NDArray[np.int64]]:
    """Finds the words of a non-ASCII text in UTF-8.

    Returns:
        The text of the same length with spaces for non-ASCII punctuation, symbols and white space; and the start and
        end positions of characters that are words.
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
    """Role of each character; the last entry is for the ideographs beyond the basic plane."""
    roles = np.full(_IDEOGRAPHS + 1, _PART, dtype=np.uint8)
    for first, last in _UNSPACED:
        roles[first : last + 1] = _WORD
    is_border = [unicodedata.category(chr(code))[0] in "PSZ" for code in range(_IDEOGRAPHS)]
    roles[:-1][is_border] = _BORDER
    roles[-1] = _WORD
    return roles


NUM_BANDS = 16
BANDS = tuple(f"band_{band}" for band in range(NUM_BANDS))  # column names
THRESHOLD = 0.8  # of the estimated Jaccard index

_NUM_MINIMA = NUM_BANDS * 8  # a byte each
_FEW_ROWS = 10_000
_NUM_WORDS = 5
_NO_WORDS = 2**64 - 1  # first band of rows without words, which are not compared
_ROWS_AT_ONCE = 128  # fits into the CPU cache: twice as fast as a thousand
_BY_CHANCE = 1 / 256  # probability that unrelated bytes are equal


def band_hashes(texts: Texts) -> Hashes:
    """Signatures of texts: uint64 [rows, NUM_BANDS], each with eight bytes."""
    texts = by_image(texts) if isinstance(texts, pa.Array) else texts
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


def find_near_duplicates(connection: "DuckDBPyConnection", keys: str, directory: Path) -> tuple[int, list[Likeness]]:
    """Finds rows that are similar to an earlier one, except exact copies.

    Each row is compared with the first row of each of its bands, so that a thousand similar rows are a thousand pairs
    and not a million. ``near_duplicates.parquet`` lists all findings, each with the most similar row.

    Args:
        keys: a table with ``ordinal``, ``content`` (equal for exact copies), ``row_id`` and ``BANDS``.

    Returns:
        The number of findings, and the first of them.
    """
    bands = ", ".join(f"any_value({band}) AS {band}" for band in BANDS)
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE near_rows AS "
        f"SELECT min(row_id) AS row_id, min(ordinal) AS ordinal, {bands} FROM {keys} "
        f"WHERE band_0 <> {_NO_WORDS} GROUP BY content"
    )
    connection.execute("CREATE OR REPLACE TEMP TABLE near_candidates (ordinal BIGINT, first BIGINT)")
    pairs = [
        "SELECT ordinal, first FROM near_rows JOIN "
        f"(SELECT {band}, min(ordinal) AS first FROM near_rows GROUP BY {band} HAVING count(*) > 1) USING ({band}) "
        "WHERE ordinal > first"
        for band in BANDS
    ]
    ((num_rows,),) = connection.execute("SELECT count(*) FROM near_rows").fetchall()
    at_once = NUM_BANDS if num_rows < _FEW_ROWS else 1  # each statement takes milliseconds; a join takes memory
    for start in range(0, NUM_BANDS, at_once):
        joined = " UNION ALL ".join(pairs[start : start + at_once])
        connection.execute(f"INSERT INTO near_candidates {joined}")
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
    """Query for the similar candidates, in row order."""
    differing = ", ".join(f"xor(one.{band}, other.{band})" for band in BANDS)
    equal = f"list_sum([{differing}].list_transform(lambda each: {_equal_bytes('each')}))"  # planned once, not 16 times
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
    """SQL for the number of zero bytes among eight: Warren, "Hacker's Delight", ch. 6-1."""
    low, high = 0x7F7F7F7F7F7F7F7F, 0x8080808080808080
    return f"(8 - bit_count(((({differing} & {low}) + {low}) | {differing}) & {high}::UBIGINT)::INTEGER)"


def _quoted(path: Path) -> str:
    return str(path).replace("'", "''")


SHARE = 0.5  # of a row's n-grams; below it, rows of one subject or template match by chance

_NUM_LEAKED_WORDS = 13
_TEMPLATE_ROWS = 10  # n-grams in more held-out rows are template text, such as a system prompt; 10 as in GPT-3
_ROWS_PER_READ = 256
_HASHES_PER_READ = 100_000
_FILTER_BITS = 26  # bits of a hash for a filter that skips most lookups
_WHOLE, _GRAM, _PROMPT = range(3)  # hashed parts: the whole row, an n-gram, the prompt
_ZERO = np.zeros(1, dtype=np.uint64)
_HASHES = pa.schema([("hash", pa.uint64()), ("row", pa.int64()), ("of", pa.uint8())])


@dataclass(frozen=True, kw_only=True)
class NamedSet:
    """Prepared rows of any kind.

    Args:
        name: name in the report: of a stage, or of a split.
        file: Parquet.
    """

    name: str
    file: Path


def find_leakage(
    train: Sequence[NamedSet], held_out: Sequence[NamedSet], connection: "DuckDBPyConnection", directory: Path
) -> tuple[int, list[Overlap]]:
    """Finds held-out rows that training rows repeat: all words in one row (exact), at least half of the n-grams, or
    the prompt with another answer.

    Words are compared without case and punctuation; prompts and rows of at most 13 words as a whole with punctuation,
    so that 1 + 1 and 1 - 1 differ. Each is listed with one training row per set: of the rows that were first with an
    n-gram, the one with most. All are written to ``leakage.parquet``.

    Returns:
        The number of leaked rows, and the first findings.
    """
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE leaked (kind VARCHAR, train_row_id VARCHAR, held_out_row_id VARCHAR, "
        "shared DOUBLE, train_set VARCHAR, held_out_set VARCHAR)"
    )
    for measured in held_out:
        _measure(measured, connection)
        for trained in train:
            _meet(trained, connection)
            _list(trained, measured, connection)
    file = str(directory / LEAKAGE)
    connection.table("leaked").write_parquet(file)
    [(count,)] = connection.execute("SELECT count(DISTINCT held_out_row_id) FROM leaked").fetchall()
    listed = connection.read_parquet(file).limit(NUM_LISTED)
    return count, [Overlap(**row) for row in listed.to_arrow_table().to_pylist()]


def _measure(measured: NamedSet, connection: "DuckDBPyConnection") -> None:
    """Creates the table ``measured`` of the hashes of held-out rows, without those of template text.

    A row that consists only of template text keeps its hashes.
    """
    connection.register("read_hashes", pa.RecordBatchReader.from_batches(_HASHES, _hashes(measured.file)))
    connection.execute("CREATE OR REPLACE TEMP TABLE measured AS SELECT DISTINCT * FROM read_hashes")
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE template AS "
        f"SELECT hash FROM measured WHERE of = {_GRAM} GROUP BY hash HAVING count(*) > {_TEMPLATE_ROWS}"
    )
    connection.execute(
        f"DELETE FROM measured WHERE of = {_GRAM} AND hash IN (FROM template) AND row IN "
        f"(SELECT row FROM measured ANTI JOIN template USING (hash) WHERE of = {_GRAM})"
    )


def _meet(trained: NamedSet, connection: "DuckDBPyConnection") -> None:
    """Creates the table ``met``: the hashes that training rows have too, and the first row with each.

    Only the first row: otherwise rows of one template would give quadratically many pairs.
    """
    maybe = np.zeros(2**_FILTER_BITS, dtype=np.bool_)
    for batch in connection.sql("SELECT hash FROM measured").to_arrow_reader(_HASHES_PER_READ):
        maybe[_filter_place(batch.column("hash"))] = True
    batches = (batch.filter(pa.array(maybe[_filter_place(batch.column("hash"))])) for batch in _hashes(trained.file))
    connection.register("read_hashes", pa.RecordBatchReader.from_batches(_HASHES, batches))
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE met AS SELECT hash, of, min(row) AS first FROM read_hashes "
        "SEMI JOIN measured USING (hash, of) GROUP BY hash, of"
    )


def _filter_place(hashes: pa.Array) -> npt.NDArray[np.uint64]:
    places: npt.NDArray[np.uint64] = hashes.to_numpy() >> np.uint64(64 - _FILTER_BITS)
    return places


def _hashes(file: Path) -> Iterator[pa.RecordBatch]:
    """Hashes of each row: of the whole row, its n-grams, and its prompt."""
    num_read = 0
    for batch in row_batches(file, _ROWS_PER_READ):
        yield _hashes_of(batch, num_read)
        num_read += len(batch)


def _hashes_of(batch: pa.RecordBatch, first: int) -> pa.RecordBatch:
    texts, prompts = by_image(texts_of(batch)), by_image(prompts_of(batch))
    rows = np.arange(first, first + len(batch))
    grams = shingles(texts, _NUM_LEAKED_WORDS)
    sizes = np.diff(grams.offsets)
    wholes = np.diff(np.concatenate([_ZERO, np.cumsum(grams.hashes)])[grams.offsets])
    is_short = sizes < 2
    wholes[is_short] = whole_hashes(texts, np.flatnonzero(is_short))
    asking = np.flatnonzero(np.asarray(pc.greater(pc.binary_length(prompts), 0)))
    is_gram = np.repeat(~is_short, sizes)
    of_grams = np.repeat(rows, sizes)[is_gram]
    columns = [
        np.concatenate([wholes, grams.hashes[is_gram], whole_hashes(prompts, asking)]),
        np.concatenate([rows, of_grams, rows[asking]]),
        np.repeat(np.array([_WHOLE, _GRAM, _PROMPT], dtype=np.uint8), [len(rows), len(of_grams), len(asking)]),
    ]
    return pa.record_batch(columns, schema=_HASHES)


def _list(trained: NamedSet, measured: NamedSet, connection: "DuckDBPyConnection") -> None:
    """Adds the overlaps of two sets to the table ``leaked``."""
    connection.execute(
        _OVERLAPS,
        {
            "train_set": trained.name, "held_out_set": measured.name, "share": SHARE,
            "train_file": str(trained.file), "held_out_file": str(measured.file),
        },
    )  # fmt: skip


_OVERLAPS = f"""
WITH
    common AS (SELECT row, first, of FROM measured JOIN met USING (hash, of)),
    sizes AS (SELECT row, count(*) AS size FROM measured WHERE of = {_GRAM} GROUP BY row),
    shares AS (
        SELECT row, count(*) / any_value(size) AS shared FROM common JOIN sizes USING (row) WHERE of = {_GRAM}
        GROUP BY row HAVING shared >= $share
    ),
    firsts AS (SELECT row, first, count(*) AS num_said FROM common WHERE of = {_GRAM} GROUP BY row, first),
    found AS (
        SELECT if(of = {_WHOLE}, 'exact', 'prompt') AS kind, row, first, 1.0::DOUBLE AS shared, 0 AS num_said
        FROM common WHERE of <> {_GRAM}
        UNION ALL
        SELECT 'n-gram', row, first, shared, num_said FROM shares JOIN firsts USING (row)
    ),
    best AS (SELECT DISTINCT ON (row) * FROM found ORDER BY row, kind, num_said DESC, first)
INSERT INTO leaked
SELECT best.kind, trained.row_id, held_out.row_id, round(best.shared, 3), $train_set, $held_out_set
FROM best
JOIN read_parquet($held_out_file, file_row_number = true) held_out ON held_out.file_row_number = best.row
JOIN read_parquet($train_file, file_row_number = true) trained ON trained.file_row_number = best.first
ORDER BY best.row
"""


def prompts_of(rows: pa.RecordBatch) -> pa.Array:
    """The prompt of each row: its turns up to the last user turn, without the system's; for raw text all of it."""
    kind = kind_of_columns(rows.schema.names)
    turns = rows.column(kind.asked)
    if not kind.chat:
        return turns
    offsets = np.asarray(turns.offsets) - turns.offsets[0].as_py()  # a slice starts within its parent array
    messages = turns.flatten()
    role, place = messages.field("role"), np.arange(len(messages))
    last_user = np.concatenate([[-1], np.maximum.accumulate(np.where(_is(role, "user"), place, -1))])
    is_asked = place <= np.repeat(last_user[offsets[1:]], np.diff(offsets))
    is_asked &= ~_is(role, "system")
    asked = np.concatenate([[0], np.cumsum(is_asked)])[offsets]
    lines = messages.field("content").filter(pa.array(is_asked))
    return pc.binary_join(pa.ListArray.from_arrays(pa.array(asked, pa.int32()), lines), "\n")


def _is(roles: pa.Array, role: str) -> np.ndarray:
    return np.asarray(pc.equal(roles, role))
