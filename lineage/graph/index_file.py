"""The file of the index: opened, brought up to date, and made again where it is damaged or of another version.

A rollback journal, not a write-ahead log: stores are shared over network file systems, where a log cannot work.
"""

import logging
import sqlite3
from contextlib import suppress
from pathlib import Path

from lineage.graph.index_build import SCHEMA, VERSION, refresh

logger = logging.getLogger(__name__)

INDEX = "index.sqlite"
_WAIT_SECONDS = 300.0  # for another process that builds it
# Of a file that is no index. All other errors are of its place: read-only, full, locked for too long.
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_OTHER_TABLES = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CONSTRAINT)


def open_database(store: Path) -> sqlite3.Connection:
    """The index as the store is now; in memory where it cannot be kept."""
    if not store.is_dir():
        return _opened(":memory:", store)
    try:
        return _opened(str(store / INDEX), store)
    except sqlite3.Error as error:
        if is_damage(error) or _code(error) in _OTHER_TABLES:
            return rebuilt(store)
        logger.info("store=%s index=memory reason=%s", store, error)
        return _opened(":memory:", store)


def rebuilt(store: Path) -> sqlite3.Connection:
    """A new index in place of a damaged one."""
    logger.info("store=%s index=damaged: is built again", store)
    try:
        for name in (INDEX, INDEX + "-journal"):
            (store / name).unlink(missing_ok=True)
        return _opened(str(store / INDEX), store)
    except (OSError, sqlite3.Error):
        return _opened(":memory:", store)


def is_damage(error: sqlite3.Error) -> bool:
    """Whether an error is of the file's content, so that a new file mends it."""
    return _code(error) in _DAMAGE


def _code(error: sqlite3.Error) -> int:
    return error.sqlite_errorcode & 0xFF  # the low byte: without the extended code


def _opened(path: str, store: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=_WAIT_SECONDS, isolation_level=None)
    try:
        database.execute("PRAGMA cache_size = -65536")
        database.execute("PRAGMA temp_store = MEMORY")
        if _version(database) != VERSION:
            _create(database)
        refresh(database, store)
    except BaseException:
        with suppress(sqlite3.Error):
            database.close()
        raise
    return database


def _create(database: sqlite3.Connection) -> None:
    """Makes the tables in an empty file; what holds others is refused by SQLite as damaged."""
    database.execute("BEGIN IMMEDIATE")
    if _version(database) != VERSION:  # or another process made them meanwhile
        for statement in SCHEMA.split(";"):
            database.execute(statement)
        database.execute(f"PRAGMA user_version = {VERSION}")
    database.execute("COMMIT")


def _version(database: sqlite3.Connection) -> int:
    return int(database.execute("PRAGMA user_version").fetchone()[0])
