import os
import re
import subprocess
import sys
from dataclasses import replace
from uuid import uuid4

import psutil
import pytest

from flows.__main__ import main
from flows.operate import cancel as module
from flows.operate.cancel import cancel, find_run
from flows.progress.run_record import Links, RunRecord, run_record_path
from lineage.errors import ConfigError, PipelineError
from lineage.filesystem.owner import Owner
from tests.command import sleeper_of

# Of this process alone: a run is found by its id in the environment of every process of the machine.
RUN = f"20260101-000000-{uuid4().hex[:8]}"


def note(run_id=RUN, **fields):
    driver = fields.pop("driver", Owner.here())
    return RunRecord(id=run_id, pipeline="toy", cli_args=[], driver=driver, started=0.0, stages={}, **fields)


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    started = psutil.Process(process.pid).create_time()
    yield replace(Owner.here(), pid=process.pid, started=started)
    process.kill()
    process.wait(120)


@pytest.fixture
def left_behind():
    """Of the run that ``note`` makes, and in a group and session of its own."""
    process = sleeper_of(RUN)
    yield process
    process.kill()
    process.wait(120)


@pytest.fixture
def runs(tmp_path):
    for day, outcome in (("01", "done"), ("02", None), ("03", "failed")):
        note(f"202601{day}-000000-aa{day}", outcome=outcome).write(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("word", "day"), [("20260101-000000-aa01", "01"), ("20260103", "03"), ("aa01", "01"), ("latest", "02")]
)
def test_a_run_is_named_by_enough_of_its_id(runs, word, day):
    assert find_run(word, runs).id == f"202601{day}-000000-aa{day}"


def test_latest_is_what_runs_rather_than_what_waits_and_else_the_last_run(runs):
    note("20260104-000000-aa04", waits_for="another run of toy").write(runs)
    assert find_run("latest", runs).id == "20260102-000000-aa02"
    note("20260102-000000-aa02", outcome="done").write(runs)
    assert find_run("latest", runs).id == "20260104-000000-aa04"
    note("20260104-000000-aa04", outcome="done").write(runs)
    note("20260105-000000-aa05", outcome="failed").write(runs)
    assert find_run("latest", runs).id == "20260105-000000-aa05"


def test_a_run_that_is_none_is_refused(runs, tmp_path):
    with pytest.raises(ConfigError, match=r"202601: names 3 runs: 20260103-000000-aa03, .*see posttrain status"):
        find_run("202601", runs)
    with pytest.raises(ConfigError, match=r"nope: no such run in .*; the last are: 20260103-000000-aa03"):
        find_run("nope", runs)
    with pytest.raises(ConfigError, match=r"latest: no such run in .*no run is recorded"):
        find_run("latest", tmp_path / "empty")


def test_what_is_over_is_let_be(tmp_path):
    ended, dead = note(outcome="failed"), note(driver=replace(Owner.here(), started=0.0))
    for each in (ended, dead):
        each.write(tmp_path)
        assert psutil.pid_exists(each.driver.pid)
    assert cancel(ended, tmp_path) == f"{ended.id} has ended: failed"
    assert cancel(dead, tmp_path).startswith(f"{dead.id} died before: its process ")


def test_what_a_killed_run_left_is_ended_and_what_another_run_has_started_is_let_be(tmp_path, left_behind):
    other = note("20260101-000000-bbbb", driver=replace(Owner.here(), started=0.0))
    other.write(tmp_path)
    assert cancel(other, tmp_path).endswith("is gone; nothing is left")
    assert left_behind.poll() is None
    dead = note(driver=replace(Owner.here(), started=0.0))
    dead.write(tmp_path)
    message = cancel(dead, tmp_path)
    assert message.startswith(f"{dead.id} died before: ")
    assert message.endswith(f"what it left is ended (processes {left_behind.pid})")
    assert not psutil.pid_exists(left_behind.pid)
    assert cancel(dead, tmp_path).endswith("is gone; nothing is left")


def test_a_run_on_another_host_and_what_it_left_are_ended_there(tmp_path, left_behind):
    dead = note(driver=replace(Owner.here(), host="elsewhere"))
    dead.write(tmp_path)
    with pytest.raises(PipelineError, match=rf"runs on elsewhere .*run posttrain cancel {dead.id} on that machine"):
        cancel(dead, tmp_path)
    os.utime(run_record_path(tmp_path, dead.id), (0, 0))
    assert cancel(dead, tmp_path).endswith(f"run posttrain cancel {dead.id} there to end what it may have left")
    assert left_behind.poll() is None


def test_a_run_has_not_ended_while_something_that_it_started_lives(tmp_path, sleeper, left_behind, monkeypatch):
    kill = os.kill

    def kill_and_wait(pid, number):  # the time is for what outlives the run, not for the run
        kill(pid, number)
        os.waitpid(pid, 0)

    monkeypatch.setattr(module, "_WAIT_SECONDS", 0.3)
    monkeypatch.setattr(module.os, "kill", kill_and_wait)
    running = note(driver=sleeper)
    running.write(tmp_path)
    with pytest.raises(PipelineError, match=rf"has not ended within 0 s \(processes {left_behind.pid}\)"):
        cancel(running, tmp_path)


@pytest.mark.parametrize("overrides", [["20260101", "store={}"], ["store={}", "20260101"]])
def test_a_run_is_named_before_or_after_its_store(runs, overrides, capsys):
    assert main(["cancel", *(word.format(runs) for word in overrides)]) == 0
    assert capsys.readouterr().out == "20260101-000000-aa01 has ended: done\n"


def test_a_run_of_this_host_is_ended(tmp_path, sleeper):
    running = note(driver=sleeper)
    running.write(tmp_path)
    assert cancel(running, tmp_path).startswith(f"{running.id} is stopped; ")
    assert sleeper.is_dead(0.0)


def test_what_does_not_end_in_time_is_reported(tmp_path, sleeper, monkeypatch):
    monkeypatch.setattr(module, "_WAIT_SECONDS", 0.3)
    monkeypatch.setattr(module.os, "kill", lambda *_: None)
    running = note(driver=sleeper)
    running.write(tmp_path)
    with pytest.raises(
        PipelineError, match=rf"not ended within 0 s \(processes {sleeper.pid}\); .* kill -9 {sleeper.pid}"
    ):
        cancel(running, tmp_path)


@pytest.mark.parametrize("url", ["http://127.0.0.1:4200/api", "http://localhost:4200/api", "http://[::1]:4200/api"])
def test_a_server_that_another_host_has_to_itself_is_asked_where_it_is_reached_from_here(url, monkeypatch):
    links = Links(prefect_api=url)
    assert module._api_of(note(links=links)) == url
    elsewhere = note(links=links, driver=replace(Owner.here(), host="elsewhere"))
    monkeypatch.setenv("PREFECT_API_URL", "http://prefect.team:4200/api")
    assert module._api_of(elsewhere) == "http://prefect.team:4200/api"
    monkeypatch.delenv("PREFECT_API_URL")
    with pytest.raises(
        PipelineError, match=rf"whose server is {re.escape(url)} as elsewhere sees it; set PREFECT_API_URL"
    ):
        module._api_of(elsewhere)
    shared = replace(elsewhere, links=Links(prefect_api="http://10.0.0.2:4200/api"))
    assert module._api_of(shared) == "http://10.0.0.2:4200/api"


def test_what_prefect_started_prefect_ends(tmp_path, sleeper, monkeypatch):
    asked = []

    def runner(run):
        asked.append(run.links.flow_run)
        psutil.Process(run.driver.pid).kill()

    monkeypatch.setattr(module, "_cancel_flow_run", runner)
    running = note(driver=sleeper, links=Links(flow_run="f1", deployed=True))
    running.write(tmp_path)
    cancel(running, tmp_path)
    assert asked == ["f1"]


def test_a_pid_of_another_boot_is_not_touched(tmp_path, sleeper):
    before = replace(sleeper, machine="another-boot/4026531836")
    asked = note(driver=before)
    asked.write(tmp_path)
    with pytest.raises(PipelineError, match="on that machine"):
        cancel(asked, tmp_path)
    os.utime(run_record_path(tmp_path, asked.id), (0, 0))  # nothing was heard of it for long
    assert "died before" in cancel(asked, tmp_path)
    assert psutil.Process(sleeper.pid).is_running()


def test_a_command_without_its_run_says_that_the_run_alone_is_lacking(capsys):
    with pytest.raises(SystemExit):
        main(["cancel"])
    error = "error: the following arguments are required: RUN; posttrain status shows the runs; latest is accepted\n"
    assert capsys.readouterr().err.endswith(error)
