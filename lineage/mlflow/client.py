"""MLflow's client, quiet, and patient with a locked database. Takes a second to import."""

import logging
import sqlite3
from pathlib import Path
from uuid import uuid4

from filelock import FileLock
from sqlalchemy import event
from sqlalchemy.engine import Engine
from sqlalchemy.exc import SQLAlchemyError
from tenacity import retry, retry_if_exception, stop_after_delay, wait_random_exponential

from lineage.mlflow.address import set_environment, sqlite_file

set_environment()

# Whoever needs these takes them from here: mlflow reads the environment while it is imported.
from mlflow import MlflowClient  # noqa: E402
from mlflow.entities import (  # noqa: E402
    Dataset,
    DatasetInput,
    InputTag,
    LoggedModel,
    LoggedModelInput,
    LoggedModelOutput,
    Metric,
    Param,
    Run,
    RunTag,
)
from mlflow.exceptions import MlflowException  # noqa: E402

__all__ = [
    "FAILURES",
    "Dataset",
    "DatasetInput",
    "InputTag",
    "LoggedModel",
    "LoggedModelInput",
    "LoggedModelOutput",
    "Metric",
    "MlflowException",
    "Param",
    "PatientClient",
    "Run",
    "RunTag",
    "connect",
]  # fmt: skip

FAILURES = (MlflowException, SQLAlchemyError)  # of the server or database: refused, damaged, gone
MIGRATION_SECONDS = 180.0
_LOCKED_SECONDS = 120.0
# It logs tracebacks of what is retried here, and every migration of a fresh database.
_NOISY = ("mlflow", "alembic", "urllib3.connectionpool")
_CALLS = (
    "create_experiment", "get_experiment_by_name", "restore_experiment", "search_experiments", "set_experiment_tag",
    "create_run", "get_run", "search_runs", "update_run", "set_terminated", "set_tag", "delete_tag", "log_batch",
    "log_inputs", "log_outputs", "log_artifact", "get_metric_history", "create_logged_model", "finalize_logged_model",
    "search_logged_models", "set_logged_model_tags", "create_registered_model", "search_registered_models",
    "create_model_version", "search_model_versions", "set_registered_model_alias", "delete_registered_model_alias",
    "delete_model_version", "delete_registered_model", "get_model_version_by_alias",
)  # fmt: skip


def _is_locked(error: BaseException) -> bool:
    """Other processes write to the same SQLite file; MLflow waits 20 s for them, then gives up."""
    return "database is locked" in str(error)


patient = retry(
    retry=retry_if_exception(_is_locked),
    wait=wait_random_exponential(multiplier=0.1, max=2),
    stop=stop_after_delay(_LOCKED_SECONDS),
    reraise=True,
)


class PatientClient(MlflowClient):
    """Waits where another process holds the lock of the database."""


for _call in _CALLS:
    setattr(PatientClient, _call, patient(getattr(MlflowClient, _call)))


def write_without_waiting() -> None:
    """Lets SQLite leave the moment of writing to the system: for a database that is made now and can be made again."""
    event.listen(Engine, "connect", _without_sync)


def _without_sync(connection: object, _: object) -> None:
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA synchronous=OFF")


@patient
def connect(uri: str) -> PatientClient:
    """A client whose database is there and migrated."""
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    file = sqlite_file(uri)
    if file is None:
        return PatientClient(uri)
    # Two processes that migrate one fresh file break it: one makes the first contact at a time.
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{file}.lock", timeout=MIGRATION_SECONDS):
        if not file.exists():
            _make(file)
        client = PatientClient(uri)
        client.search_registered_models(max_results=1)
    return client


def _make(file: Path) -> None:
    """Migrates a fresh database aside: one that a kill left halfway could never be opened again."""
    for rest in file.parent.glob(f"{file.name}.*.draft*"):  # of one that was killed here, its journal too
        rest.unlink()
    draft = file.with_name(f"{file.name}.{uuid4().hex[:8]}.draft")  # MLflow keeps what it opened, by name
    PatientClient(f"sqlite:///{draft}").search_registered_models(max_results=1)
    draft.replace(file)
