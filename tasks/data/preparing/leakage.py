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
import pyarrow.compute as pc

from tasks.data.kinds import kind_of_columns, texts_of
from tasks.data.ordered_pool import row_batches
from tasks.data.preparing.near_duplicates import shingles, whole_hashes
from tasks.data.preparing.report import LEAKAGE, NUM_LISTED, Overlap

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

SHARE = 0.5  # of a row's n-grams: below it rows of one subject and one template are met by chance, above it few are

_NUM_WORDS = 13
_TEMPLATE_ROWS = 10  # n-grams of more held-out rows are their template, such as a system prompt: GPT-3 has 10 too
_ROWS_PER_READ = 256
_HASHES_PER_READ = 100_000
_FILTER_BITS = 26  # of a hash, by which most that are not searched for are skipped without a look-up
_WHOLE, _GRAM, _PROMPT = range(3)  # what is hashed: all of a row, a part of it, what it asks
_ZERO = np.zeros(1, dtype=np.uint64)
_HASHES = pa.schema([("hash", pa.uint64()), ("row", pa.int64()), ("of", pa.uint8())])


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
    """The held-out rows whose words a training set has in one row too (exact), or at least half of whose n-grams, or
    whose prompt, whatever its answer there.

    Words are compared without case and punctuation; prompts, and rows of at most 13 words, as a whole and with
    punctuation: there 1 + 1 and 1 - 1 are two questions. Each is listed with one training row of each set: of those
    that were the first to say something of it, the one that said most. All are written to ``leakage.parquet``.

    Returns:
        How many there are, each counted once, and the first that are listed.
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
    """What there is to find: the table ``measured`` of the hashes of held-out rows, without those of their template.

    A row that says nothing else keeps them.
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
    """The table ``met``: which of the hashes training rows have, and the first row that has each.

    The first alone: rows of one template would be as many pairs as the product of their numbers.
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
    """Of each row: of all of it, of its n-grams, and of its prompt."""
    num_read = 0
    for batch in row_batches(file, _ROWS_PER_READ):
        yield _hashes_of(batch, num_read)
        num_read += len(batch)


def _hashes_of(batch: pa.RecordBatch, first: int) -> pa.RecordBatch:
    texts, prompts = texts_of(batch), prompts_of(batch)
    rows = np.arange(first, first + len(batch))
    grams = shingles(texts, _NUM_WORDS)
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
    """Adds to the table ``leaked``."""
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
    """The prompt of each row: its turns up to the user's last, a line each, without the system's; of raw text all."""
    kind = kind_of_columns(rows.schema.names)
    turns = rows.column(kind.asked)
    if not kind.chat:
        return turns
    offsets = np.asarray(turns.offsets) - turns.offsets[0].as_py()  # a part of a longer array begins within it
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
