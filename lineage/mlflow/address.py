"""Which MLflow is meant, and whether anything answers there; imports no mlflow."""

import os
from pathlib import Path
from urllib.parse import urlsplit

from lineage.errors import ConfigError
from lineage.remote_files import why_silent
from lineage.secrets import redacted

DATABASE = "mlflow.db"

_SERVERS = ("http", "https")
_SCHEMES = (*_SERVERS, "sqlite", "postgresql", "mysql", "mssql", "databricks")
_SQLITE = "sqlite:///"
_REACH_SECONDS = 10.0

# Read when mlflow is imported. Its own retries take minutes a call; the user's settings win.
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "4",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}


def set_environment() -> None:
    """What mlflow must find before it is imported."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def tracking_uri(stated: str | None) -> str:
    """The MLflow that is meant: stated, or ``MLFLOW_TRACKING_URI``, or ``mlflow.db`` where the command is called.

    Raises:
        ConfigError: it is neither a database nor a server.
    """
    uri = stated or os.environ.get("MLFLOW_TRACKING_URI") or f"{_SQLITE}{Path.cwd() / DATABASE}"
    if urlsplit(uri).scheme.partition("+")[0] not in _SCHEMES:
        raise ConfigError(
            f"{_setting(stated)}={shown(uri)}: is no address of an MLflow database or server (its store in "
            "plain files links no models); accepted: sqlite:///FILE, http://HOST:PORT, postgresql://, mysql://; "
            "or leave it unset for mlflow.db in this folder"
        )
    return uri


def require_reachable(uri: str, stated: str | None) -> None:
    """Sees to it that an MLflow server is there, where one is stated.

    Raises:
        ConfigError: nothing answers there.
    """
    error = why_silent(uri, _REACH_SECONDS) if is_server(uri) else None
    if error:
        raise ConfigError(
            f"{_setting(stated)}={shown(uri)}: no MLflow server answers there ({error}); start it, mend the address, "
            "unset it for mlflow.db in this folder, or turn the record off with tracking.mlflow=false"
        ) from error


def is_server(uri: str) -> bool:
    """Whether it is reached over HTTP."""
    return urlsplit(uri).scheme in _SERVERS


def shown(uri: str) -> str:
    """An address without its user, password and options: for messages, and for what is written down."""
    return uri if uri.startswith("sqlite:") else redacted(uri).partition("?")[0]


def sqlite_file(uri: str) -> Path | None:
    """The file of an SQLite database, or None: it is another kind of store."""
    return Path(uri.removeprefix(_SQLITE)) if uri.startswith(_SQLITE) else None


def _setting(stated: str | None) -> str:
    return "tracking.uri" if stated else "MLFLOW_TRACKING_URI"
