import os

import pytest

from flows.stages.process_settings import in_stage_environment, stage_environment


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_cluster_of_our_own_lets_nobody_in_without_its_token():
    first, second = stage_environment(), stage_environment()
    assert first["RAY_AUTH_MODE"] == "token" and len(first["RAY_AUTH_TOKEN"]) == 64
    assert first == second  # one token for all processes of a run


def test_only_a_cluster_of_our_own_is_kept_on_loopback(monkeypatch):
    variable = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # as Ray names whether other machines may reach it
    assert stage_environment()[variable] == "0"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.2:6379")
    assert variable not in stage_environment()


def test_a_cluster_that_is_joined_is_given_the_token_that_the_user_has(monkeypatch, home):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.2:6379")
    assert "RAY_AUTH_MODE" not in stage_environment()
    (home / ".ray").mkdir()
    (home / ".ray/auth_token").write_text("token")
    assert stage_environment()["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN" not in stage_environment()
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(home / "none"))
    assert "RAY_AUTH_MODE" not in stage_environment()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "token")
    assert stage_environment()["RAY_AUTH_MODE"] == "token"


def test_it_stays_until_the_last_of_several_has_no_need_of_it(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    starting, in_foreground = in_stage_environment(), in_stage_environment()
    starting.__enter__()
    in_foreground.__enter__()
    starting.__exit__(None, None, None)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    in_foreground.__exit__(None, None, None)
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"  # the user's
