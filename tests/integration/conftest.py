"""Servers and databases that several files start from: each is made once per worker."""

import os
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from filelock import FileLock
from sqlalchemy import Engine, event

from flows.prefect.server import EmbeddedServer, send_events
from tests import training
from tests.command import TOY, Command, warm_up
from tests.worker_group import WorkerGroup, zero_group
from tests.written_store import WrittenStore

# Prefect's client leaves a function for the end of the process that fails in a process forked from it, whose exit code
# is then 1: a data loader's, for one. The processes of stages have no client of Prefect's.
os.register_at_fork(after_in_child=threading._threading_atexits.clear)  # type: ignore[attr-defined]


@event.listens_for(Engine, "connect")
def _flush_nothing(connection: object, _record: object) -> None:
    """MLflow's databases of tests need not survive a power failure, and each commit would wait for the disk."""
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA synchronous=OFF")


@pytest.fixture(scope="module", autouse=True)
def _no_client_of_prefect() -> None:
    """Ends the client that an earlier file left: its websocket draws from ``random``, which a resume is checked by."""
    send_events()


@pytest.fixture(scope="session")
def prefect_database(pytestconfig, tmp_path_factory, worker_id):
    """A Prefect database without a run: its migrations take many seconds, so later runs of the tests use it again."""
    base = tmp_path_factory.getbasetemp()
    kept = base if worker_id == "master" else base.parent
    if hasattr(pytestconfig, "cache"):
        kept = pytestconfig.cache.mkdir("databases")
    folder = kept / f"prefect-{version('prefect')}"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            draft = tmp_path_factory.mktemp("prefect")
            server = _prefect_server(draft / "prefect.db")
            next(server)
            server.close()
            shutil.move(draft, folder)
    return folder


@pytest.fixture(scope="session")
def prefect_url(tmp_path_factory, prefect_database):
    """One Prefect server, with a database of its own, for all tests of a worker that are not of the embedded server.

    Its password is in the environment, as a user has that of a server of the team.
    """
    warm_up()
    folder = tmp_path_factory.mktemp("prefect")
    shutil.copytree(prefect_database, folder, dirs_exist_ok=True)  # with what SQLite keeps beside it
    yield from _prefect_server(folder / "prefect.db")


@pytest.fixture
def toy(tmp_path, prefect_url) -> Command:
    """The toy pipeline in a folder of its own, on the file's Prefect server."""
    (tmp_path / "rows.txt").write_text("rows")
    return Command(tmp_path, *TOY, environment={"PREFECT_API_URL": prefect_url})


def _prefect_server(database: Path) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_API_DATABASE_CONNECTION_URL", f"sqlite+aiosqlite:///{database}")
        server = EmbeddedServer(database.with_name("server.log"))
        server.start()
        patch.undo()
        patch.setenv("PREFECT_API_AUTH_STRING", server.auth)
        try:
            server.wait_until_ready()
            yield server.url
        finally:
            send_events()
            server.stop()


@pytest.fixture(scope="session")
def migrated(tmp_path_factory):
    """An MLflow database without a run: its migrations take a second."""
    from lineage.mlflow.address import connect

    file = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    connect(f"sqlite:///{file}")
    return file


@pytest.fixture
def uri(tmp_path, migrated):
    shutil.copy(migrated, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


@pytest.fixture
def client(uri):
    """MLflow's own, on the database of this test."""
    from lineage.mlflow.address import connect

    return connect(uri)


@pytest.fixture
def store(tmp_path) -> WrittenStore:
    """A store without an artifact yet."""
    return WrittenStore(tmp_path / "artifacts")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For what trains in this process.

    Prefect's client of an earlier test ends too: its websocket draws from ``random`` for each ping.
    """
    send_events()
    with training.one_thread():
        yield


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy, a teacher and rows of every kind, some of them held out; no test changes it."""
    return training.write_inputs(tmp_path_factory.mktemp("inputs"), num_held_out=10)


@pytest.fixture(scope="session")
def two_workers() -> Iterator[WorkerGroup]:
    warm_up()
    group = WorkerGroup(2)
    yield group
    group.close()


@pytest.fixture(scope="module")
def four_workers() -> Iterator[WorkerGroup]:
    group = WorkerGroup(4)
    yield group
    group.close()


@pytest.fixture(scope="module")
def zero_workers() -> Iterator[WorkerGroup]:
    with zero_group(2) as group:
        yield group
