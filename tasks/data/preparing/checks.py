"""Looks at the rows that were written: how long they are, which say nearly the same, and what leaks."""

from collections.abc import Sequence
from pathlib import Path

from duckdb import DuckDBPyConnection

from tasks.data.kinds import LABEL_NAMES
from tasks.data.preparing import leakage, lengths, near_duplicates
from tasks.data.preparing.leakage import NamedSet
from tasks.data.preparing.near_duplicates import BANDS
from tasks.data.preparing.report import DataReport, Lengths
from tasks.data.preparing.row_split import HELD_OUT, TRAIN
from tasks.recipe import Input


def check_rows(connection: DuckDBPyConnection, report: DataReport, tokenizer: Input | None, directory: Path) -> None:
    """Adds to the report what is found; nothing is dropped for it.

    Args:
        tokenizer: a model in whose tokens rows are measured; None: they are measured in bytes.
        directory: where the rows were written. The files of what is found get there too.
    """
    bands = ", ".join(BANDS)
    connection.execute(
        f"CREATE VIEW near_keys AS SELECT row AS ordinal, content, row_id, {bands} FROM keys JOIN placed USING (row)"
    )
    report.counts["near_duplicate_rows"], report.near_duplicates = near_duplicates.find(
        connection, "near_keys", directory
    )
    files = [directory / side for side in (TRAIN, HELD_OUT)]
    report.lengths = _lengths(files, tokenizer)
    train, held_out = (NamedSet(name=file.stem, file=file) for file in files)
    report.counts["leaked_rows"], report.leakage = leakage.find([train], [held_out], connection, directory)
    report.counts |= _labels(connection, train.file)


def _labels(connection: DuckDBPyConnection, train: Path) -> dict[str, int]:
    """Training rows with a desirable and with an undesirable answer; nothing of rows that have no label."""
    rows = connection.read_parquet(str(train))
    if "label" not in rows.columns:
        return {}
    found = dict(rows.aggregate("label, count(*)", "label").fetchall())
    return {f"{name}_rows": found.get(label, 0) for label, name in LABEL_NAMES.items()}


def _lengths(files: Sequence[Path], tokenizer: Input | None) -> Lengths | None:
    """Of the rows of all files; None: there are none."""
    if tokenizer is None:
        counted = lengths.byte_lengths(files)
    else:
        from tasks.train.models import load_tokenizer

        counted = lengths.token_lengths(files, load_tokenizer(tokenizer))
    return lengths.measure(counted, tokenizer=tokenizer.name if tokenizer else None) if len(counted) else None
