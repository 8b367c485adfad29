"""Servers and databases that several files start from: each is made once per file."""

import shutil

import pytest

from flows.prefect_server import EmbeddedServer


@pytest.fixture(scope="module")
def prefect_url(tmp_path_factory):
    """One Prefect server for all tests of a file that are not of the embedded server itself."""
    server = EmbeddedServer(tmp_path_factory.mktemp("prefect") / "server.log")
    server.start()
    server.wait_until_ready()
    yield server.url
    server.stop()


@pytest.fixture(scope="module")
def migrated(tmp_path_factory):
    """An MLflow database without a run: its migrations take a second."""
    from lineage.mlflow.client import connect

    file = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    connect(f"sqlite:///{file}")
    return file


@pytest.fixture
def uri(tmp_path, migrated):
    shutil.copy(migrated, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path / 'mlflow.db'}"
