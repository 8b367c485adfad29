"""Prefect's server dies under a run, goes away, or hangs: training finishes, and Prefect learns how it ended."""

import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from prefect.states import Failed

from flows.prefect.flow import as_task, in_flow
from flows.prefect.open_runs import settle_left
from flows.prefect.server import CLIENT_SETTINGS, read_settings_again, send_events
from flows.progress.recorder import RunRecorder
from flows.progress.run_record import RunRecord, StageRecord, latest
from lineage.errors import PipelineError
from lineage.filesystem.remote_files import why_unreachable
from tests.chaos.record import digests
from tests.command import REPOSITORY, TOY, Command, alive, family, wait_until, wait_until_gone
from tests.toy_interrupted import unbroken
from tests.toy_methods import ToyTraining


class UsersPrefect:
    """Away, it refuses connections; silent, it takes them and says nothing."""

    def __init__(self, database: Path) -> None:
        self._environment = {
            **os.environ, **CLIENT_SETTINGS, "PYTHONPATH": str(REPOSITORY), "PREFECT__SERVER_FINAL": "1",
            "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{database}",
        }  # fmt: skip
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/api"

    def start(self) -> None:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", self._port))
            self._port = listener.getsockname()[1]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "flows.prefect.server", str(listener.fileno())], env=self._environment,
                pass_fds=[listener.fileno()], stdin=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
        wait_until(lambda: not why_unreachable(self.url, 5), "the server answers")

    def leave(self) -> None:
        """SIGKILL."""
        if self._process:
            self._process.kill()
            self._process.wait()

    def hush(self) -> None:
        assert self._process
        self._process.send_signal(signal.SIGSTOP)


# Two stages at once, of which one ends while the server is away.
NUM_STEPS = 80
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


def notes(toy: Command) -> list[RunRecord]:
    """Runs of which Prefect has yet to know something."""
    return [record for record in latest(toy.folder / "artifacts") if record.open_flow]


@pytest.fixture
def run(tmp_path, monkeypatch, users) -> SimpleNamespace:
    """A run in this process, of no stages, on that server."""
    monkeypatch.setenv("PREFECT_API_URL", users.url)
    read_settings_again()
    store = tmp_path / "artifacts"
    yield SimpleNamespace(
        plan=SimpleNamespace(pipeline=SimpleNamespace(store=store)), recorder=RunRecorder(store, "toy", [])
    )
    send_events()
    monkeypatch.undo()
    read_settings_again()


def test_how_a_body_ends_is_how_its_flow_run_does(run, toy, tmp_path):
    def stopped():
        raise KeyboardInterrupt

    def failing():
        as_task("data", lambda: None)
        raise PipelineError("no memory")

    for body, error in ((stopped, KeyboardInterrupt), (failing, PipelineError)):
        with pytest.raises(error):
            in_flow(run.recorder, run.plan.pipeline.store, body, None, name="toy")
    in_flow(run.recorder, run.plan.pipeline.store, lambda: Failed(message="a gate refused"), None, name="toy")
    in_flow(run.recorder, run.plan.pipeline.store, lambda: None, None, name="toy")
    assert states(tmp_path / "prefect/prefect.db")[0] == ["CANCELLED", "FAILED", "FAILED", "COMPLETED"]
    assert not notes(toy)


def test_a_server_that_goes_away_costs_one_line_and_learns_the_end_from_the_next_command(
    run, toy, users, tmp_path, capsys
):
    def body():
        as_task("left", users.leave)
        as_task("right", lambda: None)

    stages = {name: StageRecord(state="done", since=0.0, directory="") for name in ("left", "right")}
    run.recorder.record = replace(run.recorder.record, stages=stages)
    in_flow(run.recorder, run.plan.pipeline.store, body, None, name="toy")
    assert capsys.readouterr().err.count("does not answer, and shows the flow run") == 1
    [note] = notes(toy)
    assert note.open_flow.end == "COMPLETED"
    replace(note, driver=replace(note.driver, started=0.0)).write(tmp_path / "artifacts")  # as of another process
    users.start()
    assert len(settle_left(tmp_path / "artifacts")) == 1
    assert states(tmp_path / "prefect/prefect.db")[0] == ["COMPLETED"]
    assert not notes(toy)


@pytest.mark.slow
def test_a_run_whose_own_server_is_killed_finishes_and_the_next_command_reports_it(tmp_path, prefect_database):
    """Killed before two of the stages begin; one line says so."""
    (tmp_path / "rows.txt").write_text("rows")
    shutil.copytree(prefect_database, tmp_path / "prefect")
    database = tmp_path / "prefect" / "prefect.db"
    url = f"sqlite+aiosqlite:///{database}"
    toy = Command(tmp_path, *TOY, environment={"PREFECT_API_DATABASE_CONNECTION_URL": url})
    process = toy.start("run", *LONG, "stages.data.method.seconds=5")
    wait_until(lambda: states(database)[1].get("data") == "RUNNING", "its first stage runs")
    [server] = [each for each in family(process) if "flows.prefect.server" in each.cmdline()]
    server.kill()
    started = family(process)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert errors.count("does not answer, and shows the flow run") == 1 and "Traceback" not in errors
    assert is_unbroken(toy)
    assert states(database)[0] == ["RUNNING"]
    assert not alive(started)
    assert toy.process("run", *LONG, "stages.right.method.num_steps=2").returncode == 0
    assert states(database)[0] == ["COMPLETED", "COMPLETED"]
    assert not notes(toy)


@pytest.mark.slow
def test_a_server_that_is_away_in_mid_stage_learns_of_every_end(toy, users, tmp_path):
    process = toy.start("run", *LONG, "stages.right.method.num_steps=300", "stages.right.method.step_seconds=0.1")
    wait_until(lambda: step(toy, "left") > 2, "left steps")
    users.leave()
    wait_until(lambda: list((tmp_path / "artifacts/left").glob("*/manifest.json")), "left is finished")
    users.start()
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "does not answer" not in errors
    assert states(tmp_path / "prefect/prefect.db") == (["COMPLETED"], DONE)
    assert is_unbroken(toy)
    assert not notes(toy)


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

    process = toy.start("run", *LONG)
    wait_until(lambda: states(database)[1].get("left") == "RUNNING", "left has begun again")
    users.leave()
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
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
    assert note.open_flow.end == "CANCELLED"
    assert list(toy.folder.glob("artifacts/left/*/checkpoints/step-*"))
    wait_until_gone(started)
