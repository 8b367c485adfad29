"""A Prefect server that we start, as other accounts of the machine and web pages meet it, and as its user does."""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.command import PATIENCE, family, wait_until
from tests.conftest import OWN
from tests.prefect_api import PrefectApi


@pytest.fixture
def stranger(prefect_url) -> PrefectApi:
    """Whoever knows the address alone."""
    api = PrefectApi(prefect_url)
    api._headers = {}
    return api


@pytest.fixture
def profile(prefect_url) -> Path:
    """Of the worker's server, which was started before any test had a home of its own."""
    port = prefect_url.removesuffix("/api").rpartition(":")[2]
    return OWN / "home/.prefect" / f"posttrain-{port}.toml"


def test_a_stranger_reads_and_starts_nothing(stranger):
    for path in ("/flows/filter", "/flow_runs/filter", "/deployments/filter", "/admin/settings"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            stranger.post(path, {}, method="GET" if "admin" in path else "POST")
        assert refused.value.code == 401


def test_a_web_page_gets_no_answer_by_another_name_or_from_another_origin(prefect_url):
    def asked(**headers: str) -> urllib.request.Request:
        return urllib.request.Request(f"{prefect_url}/health", headers=headers)

    with pytest.raises(urllib.error.HTTPError) as refused:  # a name that was made to lead to this machine
        urllib.request.urlopen(asked(Host="evil.example"))
    assert (refused.value.code, refused.value.read()) == (400, b"Invalid host header")
    own = prefect_url.removesuffix("/api")
    for origin, allowed in [("http://evil.example", None), ("http://127.0.0.1:9", None), (own, own)]:
        with urllib.request.urlopen(asked(Origin=origin)) as answer:
            assert answer.headers["Access-Control-Allow-Origin"] == allowed


def test_other_accounts_read_neither_the_database_nor_the_password_nor_the_lock(prefect_database, profile):
    kept = [prefect_database / "prefect.db", profile, profile.with_name("posttrain-start.lock")]
    assert [path for path in kept if path.stat().st_mode & 0o077] == []


def test_the_command_of_prefect_needs_no_password_typed_in_the_same_account(profile):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_API_")}
    prefect = [Path(sys.executable).with_name("prefect"), "api", "POST", "/flows/filter"]

    def called(**settings: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            prefect, env={**environment, **settings}, capture_output=True, text=True, check=False, timeout=60 * PATIENCE
        )

    answer = called(PREFECT_PROFILES_PATH=str(profile))
    assert answer.returncode == 0 and isinstance(json.loads(answer.stdout), list), answer.stderr


def test_a_run_that_lacks_the_password_of_the_users_server_is_refused_in_one_line(toy):
    toy.environment["PREFECT_API_AUTH_STRING"] = "ada:wrong"
    refused = toy("run")
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert f"PREFECT_API_URL={toy.environment['PREFECT_API_URL']} does not let you in (HTTP 401)" in refused.stderr
    assert "set PREFECT_API_AUTH_STRING" in refused.stderr and "ada:wrong" not in refused.stderr


@pytest.mark.slow
def test_serve_keeps_its_password_to_itself_and_its_own_commands_find_it(toy, tmp_path):
    del toy.environment["PREFECT_API_URL"], toy.environment["PREFECT_API_AUTH_STRING"]
    toy.environment["PREFECT_HOME"] = str(tmp_path / "home")
    message = tmp_path / "serve.log"
    serve = toy.start("serve", "--config-dir", str(Path(__file__).parents[1] / "conf"), "pipeline=toy", "model=none",
                      "tracking=none", "sources.rows.path=rows.txt", stderr=message)  # fmt: skip
    try:
        lines = []
        while not lines or not lines[-1].startswith("run one: "):
            lines.append(serve.stdout.readline())
            assert lines[-1], message.read_text()
        [profile] = (tmp_path / "home").glob("posttrain-*.toml")
        auth = profile.read_text().partition('AUTH_STRING = "')[2].partition('"')[0]
        assert len(auth) > 32 and str(profile) in lines[0]
        command = lines[-1].removeprefix("run one: ").partition(" -p ")[0]
        path = f"{Path(sys.executable).parent}:{toy.environment['PATH']}"
        started = subprocess.run(
            ["sh", "-c", f"{command} --watch"], env={**toy.environment, "PATH": path}, capture_output=True, text=True,
            check=False, timeout=120 * PATIENCE,
        )  # fmt: skip
        assert started.returncode == 0, started.stdout + started.stderr + message.read_text()
        assert "Completed" in started.stdout
        cli_args = [word for each in family(serve) for word in each.cmdline()]
        assert "flows.prefect.server" in cli_args and not any(auth in word for word in cli_args)
    finally:
        serve.terminate()
        out, _ = serve.communicate(timeout=60)
    wait_until(lambda: not profile.exists(), "it goes with the server")
    logs = [path.read_text() for path in (tmp_path / "artifacts/logs").rglob("*") if path.is_file()]
    assert not any(auth in text for text in [out, message.read_text(), *lines, *logs])
