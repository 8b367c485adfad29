"""The record of the server in a database: keys, sessions, calls, and one audit row per request. SQLite, or any URL."""

import hashlib
import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import (
    Column,
    Float,
    ForeignKey,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    create_engine,
    event,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from lineage.errors import ConfigError
from lineage.secrets import redacted

if TYPE_CHECKING:
    from sqlalchemy import RowMapping
    from sqlalchemy.engine.interfaces import DBAPIConnection

QUEUED, DONE, FAILED = "queued", "done", "failed"
_CONNECTIONS = 48  # kept open: of the server's threads, 40 of which answer requests, each has one
KEY_PREFIX = "tml-"  # a client that we work with sends no others

_META = MetaData()
KEYS = Table(
    "keys", _META, Column("name", String(64), primary_key=True), Column("digest", String(64), unique=True),
    Column("max_sessions", Integer), Column("max_tokens", Integer), Column("created", Float, nullable=False),
)  # fmt: skip
SESSIONS = Table(
    "sessions", _META, Column("id", String(64), primary_key=True),
    Column("key", String(64), ForeignKey("keys.name"), nullable=False, index=True),
    Column("model", Text, nullable=False), Column("settings", Text, nullable=False), Column("path", Text),
    Column("start", Text),
    Column("state", String(16), nullable=False), Column("created", Float, nullable=False),
)  # fmt: skip
CALLS = Table(
    "calls", _META, Column("id", String(64), primary_key=True),
    Column("session", String(64), ForeignKey("sessions.id"), nullable=False, index=True),
    Column("seq", Integer), Column("number", Integer, nullable=False), Column("name", String(32), nullable=False),
    Column("changes", Integer, nullable=False), Column("digest", String(64), nullable=False),
    Column("state", String(16), nullable=False), Column("status", Integer),
    Column("tokens", Integer, nullable=False, default=0), Column("seconds", Float), Column("created", Float),
    UniqueConstraint("session", "seq"),
)  # fmt: skip
AUDIT = Table(
    "audit", _META, Column("id", Integer, primary_key=True, autoincrement=True), Column("time", Float, nullable=False),
    Column("key", String(64)), Column("client", String(16), nullable=False), Column("session", String(64)),
    Column("call", String(64), nullable=False), Column("request", String(64), index=True), Column("status", Integer),
    Column("tokens", Integer), Column("seconds", Float),
)  # fmt: skip
ROOT = Table("root", _META, Column("id", String(32), primary_key=True))  # of the folder whose calls these are


def digest_of(key: str) -> str:
    """SHA-256 of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


class Records:
    """The tables. Each method is one transaction.

    Raises:
        ConfigError: the database cannot be opened.
    """

    def __init__(self, root: Path, url: str | None = None) -> None:
        root.mkdir(parents=True, exist_ok=True)
        address = url or f"sqlite:///{(root / 'steps.db').absolute()}"
        try:
            self._engine = create_engine(address, pool_pre_ping=True, pool_size=_CONNECTIONS)
            if self._engine.dialect.name in _SETTINGS:
                event.listen(self._engine, "connect", partial(_set, _SETTINGS[self._engine.dialect.name]))
            # What only reads needs no transaction, which PostgreSQL would be asked to begin and to end.
            self._reading = self._engine.execution_options(isolation_level="AUTOCOMMIT")
            _META.create_all(self._engine)
        except (SQLAlchemyError, ImportError, ValueError) as error:
            raise ConfigError(
                f"--database {redacted(address)}: cannot be opened ({str(error).partition(chr(10))[0]}); "
                "sqlite:///FILE and postgresql+DRIVER://USER@HOST/NAME are accepted"
            ) from error

    def close(self) -> None:
        self._engine.dispose()

    def require_root(self, root: Path, url: str) -> None:
        """Requires that a folder has the files of the calls (ConfigError: another one has)."""
        file = root / "id"
        with self._engine.begin() as connection:
            known = connection.execute(select(ROOT.c.id)).scalar()
            if known is None:
                if not file.exists():
                    file.write_text(uuid.uuid4().hex)
                connection.execute(insert(ROOT).values(id=file.read_text()))
            elif not file.exists() or file.read_text() != known:
                raise ConfigError(
                    f"--database {redacted(url)}: has the calls of another folder than --root {root}; name that "
                    "folder, or another database"
                )

    # --- keys

    def add_key(self, name: str, max_sessions: int | None = None, max_tokens: int | None = None) -> str:
        """A new key, which is kept as its digest alone (ConfigError: the name is taken)."""
        key = f"{KEY_PREFIX}{secrets.token_urlsafe(24)}"
        values = {"name": name, "digest": digest_of(key), "max_sessions": max_sessions, "max_tokens": max_tokens}
        try:
            with self._engine.begin() as connection:
                connection.execute(insert(KEYS).values(**values, created=time.time()))
        except IntegrityError as error:
            raise ConfigError(f"key {name}: the name is taken; choose another") from error
        return key

    def key_of(self, key: str) -> "RowMapping | None":
        with self._reading.connect() as connection:
            return connection.execute(select(KEYS).where(KEYS.c.digest == digest_of(key))).mappings().first()

    def has_keys(self) -> bool:
        with self._reading.connect() as connection:
            return connection.execute(select(KEYS.c.name)).first() is not None

    def used(self, key: str) -> tuple[int, int]:
        """Open sessions and tokens so far of a key."""
        sessions = select(func.count()).where(SESSIONS.c.key == key, SESSIONS.c.state == "open")
        tokens = select(func.coalesce(func.sum(AUDIT.c.tokens), 0)).where(AUDIT.c.key == key)
        with self._reading.connect() as connection:
            return int(connection.execute(sessions).scalar_one()), int(connection.execute(tokens).scalar_one())

    # --- sessions and calls

    def set_session(self, session: str, **values: object) -> None:
        with self._engine.begin() as connection:
            connection.execute(update(SESSIONS).where(SESSIONS.c.id == session).values(**values))

    def session(self, session: str) -> "RowMapping | None":
        with self._reading.connect() as connection:
            return connection.execute(select(SESSIONS).where(SESSIONS.c.id == session)).mappings().first()

    def sessions(self, key: str | None = None) -> "Sequence[RowMapping]":
        query = select(SESSIONS).order_by(SESSIONS.c.created)
        with self._reading.connect() as connection:
            return connection.execute(query if key is None else query.where(SESSIONS.c.key == key)).mappings().all()

    def owner(self, session: str) -> "RowMapping":
        """The key of a session."""
        query = select(KEYS).join(SESSIONS, SESSIONS.c.key == KEYS.c.name).where(SESSIONS.c.id == session)
        with self._reading.connect() as connection:
            return connection.execute(query).mappings().one()

    def add_call(self, key: str, client: str, opens: Mapping[str, object] | None, **values: object) -> None:
        """A call, with its audit row.

        Args:
            opens: what a session is that begins with the call.
        """
        now = time.time()
        audit = {"session": values["session"], "call": values["name"], "request": values["id"], "status": 202}
        with self._engine.begin() as connection:
            if opens is not None:
                row = {"id": values["session"], "key": key, "state": "open", "created": now}
                connection.execute(insert(SESSIONS).values(**row, **opens))
            connection.execute(insert(CALLS).values(**values, state=QUEUED, created=now))
            connection.execute(insert(AUDIT).values(**audit, key=key, client=client, time=now))

    def call(self, request_id: str) -> "RowMapping | None":
        with self._reading.connect() as connection:
            return connection.execute(select(CALLS).where(CALLS.c.id == request_id)).mappings().first()

    def call_at(self, session: str, seq: int) -> "RowMapping | None":
        query = select(CALLS).where(CALLS.c.session == session, CALLS.c.seq == seq)
        with self._reading.connect() as connection:
            return connection.execute(query).mappings().first()

    def calls(self, session: str | None = None) -> "Sequence[RowMapping]":
        """In the order of arrival."""
        query = select(CALLS).order_by(CALLS.c.number)
        with self._reading.connect() as connection:
            return (
                connection.execute(query if session is None else query.where(CALLS.c.session == session))
                .mappings()
                .all()
            )

    def finish(self, request_id: str, state: str, status: int, tokens: int, seconds: float | None) -> None:
        """Records the end of a call, and its cost in its audit rows."""
        found = {"status": status, "tokens": tokens, "seconds": seconds}
        with self._engine.begin() as connection:
            connection.execute(update(CALLS).where(CALLS.c.id == request_id).values(state=state, **found))
            connection.execute(update(AUDIT).where(AUDIT.c.request == request_id).values(**found))

    def audit(self, **values: object) -> None:
        with self._engine.begin() as connection:
            connection.execute(insert(AUDIT).values(**values, time=time.time()))

    def audited(self) -> "Sequence[RowMapping]":
        with self._reading.connect() as connection:
            return connection.execute(select(AUDIT).order_by(AUDIT.c.id)).mappings().all()


# A call is not lost with the process; a power failure may lose the last ones.
_SETTINGS = {
    "sqlite": ("PRAGMA journal_mode=WAL", "PRAGMA synchronous=NORMAL", "PRAGMA busy_timeout=30000",
               "PRAGMA foreign_keys=ON"),
    "postgresql": ("SET synchronous_commit TO off",),
}  # fmt: skip


def _set(statements: Sequence[str], connection: "DBAPIConnection", _record: object) -> None:
    cursor = connection.cursor()
    for each in statements:
        cursor.execute(each)
    cursor.close()
    connection.commit()
