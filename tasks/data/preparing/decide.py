"""Decides which rows are used and in which split: slices, samples, ids, splits, mixtures, and replay of earlier rows.

Robins 1995, "Catastrophic forgetting, rehearsal and pseudorehearsal"; for language models Scialom et al. 2022,
arXiv:2205.12393, where 1 % is enough.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from duckdb import DuckDBPyConnection

from lineage.artifact import Source
from lineage.errors import DataError
from lineage.store import OUTSIDE
from tasks.data.kinds import HELD_OUT, RESTING, TRAIN, row_batches
from tasks.data.preparing.convert_rows import Staging
from tasks.data.preparing.options import Prepare
from tasks.data.preparing.report import MAX_PLACES, UNMIXED, UNSAMPLED, Remark
from tasks.recipe import Input

CONTENT = "printf('%016x', content)"  # SQL of a row's id, without the number of its copy

_BETWEEN = "on neither side, since held_out is a count; a share keeps none apart"
_PARTED = "away from its group, beside the row that it is a copy of"
_SHARES = 2**64
_MEMORY = "256MB"  # Python, Arrow and the current batch take about twice that in addition
_FEWEST, _MOST = 0.5, 2**40  # bounds for the rows of a slot: rounds to one; more than any disk holds
_ROWS_PER_READ = 10_000


@dataclass(kw_only=True)
class Decided:
    """The decisions on the good rows.

    Args:
        known: number of rows that the replayed data already has.
        duplicates: number of exact duplicates.
        lowest: smallest share of a row, in [0, 1]: a ``held_out`` above it holds out at least one row.
        one_group: whether all rows are of one group.
        repeated: number of repetitions of rows by the mixture.
        as_read: whether rows are written in reading order.
    """

    known: int
    duplicates: int
    lowest: float
    one_group: bool
    repeated: int
    as_read: bool


def open_database(directory: Path, threads: int) -> DuckDBPyConnection:
    """An empty DuckDB database in a scratch directory, with bounded memory, which spills to disk.

    Rows are drawn by hashes that do not change between versions of DuckDB, and every order is total.
    """
    config: dict[str, str | bool | int | float | list[str]] = {
        "memory_limit": _MEMORY, "temp_directory": str(directory / "spilled"), "threads": threads,
        "autoinstall_known_extensions": False,
    }  # fmt: skip
    connection = duckdb.connect(str(directory / "decide.duckdb"), config=config)
    connection.execute("SET enable_progress_bar = false")  # it would be printed to stdout
    return connection


def _number(connection: DuckDBPyConnection, query: str) -> int:
    """The single number that a query returns."""
    [(found,)] = connection.execute(query).fetchall()
    return int(found)


def _draw_hash(seed: int, column: str) -> str:
    """SQL for a hash in [0, 2^64) by which rows are drawn."""
    return f"md5_number_lower('{seed}:' || {column})"


def decide(connection: DuckDBPyConnection, staging: Staging, options: Prepare) -> Decided:
    """Creates the table ``placed`` (row, held_out, row_id, position) of the used new rows; reports the others.

    Args:
        connection: with the table ``old`` (row_id, held_out) of the earlier rows.

    Raises:
        DataError: a slot of the mixture is empty.
    """
    _select(connection, staging)
    # Duplicates are numbered, and get the share of the first one, hence its split; ``own`` is that of their own group.
    connection.execute(
        f"CREATE TABLE named AS SELECT *, {CONTENT} || CASE WHEN copy > 0 THEN '-' || copy ELSE '' END AS row_id FROM ("
        "SELECT row, slot, place, content, share AS own, first(share) OVER same AS share, "
        "row_number() OVER same - 1 AS copy, count(*) OVER (PARTITION BY content) AS copies FROM selected "
        "WINDOW same AS (PARTITION BY content ORDER BY row))"
    )
    _split(connection, staging, options)
    repeated, as_read = _arrange(connection, staging, options)
    return Decided(
        known=_number(connection, "SELECT count(*) FROM named SEMI JOIN old USING (row_id)"),
        duplicates=_number(connection, "SELECT count(*) FROM sided WHERE copy > 0"),
        lowest=_number(connection, f"SELECT coalesce(min(share), {_SHARES - 1}) FROM named") / _SHARES,
        one_group=_number(connection, "SELECT coalesce(min(share) = max(share), false)::INT FROM named") == 1,
        repeated=repeated, as_read=as_read,
    )  # fmt: skip


def _select(connection: DuckDBPyConnection, staging: Staging) -> None:
    """Creates ``selected``, the rows of each source's slice and sample; counts the others."""
    connection.read_parquet(str(staging.keys)).create_view("keys")
    connection.execute("CREATE TABLE selected (row BIGINT, slot INT, place BIGINT, content UBIGINT, share UBIGINT)")
    for staged in staging.sources.values():
        source, report, sample = staged.source, staged.report, ""
        inside = f"FROM keys WHERE slot = {staged.number} AND place >= {staged.start} AND place < {staged.stop}"
        report.drop({OUTSIDE: report.rows_read - (staged.stop - staged.start)})
        if source.sample_count is not None:
            report.drop({UNSAMPLED: _number(connection, f"SELECT count(*) {inside}") - source.sample_count})
            sample = f"ORDER BY {_draw_hash(source.shuffle_seed or 0, 'content')}, row LIMIT {source.sample_count}"
        connection.execute(f"INSERT INTO selected SELECT row, slot, place, content, share {inside} {sample}")


def _split(connection: DuckDBPyConnection, staging: Staging, options: Prepare) -> None:
    """Creates ``sided``: ``held_out`` is null for rows between the splits. A copy of an old row joins its split.

    Remarks on copies that are in another split than their group.
    """
    if isinstance(options.held_out, float):
        highest = between = options.highest_share()
    else:  # the highest share that is held out, and the highest one that is not trained on
        nth = f"SELECT share FROM named ORDER BY share LIMIT 1 OFFSET {options.held_out - 1}"
        highest = _number(connection, f"SELECT coalesce(({nth}), {_SHARES - 1}::UBIGINT)")
        between = min(2 * highest, _SHARES - 1)

    def side(share: str) -> str:
        return f"CASE WHEN {share} <= {highest} THEN true WHEN {share} > {between} THEN false END"

    connection.execute(
        f"CREATE TABLE sided AS SELECT new.*, coalesce(old.held_out, {side('share')}) AS held_out "
        f"FROM (SELECT * FROM named ANTI JOIN old USING (row_id)) new LEFT JOIN old ON old.row_id = {CONTENT}"
    )
    parted = connection.execute(
        f"SELECT slot, count(*), list(row_id ORDER BY row)[:{MAX_PLACES}] FROM sided "
        f"WHERE copy > 0 AND own <> share AND held_out <> {side('own')} GROUP BY slot"
    ).fetchall()
    dropped = connection.execute("SELECT slot, count(*) FROM sided WHERE held_out IS NULL GROUP BY slot").fetchall()
    reports = [staged.report for staged in staging.sources.values()]
    for slot, count, places in parted:
        reports[slot].remarks[_PARTED] = Remark(count=count, places=places)
    for slot, count in dropped:
        reports[slot].drop({_BETWEEN: count})


def mixed_counts(counts: Mapping[str, int], options: Prepare) -> Mapping[str, int]:
    """Number of training rows to take from each slot; may exceed its rows, which are then repeated.

    Args:
        counts: slot -> number of its training rows.

    Raises:
        DataError: a slot is empty, or none of its rows would be taken.
    """
    weights = options.proportions
    if options.temperature is not None:
        largest = max(counts.values()) or 1  # powers of ratios cannot overflow
        weights = {slot: (count / largest) ** (1 / options.temperature) for slot, count in counts.items()}
    if weights is None:
        return counts
    empty = [slot for slot, count in counts.items() if not count]
    if empty:
        raise DataError(
            f"a mixture of {', '.join(counts)}: {', '.join(empty)} has no training row; give it rows, or take it out "
            "of the inputs and the proportions"
        )
    per_weight = [counts[slot] / weight if weight else math.inf for slot, weight in weights.items()]
    rows = max(per_weight) if options.stopping == "all_exhausted" else min(per_weight)
    wanted = {slot: rows * weight for slot, weight in weights.items()}
    for slot, count in wanted.items():
        if not _FEWEST < count < _MOST:
            raise DataError(
                f"a mixture of {', '.join(counts)}: {count:.3g} rows of {slot}, which has {counts[slot]}; a mixture of "
                "one row of each slot at least is accepted, and one that can be written; set a larger share for the "
                "slot of the fewest rows, or a temperature nearer to 1"
            )
    return {slot: round(count) for slot, count in wanted.items()}


def _arrange(connection: DuckDBPyConnection, staging: Staging, options: Prepare) -> tuple[int, bool]:
    """Creates ``placed`` from ``sided``; returns ``repeated`` and ``as_read`` of ``Decided``."""
    found = dict(connection.execute("SELECT slot, count(*) FROM sided WHERE NOT held_out GROUP BY slot").fetchall())
    have = {slot: found.get(source.number, 0) for slot, source in staging.sources.items()}
    want = mixed_counts(have, options)
    repeated = sum(max(0, want[slot] - have[slot]) for slot in have)
    for slot, staged in staging.sources.items():
        staged.report.drop({UNMIXED: have[slot] - want[slot]})
    _take(connection, have, want, options.seed)
    sources = [staged.source for staged in staging.sources.values()]
    as_read = len(sources) == 1 and sources[0].shuffle_seed is None and not repeated
    # Slots are interleaved evenly, each in its own order.
    keys = " ".join(f"WHEN {slot} THEN {_key(source)}" for slot, source in enumerate(sources))
    positions = (
        "SELECT row, held_out, row_id, "
        "row_number() OVER (ORDER BY (rank - 0.5) / size, slot, held_out) - 1 AS position "
        "FROM (SELECT *, count(*) OVER (PARTITION BY slot, held_out) AS size, row_number() OVER "
        f"(PARTITION BY slot, held_out ORDER BY repetition, CASE slot {keys} END, row) AS rank FROM taken)"
    )
    placed = "SELECT row, held_out, row_id, row AS position FROM taken" if as_read else positions
    connection.execute(f"CREATE TABLE placed AS {placed} ORDER BY row")
    return repeated, as_read


def _take(connection: DuckDBPyConnection, have: Mapping[str, int], want: Mapping[str, int], seed: int) -> None:
    """Creates ``taken``: all held-out rows, and the wanted number of training rows, repeated as copies if needed."""
    if want == have:
        connection.execute("CREATE VIEW taken AS SELECT *, 0 AS repetition FROM sided WHERE held_out IS NOT NULL")
        return
    connection.execute("CREATE TABLE mixture (slot INT, have BIGINT, want BIGINT)")
    connection.executemany(
        "INSERT INTO mixture VALUES (?, ?, ?)", [(slot, have[name], want[name]) for slot, name in enumerate(have)]
    )
    connection.execute(
        f"CREATE TABLE taken AS WITH drawn AS (SELECT *, row_number() OVER (PARTITION BY slot ORDER BY "
        f"{_draw_hash(seed, 'row_id')}, row) AS rank FROM sided JOIN mixture USING (slot) WHERE NOT held_out), "
        "repeated AS (SELECT *, unnest(range(want // have + (rank <= want % have)::INT)) AS repetition FROM drawn) "
        f"SELECT row, slot, place, held_out, repetition, CASE WHEN repetition = 0 THEN row_id "
        f"ELSE {CONTENT} || '-' || (copy + repetition * copies) END AS row_id FROM repeated "
        "UNION ALL SELECT row, slot, place, held_out, 0, row_id FROM sided WHERE held_out"
    )


def _key(source: Source) -> str:
    """SQL for the sort key of a source's rows: their places, shuffled within ``shuffle_buffer`` rows or fully."""
    if source.shuffle_seed is None:
        return "place::DOUBLE"
    share = f"{_draw_hash(source.shuffle_seed, 'place')} / {2**64}::DOUBLE"
    return share if source.shuffle_buffer is None else f"place + {share} * {source.shuffle_buffer}"


def read_old(connection: DuckDBPyConnection, old_data: Input | None) -> None:
    """Creates the table ``old`` of all rows that were ever trained on or held out, without their contents.

    The plan has checked that they have the same split settings.

    Args:
        old_data: the data of the last model, which includes that of its predecessors; None: there is none.
    """
    connection.execute("CREATE TABLE old (number BIGINT, row_id VARCHAR, held_out BOOLEAN)")
    first = 0
    for side, path in _files(old_data):
        connection.read_parquet(str(path), file_row_number=True).create_view("old_file", replace=True)
        connection.execute(
            f"INSERT INTO old SELECT {first} + file_row_number AS number, row_id, {side == HELD_OUT} FROM old_file "
            "ORDER BY number"
        )
        first += pq.read_metadata(path).num_rows


def draw_old(connection: DuckDBPyConnection, old_data: Input, share: float, seed: int, num_new: int) -> int:
    """Creates the table ``again`` (number) of the old rows to replay; returns their number.

    Their number makes them ``share`` of the training rows, limited by what there is; all if nothing is new.

    Args:
        old_data: its fingerprint seeds the choice, so that each generation replays other rows.
        num_new: number of new training rows.
    """
    trained = _number(connection, "SELECT count(*) FROM old WHERE NOT held_out")
    count = round(num_new * share / (1 - share)) if num_new else trained
    connection.execute(
        f"CREATE TABLE again AS SELECT number FROM old WHERE NOT held_out "
        f"ORDER BY sha256('{seed}:{old_data.fingerprint}:' || row_id), number LIMIT {count}"
    )
    return min(count, trained)


def old_rows(connection: DuckDBPyConnection, old_data: Input) -> Iterator[tuple[str, pa.RecordBatch]]:
    """The old rows with their current split: held out, replayed, or excluded (``RESTING``)."""
    first = 0
    for side, path in _files(old_data):
        for batch in row_batches(path, _ROWS_PER_READ):
            numbers = f"number >= {first} AND number < {first + len(batch)}"
            drawn = connection.sql(f"SELECT number - {first} AS n FROM again WHERE {numbers}").to_arrow_table()["n"]
            is_drawn = pc.is_in(pa.array(range(len(batch))), drawn.combine_chunks())
            yield (HELD_OUT, batch) if side == HELD_OUT else (TRAIN, batch.filter(is_drawn))
            if side != HELD_OUT:
                yield RESTING, batch.filter(pc.invert(is_drawn))
            first += len(batch)


def old_columns(old_data: Input) -> set[str]:
    """The columns of the old rows."""
    return {name for _, path in _files(old_data) for name in pq.read_schema(path).names}


def _files(old_data: Input | None) -> list[tuple[str, Path]]:
    found = [(side, old_data.path / side) for side in (TRAIN, HELD_OUT, RESTING)] if old_data else []
    return [(side, path) for side, path in found if path.exists()]
