import pytest

from flows.stages.process_settings import stage_environment


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
