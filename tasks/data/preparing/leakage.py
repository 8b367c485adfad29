"""Held-out rows that training rows repeat: what is measured on them is memory.

By n-grams of 13 words, as in Brown et al. 2020 (GPT-3), arXiv:2005.14165, appendix C.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from tasks.data.preparing.report import NUM_LISTED, Overlap
from tasks.data.preparing.shingles import shingles
from tasks.data.schema import texts_of

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

SHARE = 0.5  # of a row's n-grams: below it rows of one subject and one template are met by chance, above it few are
LEAKAGE = "leakage.parquet"

_NUM_WORDS = 13
_TEMPLATE_ROWS = 10  # n-grams of more held-out rows are their template, such as a system prompt: GPT-3 has 10 too
_ROWS_PER_READ = 256
_HASHES_PER_READ = 100_000
_FILTER_BITS = 26  # of a hash, by which most of those that are not sought are told without looking them up
_ZERO = np.zeros(1, dtype=np.uint64)
_HASHES = pa.schema([("hash", pa.uint64()), ("row", pa.int64()), ("whole", pa.bool_())])


@dataclass(frozen=True, kw_only=True)
class NamedSet:
    """Prepared rows of any kind.

    Args:
        name: for the report: a stage's, and of its sides where they are several.
        file: Parquet.
    """

    name: str
    file: Path


def find(
    train: Sequence[NamedSet], held_out: Sequence[NamedSet], connection: "DuckDBPyConnection", directory: Path
) -> tuple[int, list[Overlap]]:
    """The held-out rows whose words a training set has in one row too (exact), or at least half of whose n-grams.

    Words are compared without case and punctuation; rows of at most 13 words as a whole and with punctuation: there
    1 + 1 and 1 - 1 are two questions. Each is listed with one training row: of those that were the first to say
    something of it, the one that said most. All are written to ``leakage.parquet``.

    Returns:
        How many there are, and the first of them.
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
    listed = connection.read_parquet(file)
    count = listed.count("*").fetchall()[0][0]
    return count, [Overlap(**row) for row in listed.limit(NUM_LISTED).to_arrow_table().to_pylist()]


def _measure(measured: NamedSet, connection: "DuckDBPyConnection") -> None:
    """What there is to find: the table ``measured`` of the hashes of held-out rows, without those of their template."""
    connection.register("read_hashes", pa.RecordBatchReader.from_batches(_HASHES, _hashes(measured.file)))
    connection.execute("CREATE OR REPLACE TEMP TABLE measured AS SELECT DISTINCT * FROM read_hashes")
    connection.execute(
        "DELETE FROM measured WHERE NOT whole AND hash IN (SELECT hash FROM measured WHERE NOT whole GROUP BY hash "
        f"HAVING count(*) > {_TEMPLATE_ROWS})"
    )


def _meet(trained: NamedSet, connection: "DuckDBPyConnection") -> None:
    """The table ``met``: which of the hashes training rows have, and the first row that has each.

    The first alone: rows of one template would be as many pairs as the product of their numbers.
    """
    maybe = np.zeros(2**_FILTER_BITS, dtype=np.bool_)
    for batch in connection.sql("SELECT hash FROM measured").to_arrow_reader(_HASHES_PER_READ):
        maybe[_filter_place(batch.column("hash"))] = True
    batches = (batch.filter(pa.array(maybe[_filter_place(batch.column("hash"))])) for batch in _hashes(trained.file))
    connection.register("read_hashes", pa.RecordBatchReader.from_batches(_HASHES, batches))
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE met AS SELECT hash, whole, min(row) AS first FROM read_hashes "
        "SEMI JOIN measured USING (hash, whole) GROUP BY hash, whole"
    )


def _filter_place(hashes: pa.Array) -> npt.NDArray[np.uint64]:
    places: npt.NDArray[np.uint64] = hashes.to_numpy() >> np.uint64(64 - _FILTER_BITS)
    return places


def _hashes(file: Path) -> Iterator[pa.RecordBatch]:
    """Of each row: of all of it, and of its n-grams."""
    num_read = 0
    with pq.ParquetFile(file) as prepared:
        for batch in prepared.iter_batches(_ROWS_PER_READ):
            yield _hashes_of(texts_of(batch), num_read)
            num_read += len(batch)


def _hashes_of(texts: pa.Array, first: int) -> pa.RecordBatch:
    rows = np.arange(first, first + len(texts))
    grams = shingles(texts, _NUM_WORDS)
    sizes = np.diff(grams.offsets)
    wholes = np.diff(np.concatenate([_ZERO, np.cumsum(grams.hashes)])[grams.offsets])
    is_short = sizes < 2
    wholes[is_short] = [_folded(text) for text in texts.filter(pa.array(is_short)).to_pylist()]
    is_gram = np.repeat(~is_short, sizes)
    of_grams = np.repeat(rows, sizes)[is_gram]
    columns = [
        np.concatenate([wholes, grams.hashes[is_gram]]),
        np.concatenate([rows, of_grams]),
        np.arange(len(rows) + len(of_grams)) < len(rows),
    ]
    return pa.record_batch(columns, schema=_HASHES)


def _folded(text: str) -> int:
    return xxhash.xxh3_64_intdigest(" ".join(text.lower().split()).encode())


def _list(trained: NamedSet, measured: NamedSet, connection: "DuckDBPyConnection") -> None:
    """Adds to the table ``leaked``."""
    connection.execute(
        _OVERLAPS,
        {
            "train_set": trained.name, "held_out_set": measured.name, "share": SHARE,
            "train_file": str(trained.file), "held_out_file": str(measured.file),
        },
    )  # fmt: skip


_OVERLAPS = """
WITH
    common AS (SELECT row, first, whole FROM measured JOIN met USING (hash, whole)),
    sizes AS (SELECT row, count(*) AS size FROM measured WHERE NOT whole GROUP BY row),
    shares AS (
        SELECT row, count(*) / any_value(size) AS shared FROM common JOIN sizes USING (row) WHERE NOT whole
        GROUP BY row HAVING shared >= $share
    ),
    firsts AS (SELECT row, first, count(*) AS num_said FROM common WHERE NOT whole GROUP BY row, first),
    found AS (
        SELECT 'exact' AS kind, row, first, 1.0::DOUBLE AS shared, 0 AS num_said FROM common WHERE whole
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
