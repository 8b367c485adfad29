"""Replay: some rows that earlier models were trained on go into the data of the next, which would else forget them.

Robins 1995, "Catastrophic forgetting, rehearsal and pseudorehearsal"; for language models Scialom et al. 2022,
arXiv:2205.12393, where 1 % is enough.
"""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from duckdb import DuckDBPyConnection

from tasks.data.batches import row_batches
from tasks.data.preparing.database import number
from tasks.data.preparing.row_split import HELD_OUT, RESTING, TRAIN
from tasks.recipe import Input

_ROWS_PER_READ = 10_000


def read_old(connection: DuckDBPyConnection, given: Input | None) -> None:
    """Makes the table ``old`` of all rows that were ever trained on or held out; their contents stay where they are.

    The plan has seen that they were split alike.

    Args:
        given: the data that the last model was made from, and its predecessors; None: there is none.
    """
    connection.execute("CREATE TABLE old (number BIGINT, row_id VARCHAR, held_out BOOLEAN)")
    first = 0
    for side, path in _files(given):
        connection.read_parquet(str(path), file_row_number=True).create_view("old_file", replace=True)
        connection.execute(
            f"INSERT INTO old SELECT {first} + file_row_number AS number, row_id, {side == HELD_OUT} FROM old_file "
            "ORDER BY number"
        )
        first += pq.ParquetFile(path).metadata.num_rows


def draw_old(connection: DuckDBPyConnection, given: Input, share: float, seed: int, num_new: int) -> int:
    """Makes the table ``again`` (number) of the old rows that are trained on again; returns how many.

    As many are drawn that they are ``share`` of the training rows, or all there are; all where nothing is new.

    Args:
        given: its fingerprint is in the choice, so that each generation replays others.
        num_new: training rows that are new.
    """
    trained = number(connection, "SELECT count(*) FROM old WHERE NOT held_out")
    count = round(num_new * share / (1 - share)) if num_new else trained
    connection.execute(
        f"CREATE TABLE again AS SELECT number FROM old WHERE NOT held_out "
        f"ORDER BY sha256('{seed}:{given.fingerprint}:' || row_id), number LIMIT {count}"
    )
    return min(count, trained)


def old_rows(connection: DuckDBPyConnection, given: Input) -> Iterator[tuple[str, pa.RecordBatch]]:
    """The old rows with the side that each is on now: what was held out stays so, and what is not drawn rests."""
    first = 0
    for side, path in _files(given):
        for batch in row_batches(path, _ROWS_PER_READ):
            if side == HELD_OUT:
                yield HELD_OUT, batch
            else:
                drawn = _drawn(connection, first, len(batch))
                yield TRAIN, batch.filter(drawn)
                yield RESTING, batch.filter(pc.invert(drawn))
            first += len(batch)


def _files(given: Input | None) -> list[tuple[str, Path]]:
    found = [(side, given.path / side) for side in (TRAIN, HELD_OUT, RESTING)] if given else []
    return [(side, path) for side, path in found if path.exists()]


def _drawn(connection: DuckDBPyConnection, first: int, count: int) -> pa.Array:
    """Of so many old rows from one on, whether each is trained on again."""
    query = (
        "SELECT again.number IS NOT NULL AS drawn FROM old LEFT JOIN again USING (number) "
        f"WHERE old.number >= {first} AND old.number < {first + count} ORDER BY old.number"
    )
    return connection.sql(query).to_arrow_table()["drawn"].combine_chunks()
