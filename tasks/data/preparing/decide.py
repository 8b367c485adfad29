"""Decides of every staged row whether it is used, what it is called, and on which side it is."""

from dataclasses import dataclass

from duckdb import DuckDBPyConnection

from tasks.data.preparing.convert_rows import MAX_PLACES
from tasks.data.preparing.database import lot, number
from tasks.data.preparing.options import Prepare
from tasks.data.preparing.report import Remark
from tasks.data.preparing.staging import StagedSource, Staging

CONTENT = "printf('%016x', content)"  # SQL of a row's id, without the number of its copy

_OUTSIDE, _UNSAMPLED, _BETWEEN = "outside the slice", "not in the sample", "between the sides"
_SHARES = 2**64


@dataclass(kw_only=True)
class Decided:
    """What was decided of the rows that are not bad.

    Args:
        dropped: slot -> reason -> rows that go nowhere.
        known: rows that there were before.
        duplicates: rows that say what an earlier one says.
        lowest: the smallest share of a row, in [0, 1]: a ``held_out`` above it holds out one at least.
        parted: slot -> copies of a row that are not where their group is, but where the row is.
    """

    dropped: dict[str, dict[str, int]]
    known: int
    duplicates: int
    lowest: float
    parted: dict[str, Remark]


def decide(connection: DuckDBPyConnection, staging: Staging, options: Prepare) -> Decided:
    """Makes the table ``sided`` of the rows that are used and new.

    Args:
        connection: its table ``old`` (row_id, held_out) has the rows that there were before.
    """
    connection.read_parquet(str(staging.keys)).create_view("keys")
    connection.execute("CREATE TABLE selected (row BIGINT, slot INT, place BIGINT, content UBIGINT, share UBIGINT)")
    dropped = {slot: _select(connection, source) for slot, source in staging.sources.items()}
    _name(connection)
    parted = _split(connection, options)
    between = connection.execute("SELECT slot, count(*) FROM sided WHERE held_out IS NULL GROUP BY slot").fetchall()
    slots = list(staging.sources)
    for slot, count in between:
        dropped[slots[slot]][_BETWEEN] = count
    return Decided(
        dropped=dropped,
        known=number(connection, "SELECT count(*) FROM named SEMI JOIN old USING (row_id)"),
        duplicates=number(connection, "SELECT count(*) FROM sided WHERE copy > 0"),
        lowest=number(connection, f"SELECT coalesce(min(share), {_SHARES - 1}) FROM named") / _SHARES,
        parted={slots[slot]: Remark(count=count, places=places) for slot, count, places in parted},
    )


def _select(connection: DuckDBPyConnection, staged: StagedSource) -> dict[str, int]:
    """Takes the rows of a source's slice and sample; counts the others."""
    source = staged.source
    inside = f"FROM keys WHERE slot = {staged.number} AND place >= {staged.start} AND place < {staged.stop}"
    dropped = {_OUTSIDE: staged.rows_read - (staged.stop - staged.start)}
    sample = ""
    if source.sample_count is not None:
        dropped[_UNSAMPLED] = max(0, number(connection, f"SELECT count(*) {inside}") - source.sample_count)
        sample = f"ORDER BY {lot(source.shuffle_seed or 0, 'content')}, row LIMIT {source.sample_count}"
    connection.execute(f"INSERT INTO selected SELECT row, slot, place, content, share {inside} {sample}")
    return {reason: count for reason, count in dropped.items() if count}


def _name(connection: DuckDBPyConnection) -> None:
    """Makes ``named``: rows that say the same are numbered, and all have the share of the first, hence its side.

    ``own`` is the share that each would have by itself: another one where it is of another group.
    """
    connection.execute(
        f"CREATE TABLE named AS SELECT *, {CONTENT} || CASE WHEN copy > 0 THEN '-' || copy ELSE '' END AS row_id FROM ("
        "SELECT row, slot, place, content, share AS own, first(share) OVER same AS share, "
        "row_number() OVER same - 1 AS copy, count(*) OVER (PARTITION BY content) AS copies FROM selected "
        "WINDOW same AS (PARTITION BY content ORDER BY row))"
    )


def _split(connection: DuckDBPyConnection, options: Prepare) -> list[tuple[int, int, list[str]]]:
    """Makes ``sided``: ``held_out`` is null of rows between the sides. A copy of an old row goes where that one is.

    Returns:
        Slot, count and the first ids of the copies that are on the other side than their group.
    """
    highest, between = _border(connection, options)

    def side(share: str) -> str:
        return f"CASE WHEN {share} <= {highest} THEN true WHEN {share} > {between} THEN false END"

    connection.execute(
        f"CREATE TABLE sided AS SELECT new.*, coalesce(old.held_out, {side('share')}) AS held_out "
        f"FROM (SELECT * FROM named ANTI JOIN old USING (row_id)) new LEFT JOIN old ON old.row_id = {CONTENT}"
    )
    found: list[tuple[int, int, list[str]]] = connection.execute(
        f"SELECT slot, count(*), list(row_id ORDER BY row)[:{MAX_PLACES}] FROM sided "
        f"WHERE copy > 0 AND own <> share AND held_out <> {side('own')} GROUP BY slot"
    ).fetchall()
    return found


def _border(connection: DuckDBPyConnection, options: Prepare) -> tuple[int, int]:
    """The highest share that is held out, and the highest that is not trained on."""
    if isinstance(options.held_out, float):
        highest = options.highest_share()
        return highest, highest
    found = connection.execute(
        f"SELECT share FROM named ORDER BY share LIMIT 1 OFFSET {options.held_out - 1}"
    ).fetchall()
    highest = found[0][0] if found else _SHARES - 1
    return highest, min(2 * highest, _SHARES - 1)
