"""Which rows of other sets a user's rows repeat."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lineage.artifact import Kind, Source
from lineage.errors import DataError
from tasks.data.batches import row_batches
from tasks.data.examine import Examined, examine, method_of, open_rows
from tasks.data.preparing.report import NUM_LISTED
from tasks.data.preparing.row_split import HELD_OUT, TRAIN

_SLOT = "against"  # in the report
_ROWS_PER_GROUP = 10_000  # of Parquet


def examine_all(source: Source, directory: Path) -> Examined:
    """Prepares all rows of a set that can be read: its bad ones are counted, and cannot be compared.

    Raises:
        DataError: there are none, or their format is not known.
    """
    rows = open_rows(source)
    found = examine(method_of(rows.kind or Kind.TEXT)(max_bad_rows=sys.maxsize), [rows], directory)
    if not found.report.counts["rows"]:
        raise DataError(f"not one of its rows can be used, such as {found.bad_rows[0]}")
    return found


def add_overlaps(found: Examined, against: Sequence[Examined], directory: Path) -> None:
    """Adds to the report how other sets were read, and which of their rows the examined ones repeat.

    Args:
        directory: for what is made on the way.
    """
    import duckdb

    from tasks.data.preparing.database import open_database
    from tasks.data.preparing.leakage import NamedSet, find
    from tasks.data.preparing.report import LEAKAGE

    sets = [
        NamedSet(name=each.name, file=_all_rows(each, directory / f"all-{number}.parquet"))
        for number, each in enumerate((found, *against))
    ]
    with open_database(directory, os.cpu_count() or 1) as connection:
        count, overlaps = find(sets[:1], sets[1:], connection, directory)
    own = (found.output / LEAKAGE).rename(directory / "own.parquet")
    duckdb.read_parquet([str(directory / LEAKAGE), str(own)]).write_parquet(str(found.output / LEAKAGE))
    report = found.report
    report.counts["leaked_rows"] += count
    report.leakage = [*overlaps, *report.leakage][:NUM_LISTED]
    for number, each in enumerate(against, start=1):
        (source,) = each.report.sources.values()
        report.sources[_SLOT if number == 1 else f"{_SLOT}_{number}"] = source


def _all_rows(found: Examined, file: Path) -> Path:
    """The rows of both sides in one Parquet file."""
    import pyarrow.parquet as pq

    sides = [found.output / side for side in (TRAIN, HELD_OUT)]
    with pq.ParquetWriter(file, pq.read_schema(sides[0])) as all_rows:
        for side in sides:
            for batch in row_batches(side, _ROWS_PER_GROUP):
                all_rows.write_batch(batch)
    return file
