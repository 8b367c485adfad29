"""A person's approval: the flow run pauses, and goes on, ends or is stopped as Prefect's API is told."""

import json
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flows.declare.config import load_pipeline
from flows.planning.plan import make_plan
from flows.planning.verdicts import may_ask
from lineage.promotions import read_events
from tests.command import CONF, Command, family, wait_until, wait_until_gone
from tests.prefect_api import PrefectApi

BASE = ("pipeline=toy-gated", "model=none", "sources.rows.path=rows.txt")
REQUIRED = "gate.approval=required"


@pytest.fixture(scope="module")
def trained(tmp_path_factory, prefect_url) -> Path:
    """A folder in which all is finished but the gate that asks."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "rows.txt").write_text("rows")
    result = Command(folder, *BASE, environment={"PREFECT_API_URL": prefect_url})("run")
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture
def toy(trained, tmp_path, prefect_url) -> Command:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return Command(tmp_path, *BASE, environment={"PREFECT_API_URL": prefect_url})


class Asking:
    """A run that asks: what it prints, and its flow run by Prefect's API."""

    def __init__(self, toy: Command) -> None:
        self._errors = toy.folder / "stderr"
        self.process = toy.start("run", REQUIRED, stderr=self._errors)
        wait_until(lambda: self._command() or self.process.poll() is not None, "it asks")
        assert self.process.poll() is None, self._errors.read_text()
        profiles, self.api, self.path = self._command().groups()
        auth = tomllib.loads(Path(profiles).read_text())["profiles"]["posttrain"] if profiles else {}
        self._server = PrefectApi(self.api, auth.get("PREFECT_API_AUTH_STRING"))
        assert self.state() == "PAUSED"

    def _command(self) -> re.Match[str] | None:
        profiles = r"(?:PREFECT_PROFILES_PATH=(\S+) )?"  # of a server of the run's own
        command = r"PREFECT_API_URL=(\S+) prefect api POST (/flow_runs/[0-9a-f-]+)/resume"
        return re.search(profiles + command, self.errors())

    def errors(self) -> str:
        return self._errors.read_text() if self._errors.exists() else ""

    def state(self) -> str:
        return self._server.get(self.path)["state"]["type"]

    def post(self, verb: str, body: dict) -> dict:
        return self._server.post(f"{self.path}/{verb}", body)

    def end(self) -> int:
        return self.process.wait(timeout=60)


@pytest.fixture
def ask(toy) -> Iterator[Callable[[], Asking]]:
    """Starts runs that ask; none outlives its test."""
    started: list[Asking] = []

    def start() -> Asking:
        started.append(Asking(toy))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.communicate(timeout=120)


def stop_while_it_waits(toy: Command, asking: Asking, number: signal.Signals) -> None:
    asking.process.send_signal(number)
    assert asking.end() == 130
    assert decisions(toy) == []
    assert "Traceback" not in asking.errors()


def decisions(toy: Command) -> list[tuple[str, str, str]]:
    return [(event.action, event.who, event.why) for event in read_events(toy.folder / "artifacts")]


def test_a_stop_while_it_waits_decides_nothing_and_resuming_the_flow_run_approves_for_good(toy, ask):
    stop_while_it_waits(toy, ask(), signal.SIGINT)
    asking = ask()
    assert "pass if a person approves it: left@" in asking.errors()
    assert f"/runs/flow-run/{asking.path.rpartition('/')[2]}" in asking.errors()
    accepted = asking.post("resume", {"run_input": {"who": "ada", "why": "looks good"}})
    assert accepted["status"] == "ACCEPT"
    assert asking.end() == 0
    assert asking.state() == "COMPLETED"
    assert decisions(toy) == [("approve", "ada", "looks good")]
    again = toy("run", REQUIRED)
    assert again.returncode == 0 and "nothing to do" in again.stdout


@pytest.mark.slow
def test_an_approval_without_a_name_says_where_it_came_from(toy, ask):
    asking = ask()
    asking.post("resume", {})
    assert asking.end() == 0
    [(action, who, why)] = decisions(toy)
    assert (action, why) == ("approve", f"resumed at {asking.api}")
    assert asking.path.rpartition("/")[2] in who


@pytest.mark.slow
def test_cancelling_the_flow_run_rejects_and_a_reused_gate_asks_again(toy, ask):
    asking = ask()
    prefect = [str(Path(sys.executable).parent / "prefect"), "flow-run", "cancel", asking.path.rpartition("/")[2]]
    subprocess.run(prefect, env={**toy.environment, "PREFECT_API_URL": asking.api}, check=True, capture_output=True)
    assert asking.end() == 3
    assert asking.state() == "CANCELLED"
    assert "left passes, and was rejected by Prefect, flow run" in asking.errors()
    assert [action for action, *_ in decisions(toy)] == ["reject"]
    second = ask()
    assert "0 of 6 stages to run" in second.errors() or "nothing to do" in second.errors()
    second.post("resume", {"run_input": {"who": "ada"}})
    assert second.end() == 0
    assert [action for action, *_ in decisions(toy)] == ["reject", "approve"]


@pytest.mark.slow
def test_so_does_a_stop_by_sigterm(toy, ask):
    stop_while_it_waits(toy, ask(), signal.SIGTERM)


def test_a_refused_model_is_not_asked_about_and_its_flow_run_is_none_that_completed(toy, prefect_url):
    result = toy("run", REQUIRED, "stages.evaluate.method.wins.left=10")
    assert result.returncode == 3
    assert "flow-run cancel" not in result.stderr
    assert decisions(toy) == []
    (last,) = PrefectApi(prefect_url).post("/flow_runs/filter", {"sort": "START_TIME_DESC", "limit": 1})
    assert (last["state"]["type"], last["state"]["name"]) == ("FAILED", "Refused")


@pytest.mark.slow
def test_the_embedded_server_shows_its_pages_while_it_asks_and_ends_with_the_run(toy, ask):
    del toy.environment["PREFECT_API_URL"]
    asking = ask()
    root = asking.api.removesuffix("/api")
    with urllib.request.urlopen(f"{root}/ui-settings") as response:
        assert json.load(response)["api_url"] == asking.api
    page = f"{root}/runs/flow-run/{asking.path.rpartition('/')[2]}"
    assert page in asking.errors()
    with urllib.request.urlopen(urllib.request.Request(page, headers={"Accept": "text/html"})) as response:
        assert b"<!DOCTYPE html>" in response.read()
    started = family(asking.process)
    asking.process.send_signal(signal.SIGINT)
    assert asking.end() == 130
    wait_until_gone(started)
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(root)


def test_a_run_that_cannot_ask_serves_no_pages(trained):
    def asks(*overrides: str) -> bool:
        base = [*BASE[:2], f"sources.rows.path={trained}/rows.txt", f"store={trained}/artifacts", *overrides]
        return may_ask(make_plan(load_pipeline(base, CONF)))

    assert not asks()
    assert asks(REQUIRED)
    assert not asks(REQUIRED, "stages.gate.method.approval=none")
