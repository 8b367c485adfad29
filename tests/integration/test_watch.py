"""Schedules and triggers against a real Prefect server: what is registered, what starts runs, and in which order."""

import signal
import subprocess
import sys
from dataclasses import replace
from datetime import datetime
from itertools import pairwise

import pytest

from flows.progress.run_record import Links, OpenFlow, RunRecord, new_id
from lineage.artifact import Source
from lineage.filesystem.digest import DigestCache
from lineage.filesystem.owner import Owner
from lineage.filesystem.remote_files import open_remote
from lineage.source.sources import pin
from tests.command import CONF, TOY, Command, wait_until
from tests.prefect_api import password_in
from tests.triggered_runs import Server, serving

TRIGGER = "trigger={sources: [rows], events: [rows.ready], poll: 0.3, settle: 0.5}"


@pytest.fixture
def server(prefect_url):
    return Server(prefect_url)


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.txt"
    path.write_text("first")
    return path


@pytest.mark.slow
def test_data_and_events_start_runs_one_after_the_other(server, rows, tmp_path):
    """Data, twice more data during the run, an event: three runs, the last of which has nothing to do."""
    schedule = 'schedule={cron: "0 3 1 1 *", timezone: Europe/Berlin}'  # its runs are none that are waited for
    with serving(server, tmp_path, *TOY, TRIGGER, schedule, "stages.left.method.step_seconds=1"):
        wait_until(lambda: server.post("/deployments/filter", {}), "it is registered")
        rows.write_text("second")
        data = tmp_path / "artifacts" / "data"
        wait_until(lambda: list(data.glob("*/manifest.json")), "a run is under way and has read its data")
        for content in ("third", "fourth"):
            rows.write_text(content)
        wait_until(lambda: server.ended() == 2, "another has followed")
        server.send("rows.ready")
        wait_until(lambda: server.ended() == 3, "the event is followed")
        runs = server.runs()
    assert server.triggers() == [{"trigger:rows"}] * 2 + [set()]
    assert runs[2]["created_by"]["type"] == "AUTOMATION" and runs[2]["created_by"]["display_value"] == "trigger of toy"
    assert all(earlier["end_time"] <= later["start_time"] for earlier, later in pairwise(runs))
    states = server.get(f"/flow_run_states/?flow_run_id={runs[0]['id']}")
    assert states[0]["message"] == "started by a trigger: rows"
    assert runs[2]["state"]["message"].startswith("nothing to do")
    assert {path.read_text() for path in data.glob("*/output/rows.txt")} == {"second", "fourth"}
    local = {"flows": {"name": {"any_": ["toy"]}}, "deployments": {"name": {"any_": ["local"]}}}
    [deployment] = server.post("/deployments/filter", local)
    [registered] = deployment["schedules"]
    assert registered["active"]
    assert (registered["schedule"]["cron"], registered["schedule"]["timezone"]) == ("0 3 1 1 *", "Europe/Berlin")


@pytest.mark.slow
def test_a_run_that_was_stopped_on_its_way_is_followed_by_another(server, rows, tmp_path):
    left = tmp_path / "artifacts" / "left"
    with serving(server, tmp_path, *TOY, TRIGGER, "stages.left.method.step_seconds=100"):
        rows.write_text("second")
        wait_until(lambda: list(left.glob("*/lock")), "its data is made and it trains")
    [run] = server.runs()
    assert (run["state_type"], run["state"]["message"]) == ("CANCELLED", "Runner is shutting down.")
    with serving(server, tmp_path, *TOY, TRIGGER):
        wait_until(lambda: server.ended() == 1, "another has followed")
    assert server.triggers() == [{"trigger:rows"}] * 2
    assert len(list(left.glob("*/manifest.json"))) == 1


@pytest.mark.slow
def test_watch_only_starts_runs_of_what_others_serve(server, rows, tmp_path):
    """While a run waits for a worker none is added, the next takes what has changed; a dead one is not waited for."""
    flow = server.post("/flows/", {"name": "toy"})
    server.post("/deployments/", {"name": "workers", "flow_id": flow["id"]})
    dead = server.start("toy/workers")
    server.set_state(dead, "RUNNING")
    gone = replace(Owner.here(), started=0.0)  # our pid, of another time
    RunRecord(
        id=new_id(), pipeline="toy", cli_args=[], driver=gone, started=0.0, stages={}, links=Links(deployed=True),
        open_flow=OpenFlow(flow_run=dead, api=server.url),
    ).write(tmp_path / "artifacts")  # fmt: skip
    with serving(server, tmp_path, *TOY, TRIGGER, "--name", "workers", "--watch-only") as message:
        rows.write_text("second")
        wait_until(lambda: len(server.runs()) == 1, "a run is created")
        [run] = server.runs()
        rows.write_text("third")
        held = f"new: rows; waits for the run {run['name']}"
        wait_until(lambda: held in message.read_text(), "what changed meanwhile is held")
        assert len(server.runs()) == 1
        server.post(f"/flow_runs/{run['id']}/set_state", {"state": {"type": "COMPLETED"}, "force": True})
        wait_until(lambda: len(server.runs()) == 2, "the next is created")
    assert server.triggers() == [{"trigger:rows"}] * 2
    assert server.end(dead)["type"] == "CRASHED"


@pytest.mark.slow
def test_what_dvc_tracks_is_read_from_its_remote_as_it_is_committed(tmp_path, monkeypatch):
    """Nothing of it lies in the folder."""
    repository = tmp_path / "repository"
    repository.mkdir()
    monkeypatch.chdir(repository)
    dvc = [sys.executable, "-m", "dvc"]

    def call(*arguments: str) -> None:
        subprocess.run(arguments, check=True, capture_output=True)

    def fingerprint() -> str:
        return pin("rows", Source(path="dvc://rows.jsonl"), DigestCache(tmp_path / "digests.json")).fingerprint

    def commit(content: str) -> None:
        (repository / "rows.jsonl").write_text(content)
        call(*dvc, "add", "-q", "rows.jsonl")
        call(*dvc, "push", "-q")
        call("git", "add", "-A")
        call("git", "-c", "user.name=me", "-c", "user.email=me@example.com", "commit", "-qm", "data")
        call("rm", "-rf", "rows.jsonl", ".dvc/cache")

    call("git", "init", "-q")
    call(*dvc, "init", "-q")
    call(*dvc, "remote", "add", "-d", "there", str(tmp_path / "remote"))
    commit('{"text": "a"}\n')
    before = fingerprint()
    with open_remote("dvc://rows.jsonl") as file:
        assert file.read() == b'{"text": "a"}\n'
    (repository / "rows.jsonl").write_text("not committed")
    assert fingerprint() == before
    commit('{"text": "b"}\n')
    assert fingerprint() != before


@pytest.mark.slow
def test_a_schedule_makes_runs_by_itself(rows, tmp_path):
    """On the server that the command brings along; that of the other tests keeps to no schedule."""
    command = Command(tmp_path, environment={"PREFECT_HOME": str(tmp_path / "prefect")})
    command.run(*TOY)
    process = command.start(
        "serve", "--config-dir", str(CONF), *TOY, "tracking=none", "schedule={interval: 10}",
        stderr=tmp_path / "serve.log",
    )  # fmt: skip
    try:
        url = f"{process.stdout.readline().split()[1]}/api"
        server = Server(url, password_in(tmp_path / "prefect"))
        wait_until(server.scheduled, "one has come and gone")
        [run, *_] = server.scheduled()
        assert run["state"]["message"] == "nothing to do: all 4 stages are finished"
        begun, ended = (datetime.fromisoformat(run[each]) for each in ("start_time", "end_time"))
        assert (ended - begun).total_seconds() < 10
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
