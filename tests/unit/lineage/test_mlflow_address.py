"""Which MLflow is meant."""

import socket
import urllib.request

import pytest

from lineage.errors import ConfigError
from lineage.mlflow.address import require_reachable, shown, sqlite_file, tracking_uri


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tmp_path


def test_a_database_in_the_working_directory_is_the_default(here):
    assert sqlite_file(tracking_uri(None)) == here / "mlflow.db"


def test_the_variable_wins_over_the_default_and_the_configuration_over_the_variable(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow.example:5000")
    assert tracking_uri(None) == "http://mlflow.example:5000"
    assert tracking_uri("sqlite:///other.db") == "sqlite:///other.db"


@pytest.mark.parametrize("uri", ["localhost:5000", "mlruns", "file:///tmp/mlruns", "htp://host"])
def test_what_is_neither_database_nor_server_is_refused(uri):
    with pytest.raises(ConfigError, match=r"tracking\.uri=.*is no address of an MLflow database or server"):
        tracking_uri(uri)


def test_a_server_that_nobody_runs_is_refused_at_once():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"MLFLOW_TRACKING_URI=.*no MLflow server answers there"):
            require_reachable(uri, None)


def test_a_database_is_not_asked(monkeypatch):
    asked = []
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, **_: asked.append(url))
    require_reachable("sqlite:///nowhere/mlflow.db", None)
    assert asked == []


def test_no_password_is_shown_or_written_down():
    assert shown("postgresql://me:secret@db:5432/mlflow?sslkey=secret") == "postgresql://db:5432/mlflow"
    assert shown("sqlite:////here/mlflow.db") == "sqlite:////here/mlflow.db"
    with pytest.raises(ConfigError) as refusal:
        require_reachable("http://me:secret@127.0.0.1:1", None)
    assert "secret" not in str(refusal.value)
