"""A Prefect server of our own: its process, its password."""

import os
import stat
import subprocess
from types import SimpleNamespace

import pytest

from flows.prefect.address import own_auth, prefix_of_command, write_profile
from flows.prefect.server import EmbeddedServer, embedded_server
from lineage.errors import PipelineError


def test_a_file_of_the_folder_is_no_module_of_the_server(tmp_path, monkeypatch):
    (tmp_path / "wave.py").write_text("planted = True")
    real, commands = subprocess.Popen, []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: commands.append(command))
    server = EmbeddedServer(tmp_path / "log")
    server.start()
    server.stop()
    monkeypatch.setattr(subprocess, "Popen", real)
    python = commands[0][: commands[0].index("-m")]
    found = subprocess.check_output([*python, "-c", "import wave; print(hasattr(wave, 'planted'))"], cwd=tmp_path)
    assert found == b"False\n"


def test_one_that_exits_while_it_starts_is_reported_with_its_log(tmp_path, monkeypatch):
    dead = SimpleNamespace(poll=lambda: 1, wait=lambda: None, kill=lambda: None)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: dead)
    server = EmbeddedServer(tmp_path / "log")
    server.start()
    with pytest.raises(PipelineError, match=f"did not start; its log is {tmp_path}/log"):
        server.wait_until_ready()
    server.stop()


@pytest.fixture
def started(monkeypatch):
    """Words and environment of each process that is started for a server."""
    found = []
    monkeypatch.setattr(
        subprocess, "Popen", lambda cli_args, env, **settings: found.append((cli_args, env)) or _Process()
    )
    return found


class _Process(SimpleNamespace):
    def kill(self):
        """Ends nothing."""

    def wait(self):
        """At once."""


def test_a_server_has_a_password_of_its_own_that_only_this_process_and_a_private_file_give(tmp_path, started):
    servers = [EmbeddedServer(tmp_path / "log"), EmbeddedServer(tmp_path / "log")]
    for server in servers:
        server.start()
    assert servers[0].auth != servers[1].auth and len(servers[0].auth) > 32
    (cli_args, environment), _ = started
    assert environment["PREFECT_SERVER_API_AUTH_STRING"] == servers[0].auth
    assert environment["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"] == servers[0].url.removesuffix("/api")
    assert not any(servers[0].auth in word for word in cli_args)  # `ps` shows them to all
    assert stat.S_IMODE(servers[0].profile.stat().st_mode) == 0o600
    assert own_auth(servers[0].url) == servers[0].auth
    for server in servers:
        server.stop()
        assert not server.profile.exists() and own_auth(server.url) is None


def test_the_password_of_the_users_own_choice_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", "ada:secret")
    assert EmbeddedServer(tmp_path / "log").auth == "ada:secret"


def test_our_own_clients_have_it_for_as_long_as_the_server_runs(tmp_path, started, monkeypatch):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "of:another")
    with embedded_server(tmp_path / "log") as server:
        assert os.environ["PREFECT_API_AUTH_STRING"] == server.auth
        command = f"PREFECT_PROFILES_PATH={server.profile} PREFECT_API_URL={server.url} "
        assert prefix_of_command(server.url) == command and server.auth not in command
    assert os.environ["PREFECT_API_AUTH_STRING"] == "of:another"


def test_another_command_finds_it_by_the_address_and_gives_it_to_no_other_server(monkeypatch):
    write_profile("http://127.0.0.1:4711/api", "posttrain:secret")
    monkeypatch.setattr("flows.prefect.server.require_usable", lambda url: None)
    for url, expected in [("http://127.0.0.1:4711/api", "posttrain:secret"), ("http://127.0.0.2:4711/api", "")]:
        monkeypatch.setenv("PREFECT_API_URL", url)
        monkeypatch.setenv("PREFECT_API_AUTH_STRING", "")
        with embedded_server(None) as server:
            assert server is None and os.environ["PREFECT_API_AUTH_STRING"] == expected


def test_the_users_own_profiles_stay_as_they_are():
    from flows.prefect.address import prefect_home

    prefect_home().mkdir(parents=True)
    profiles = prefect_home() / "profiles.toml"
    profiles.write_text("active = 'mine'")
    write_profile("http://127.0.0.1:4711/api", "posttrain:secret")
    assert profiles.read_text() == "active = 'mine'"
