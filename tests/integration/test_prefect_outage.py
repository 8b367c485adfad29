"""Prefect's server dies under a run, goes away, or keeps silent: training goes on, and Prefect hears how it ended."""

import json
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from flows.open_flows import OpenFlow, left_open, tell_of_killed
from flows.prefect_server import CLIENT_SETTINGS
from lineage.owner import Owner
from tests.chaos.record import digests
from tests.command import TOY, Command, alive, family, wait_until, wait_until_gone
from tests.prefect_api import PrefectApi
from tests.toy_methods import ToyTraining
from tests.unbroken import unbroken
from tests.users_prefect import UsersPrefect

# Two stages at once, of which one ends while the server is away.
NUM_STEPS = 80
AWAY_SECONDS = 60.0
LONG = (f"stages.left.method.num_steps={NUM_STEPS}", "stages.left.method.step_seconds=0.1")
DONE = dict.fromkeys(["data", "model", "left", "right"], "COMPLETED")


@pytest.fixture
def users(tmp_path, prefect_database):
    shutil.copytree(prefect_database, tmp_path / "prefect")
    server = UsersPrefect(tmp_path / "prefect" / "prefect.db")
    server.start()
    yield server
    server.leave()


@pytest.fixture
def toy(tmp_path, users) -> Command:
    (tmp_path / "rows.txt").write_text("rows")
    return Command(tmp_path, *TOY, environment={"PREFECT_API_URL": users.url, "PREFECT_HOME": str(tmp_path / "home")})


def step(toy: Command, stage: str) -> int:
    files = list((toy.folder / "artifacts" / stage).glob("*/metrics.jsonl"))
    return len(files[0].read_text().splitlines()) if files else 0


def states(database: Path) -> tuple[list[str], dict[str, str]]:
    """Of all flow runs, in order, and of all task runs by name."""
    with closing(sqlite3.connect(database)) as connection:
        flows = connection.execute("SELECT state_type FROM flow_run ORDER BY created").fetchall()
        tasks = connection.execute("SELECT name, state_type FROM task_run ORDER BY created").fetchall()
    return [state for (state,) in flows], dict(tasks)


def is_unbroken(toy: Command) -> bool:
    """Whether left is what nothing interrupted makes."""
    return digests(toy.folder / "artifacts")["left"] == unbroken(ToyTraining(num_steps=NUM_STEPS))


def notes(toy: Command) -> list[Path]:
    return list((toy.folder / "artifacts/logs/prefect-open").glob("*.json"))


@pytest.mark.slow
def test_a_server_of_ours_that_is_killed_is_started_again_and_hears_the_end(tmp_path, prefect_database):
    (tmp_path / "rows.txt").write_text("rows")
    shutil.copytree(prefect_database, tmp_path / "prefect")
    database = tmp_path / "prefect" / "prefect.db"
    url = f"sqlite+aiosqlite:///{database}"
    toy = Command(tmp_path, *TOY, environment={"PREFECT_API_DATABASE_CONNECTION_URL": url})
    process = toy.start("run", *LONG)

    def servers() -> list[psutil.Process]:
        return [each for each in family(process) if alive([each]) and "flows.prefect_process" in each.cmdline()]

    wait_until(lambda: step(toy, "left") > 2, "left steps")
    [first] = servers()
    first.kill()
    wait_until(lambda: [each for each in servers() if each.pid != first.pid], "it is started again")
    started = family(process)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "does not answer" not in errors
    assert states(database) == (["COMPLETED"], DONE)
    assert is_unbroken(toy)
    assert not notes(toy)
    assert not alive(started)


@pytest.mark.slow
def test_a_server_that_is_away_for_a_minute_in_mid_stage_hears_of_every_end(toy, users, tmp_path):
    process = toy.start("run", *LONG, "stages.right.method.num_steps=40", "stages.right.method.step_seconds=0.1")
    wait_until(lambda: step(toy, "right") > 2, "right steps")
    users.leave()
    left = time.monotonic()
    wait_until(lambda: list((tmp_path / "artifacts/left").glob("*/manifest.json")), "left is finished")
    time.sleep(max(0.0, left + AWAY_SECONDS - time.monotonic()))
    assert process.poll() is None
    users.start()
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "does not answer" not in errors
    assert states(tmp_path / "prefect/prefect.db") == (["COMPLETED"], DONE)
    assert is_unbroken(toy)
    assert not notes(toy)


IMPATIENT = """
import sys
import flows.prefect_ends
from flows.__main__ import main
flows.prefect_ends._PATIENCE_SECONDS = 2.0
sys.exit(main())
"""


@pytest.mark.slow
def test_a_killed_run_is_a_crash_and_a_server_that_stays_away_costs_no_training(toy, users, tmp_path):
    database = tmp_path / "prefect/prefect.db"
    process = toy.start("run", *LONG)
    wait_until(lambda: step(toy, "left") > 2, "left steps")
    process.kill()
    process.communicate(timeout=60)
    wait_until(lambda: states(database)[1].get("left") == "RUNNING", "Prefect has heard that left began")
    assert toy("cancel", "latest").returncode == 0
    flows, tasks = states(database)
    assert flows == ["CRASHED"]
    assert tasks["left"] == "CRASHED"
    assert not notes(toy)

    called = process.args[process.args.index("run") :]
    impatient = subprocess.Popen(
        [sys.executable, "-c", IMPATIENT, *called], cwd=tmp_path, env={**toy.environment, **CLIENT_SETTINGS}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    wait_until(lambda: states(database)[1].get("left") == "RUNNING", "left has begun again")
    users.leave()
    out, errors = impatient.communicate(timeout=120)
    assert impatient.returncode == 0, errors
    assert errors.count("does not answer, and shows the flow run") == 1
    assert "Traceback" not in errors
    assert "left" in out
    assert states(database)[0] == ["CRASHED", "RUNNING"]

    users.start()
    assert "nothing to do" in toy("run", *LONG).stdout
    assert states(database) == (["CRASHED", "COMPLETED"], DONE)
    assert is_unbroken(toy)
    assert not notes(toy)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "away"), [(signal.SIGTERM, "leave"), pytest.param(signal.SIGINT, "hush", marks=pytest.mark.slow)]
)
def test_a_stop_is_130_within_its_grace_though_prefect_does_not_answer(toy, users, number, away):
    process = toy.start("run", "stages.left.method.num_steps=600", "stages.left.method.step_seconds=0.1")
    wait_until(lambda: step(toy, "left") > 2, "left steps")
    started = family(process)
    getattr(users, away)()
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "does not answer" in errors
    [note] = notes(toy)
    assert json.loads(note.read_text())["end"] == "CANCELLED"
    assert list(toy.folder.glob("artifacts/left/*/checkpoints/step-*"))
    wait_until_gone(started)


def test_a_run_that_was_asked_to_end_is_cancelled_in_prefect(tmp_path, prefect_url):
    (tmp_path / "rows.txt").write_text("rows")
    toy = Command(tmp_path, *TOY, environment={"PREFECT_API_URL": prefect_url})
    process = toy.start("run", "stages.left.method.num_steps=600", "stages.left.method.step_seconds=0.1")
    wait_until(lambda: step(toy, "left") > 2, "left steps")
    assert " is stopped; " in toy("cancel", "latest").stdout
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    (last,) = PrefectApi(prefect_url).post("/flow_runs/filter", {"sort": "START_TIME_DESC", "limit": 1})
    assert last["state_type"] == "CANCELLED"
    assert not notes(toy)


def test_a_prefect_that_is_not_there_keeps_the_note_for_the_next_command(tmp_path, monkeypatch, capsys):
    here, gone = "http://127.0.0.1:9/api", replace(Owner.here(), started=0.0)
    flow = OpenFlow(flow_run="00000000-0000-0000-0000-000000000001", driver=gone, api="http://elsewhere/api")
    monkeypatch.setenv("PREFECT_API_URL", here)
    flow.write(tmp_path)
    tell_of_killed(tmp_path)  # of another Prefect
    assert capsys.readouterr().err == ""
    replace(flow, api=here).write(tmp_path)
    tell_of_killed(tmp_path)
    assert f"Prefect at {here} does not answer, and shows the flow run {flow.flow_run}" in capsys.readouterr().err
    assert list(left_open(tmp_path))
