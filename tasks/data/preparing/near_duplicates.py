"""Rows that say nearly the same, found by MinHash: Broder 1997, "On the resemblance and containment of documents".

A row's signature is 128 minima of hashes of its word 5-grams, of which the lowest byte is kept (b-bit minwise hashing:
Li and Koenig 2010, arXiv:0910.3349). Eight of them are a band. Rows that share one of the 16 bands are compared
(Leskovec, Rajaraman and Ullman, "Mining of Massive Datasets", ch. 3.4), and found where the estimate of their Jaccard
index, with its error of about 0.03, is 0.8 or more: of pairs at 0.7 hardly any, of those at 0.8 about half, at 0.85 19
of 20, at 0.9 all. Rows of at most five words are compared as a whole: there 1 + 1 and 1 - 1 are two questions.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rensa import RMinHash

from tasks.data.preparing.report import NEAR_DUPLICATES, NUM_LISTED, Likeness
from tasks.data.preparing.shingles import Hashes, Texts, shingles, whole_hashes

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

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
