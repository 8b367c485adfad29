"""Which MLflow is used, whether it answers, and a client for it. Imports mlflow late, since that takes a second."""

import logging
import os
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from uuid import uuid4

from filelock import FileLock

from lineage.errors import ArtifactError, ConfigError
from lineage.filesystem.remote_files import why_unreachable
from lineage.secrets import redacted

if TYPE_CHECKING:
    from alembic.script import ScriptDirectory
    from mlflow import MlflowClient

DATABASE = "mlflow.db"

_SERVERS = ("http", "https")
_SCHEMES = (*_SERVERS, "sqlite", "postgresql", "mysql", "mssql", "databricks")
_SQLITE = "sqlite:///"
_REACH_SECONDS = 10.0
_LOCKED_SECONDS = 120.0
_MIGRATION_SECONDS = 180.0


def tracking_uri(configured: str | None) -> str:
    """The configured MLflow, or ``MLFLOW_TRACKING_URI``, or ``mlflow.db`` in the working directory.

    Raises:
        ConfigError: it is neither a database nor a server.
    """
    uri = configured or os.environ.get("MLFLOW_TRACKING_URI") or f"{_SQLITE}{Path.cwd() / DATABASE}"
    if urlsplit(uri).scheme.partition("+")[0] not in _SCHEMES:
        raise ConfigError(
            f"{_setting(configured)}={shown(uri)}: is no address of an MLflow database or server (its store in "
            "plain files links no models); accepted: sqlite:///FILE, http://HOST:PORT, postgresql://, mysql://; "
            "or leave it unset for mlflow.db in this folder"
        )
    file = sqlite_file(uri)
    return f"{_SQLITE}{file.absolute()}" if file else uri  # so that it is the same file from another folder


def require_reachable(uri: str, configured: str | None) -> None:
    """Raises ConfigError where ``uri`` is a server and nothing answers there."""
    error = why_unreachable(uri, _REACH_SECONDS) if is_server(uri) else None
    if error:
        raise ConfigError(
            f"{_setting(configured)}={shown(uri)}: no MLflow server answers there ({error}); start it, correct the "
            "address, unset it for mlflow.db in this folder, or turn the record off with tracking.mlflow=false"
        ) from error


def is_server(uri: str) -> bool:
    """Whether an address is reached over HTTP."""
    return urlsplit(uri).scheme in _SERVERS


def shown(uri: str) -> str:
    """An address without its user, password and options, for messages and files."""
    return uri if uri.startswith("sqlite:") else redacted(uri).partition("?")[0]


def sqlite_file(uri: str) -> Path | None:
    """The file of an SQLite database; None: it is another kind of store."""
    return Path(uri.removeprefix(_SQLITE)) if uri.startswith(_SQLITE) else None


def _setting(configured: str | None) -> str:
    return "tracking.uri" if configured else "MLFLOW_TRACKING_URI"


def schema_fault(uri: str) -> tuple[str, str] | None:
    """Why the installed MLflow must not open a database, and what to do; None: it may, or there is none yet.

    When MLflow opens a database that lacks tables it migrates it, even while others write; it refuses other schemas.

    Raises:
        SQLAlchemyError, ImportError: the database cannot be read.
    """
    from alembic.migration import MigrationContext
    from sqlalchemy import create_engine, inspect

    file, package, named = sqlite_file(uri), find_spec("mlflow"), f"the database {shown(uri)}"
    if package is None or package.origin is None or (file and not file.exists()):  # a check must not create it
        return None
    scripts = _migrations(Path(package.origin).parent / "store" / "db_migrations")
    engine = create_engine(uri, connect_args={"timeout": _LOCKED_SECONDS} if file else {})
    try:
        with engine.connect() as connection:
            found = MigrationContext.configure(connection).get_current_revision()
            tables = inspect(connection).get_table_names() if found is None else []
    finally:
        engine.dispose()
    head, installed = scripts.get_current_head(), version("mlflow")
    if found == head or (found is None and not tables):
        return None
    another = "set another tracking.uri"
    if found is None:
        return f"{named} has tables of another program ({', '.join(sorted(tables)[:3])})", another
    if all(each.revision != found for each in scripts.walk_revisions()):
        why = f"{named} has schema {found}, which MLflow {installed} does not know: a newer one wrote it"
        return f"{why}, or another program", f"install the MLflow that wrote it, or {another}"
    return (
        f"{named} has schema {found}, and MLflow {installed} needs {head}: it is not migrated unasked",
        f"stop every run and server that writes to it, back it up, then: mlflow db upgrade {shown(uri)}",
    )


@cache
def _migrations(folder: Path) -> "ScriptDirectory":
    """Those of MLflow: they are some seventy files, which are read once in a process."""
    from alembic.script import ScriptDirectory

    return ScriptDirectory(str(folder))


def connect(uri: str) -> "MlflowClient":
    """A client whose database exists, and that waits while other processes lock it.

    Raises:
        ArtifactError: the database has another schema than that of the installed MLflow.
    """
    if not is_server(uri) and (fault := schema_fault(uri)):
        raise ArtifactError("; ".join(fault))
    client_class = _patient_client()
    for name in ("mlflow", "alembic", "urllib3.connectionpool"):  # tracebacks of what is retried; every migration
        logging.getLogger(name).setLevel(logging.CRITICAL)
    file = sqlite_file(uri)
    if file is None:
        return client_class(uri)
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{file}.lock", timeout=_MIGRATION_SECONDS):  # two processes that migrate one file break it
        if not file.exists():
            for rest in file.parent.glob(f"{file.name}.*.draft*"):  # of a killed process
                rest.unlink()
            # Migrated aside: a file that a kill left half migrated could never be opened again.
            draft = file.with_name(f"{file.name}.{uuid4().hex[:8]}.draft")
            client_class(f"{_SQLITE}{draft}").search_registered_models(max_results=1)
            draft.replace(file)
        client = client_class(uri)
        client.search_registered_models(max_results=1)
    return client


@cache
def _patient_client() -> "type[MlflowClient]":
    """MLflow's client; each call is retried while the database is locked: SQLite's own wait ends after 20 s."""
    from mlflow import MlflowClient
    from tenacity import retry, retry_if_exception, stop_after_delay, wait_random_exponential

    patient = retry(
        retry=retry_if_exception(lambda error: "database is locked" in str(error)),
        wait=wait_random_exponential(multiplier=0.1, max=2), stop=stop_after_delay(_LOCKED_SECONDS), reraise=True,
    )  # fmt: skip
    calls = {name: call for name, call in vars(MlflowClient).items() if callable(call) and not name.startswith("_")}
    return type("PatientClient", (MlflowClient,), {name: patient(call) for name, call in calls.items()})
