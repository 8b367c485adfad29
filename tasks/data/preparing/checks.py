"""Looks at the rows that were written: how long they are, which say nearly the same, and what leaks."""

from pathlib import Path

import numpy as np
from duckdb import DuckDBPyConnection

from tasks.data.preparing import leakage, lengths, near_duplicates
from tasks.data.preparing.decide import CONTENT
from tasks.data.preparing.leakage import NamedSet
from tasks.data.preparing.near_duplicates import BANDS
from tasks.data.preparing.report import DataReport, Lengths
from tasks.data.preparing.row_split import HELD_OUT, TRAIN
from tasks.method import Input


def check_rows(connection: DuckDBPyConnection, report: DataReport, tokenizer: Input | None, directory: Path) -> None:
    """Adds to the report what is found; nothing is dropped for it.

    Args:
        tokenizer: a model in whose tokens rows are measured; None: they are measured in bytes.
        directory: where the rows were written. The files of what is found get there too.
    """
    connection.execute("CREATE VIEW used AS SELECT * FROM keys SEMI JOIN placed USING (row)")
    bands = ", ".join(BANDS)
    connection.execute(f"CREATE VIEW near_keys AS SELECT row AS ordinal, {CONTENT} AS content, {bands} FROM used")
    report.counts["near_duplicate_rows"], report.near_duplicates = near_duplicates.find(
        connection, "near_keys", directory
    )
    report.lengths = _lengths(connection, tokenizer, directory)
    train, held_out = (NamedSet(name=side.partition(".")[0], file=directory / side) for side in (TRAIN, HELD_OUT))
    report.counts["leaked_rows"], report.leakage = leakage.find([train], [held_out], connection, directory)


def _lengths(connection: DuckDBPyConnection, tokenizer: Input | None, directory: Path) -> Lengths:
    if tokenizer is None:
        found = connection.execute("SELECT bytes FROM used").fetchnumpy()["bytes"]
        return lengths.measure(np.asarray(found, dtype=np.int64))
    from transformers import AutoTokenizer

    counted = lengths.token_lengths(directory / TRAIN, AutoTokenizer.from_pretrained(tokenizer.path))
    return lengths.measure(counted, tokenizer=tokenizer.name)
