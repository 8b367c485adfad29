"""The data base of a data stage: it decides over narrow columns, in bounded memory, since DuckDB spills to the disk.

It draws by hashes that stay what they are from one version of DuckDB to the next, and every order is total.
"""

from pathlib import Path

import duckdb

_MEMORY = "256MB"  # twice that is held beside it, by Python, Arrow and the rows of a batch


def open_database(directory: Path, threads: int) -> duckdb.DuckDBPyConnection:
    """An empty one in a scratch directory."""
    config: dict[str, str | bool | int | float | list[str]] = {
        "memory_limit": _MEMORY, "temp_directory": str(directory / "spilled"), "threads": threads,
        "autoinstall_known_extensions": False,
    }  # fmt: skip
    connection = duckdb.connect(str(directory / "decide.duckdb"), config=config)
    connection.execute("SET enable_progress_bar = false")  # it would be drawn on stdout, where results are
    return connection


def number(connection: duckdb.DuckDBPyConnection, query: str) -> int:
    """The one number that a query gives."""
    [(found,)] = connection.execute(query).fetchall()
    return int(found)


def lot(seed: int, column: str) -> str:
    """SQL of a hash in [0, 2^64) by which rows are drawn."""
    return f"md5_number_lower('{seed}:' || {column})"
