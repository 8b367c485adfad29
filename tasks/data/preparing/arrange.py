"""Mixes the rows of several slots, and decides in which order all are written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from duckdb import DuckDBPyConnection

from lineage.artifact import Source
from tasks.data.preparing.database import lot
from tasks.data.preparing.decide import CONTENT
from tasks.data.preparing.mixture import mixed_counts
from tasks.data.preparing.options import Prepare
from tasks.data.preparing.staging import Staging


@dataclass(frozen=True, kw_only=True)
class Arranged:
    """What the mixture did.

    Args:
        left_out: slot -> training rows that it has no room for.
        repeated: how often it takes a row once more.
        as_read: whether rows are written in the order in which they were read.
    """

    left_out: Mapping[str, int]
    repeated: int
    as_read: bool


def arrange(connection: DuckDBPyConnection, staging: Staging, options: Prepare) -> Arranged:
    """Makes, of the table ``sided``, the table ``placed``: row, held_out, row_id, position.

    Raises:
        DataError: a slot has nothing to mix.
    """
    found = dict(connection.execute("SELECT slot, count(*) FROM sided WHERE NOT held_out GROUP BY slot").fetchall())
    have = {slot: found.get(source.number, 0) for slot, source in staging.sources.items()}
    want = mixed_counts(have, options)
    repeated = sum(max(0, want[slot] - have[slot]) for slot in have)
    sources = [staged.source for staged in staging.sources.values()]
    as_read = len(sources) == 1 and sources[0].shuffle_seed is None and not repeated
    _take(connection, have, want, options.seed)
    placed = "SELECT row, held_out, row_id, row AS position FROM taken" if as_read else _positions(sources)
    connection.execute(f"CREATE TABLE placed AS {placed} ORDER BY row")
    left_out = {slot: have[slot] - want[slot] for slot in have if want[slot] < have[slot]}
    return Arranged(left_out=left_out, repeated=repeated, as_read=as_read)


def _take(connection: DuckDBPyConnection, have: Mapping[str, int], want: Mapping[str, int], seed: int) -> None:
    """Makes ``taken``: all held-out rows, and as many training rows as wanted. Repeated, they are copies."""
    if want == have:
        connection.execute("CREATE VIEW taken AS SELECT *, 0 AS repetition FROM sided WHERE held_out IS NOT NULL")
        return
    connection.execute("CREATE TABLE mixture (slot INT, have BIGINT, want BIGINT)")
    connection.executemany(
        "INSERT INTO mixture VALUES (?, ?, ?)", [(slot, have[name], want[name]) for slot, name in enumerate(have)]
    )
    connection.execute(
        f"CREATE TABLE taken AS WITH drawn AS (SELECT *, row_number() OVER (PARTITION BY slot ORDER BY "
        f"{lot(seed, 'row_id')}, row) AS rank FROM sided JOIN mixture USING (slot) WHERE NOT held_out), "
        "repeated AS (SELECT *, unnest(range(want // have + (rank <= want % have)::INT)) AS repetition FROM drawn) "
        f"SELECT row, slot, place, held_out, repetition, CASE WHEN repetition = 0 THEN row_id "
        f"ELSE {CONTENT} || '-' || (copy + repetition * copies) END AS row_id FROM repeated "
        "UNION ALL SELECT row, slot, place, held_out, 0, row_id FROM sided WHERE held_out"
    )


def _positions(sources: Sequence[Source]) -> str:
    """SQL: each slot in its own order, and the slots in one another like cards, however many rows each has."""
    keys = " ".join(f"WHEN {slot} THEN {_key(source)}" for slot, source in enumerate(sources))
    return (
        "SELECT row, held_out, row_id, "
        "row_number() OVER (ORDER BY (rank - 0.5) / size, slot, held_out) - 1 AS position "
        "FROM (SELECT *, count(*) OVER (PARTITION BY slot, held_out) AS size, row_number() OVER "
        f"(PARTITION BY slot, held_out ORDER BY repetition, CASE slot {keys} END, row) AS rank FROM taken)"
    )


def _key(source: Source) -> str:
    """SQL of what a source's rows are ordered by: their places, moved by up to ``shuffle_buffer`` rows, or anywhere."""
    if source.shuffle_seed is None:
        return "place::DOUBLE"
    share = f"{lot(source.shuffle_seed, 'place')} / {2**64}::DOUBLE"
    return share if source.shuffle_buffer is None else f"place + {share} * {source.shuffle_buffer}"
