"""A run seen and stopped from other processes: what it does, what it says, its end, its death. Real processes."""

import json
from types import SimpleNamespace

import pytest

from flows.progress.run_record import dashboard_file
from flows.stages.job import Job
from tasks.context import Launcher, Resources
from tests.command import alive, family, wait_until, wait_until_gone
from tests.toy_methods import ToyTraining

SLOW_LEFT = ("stages.left.method.num_steps=600", "stages.left.method.step_seconds=0.1")


def status(toy):
    result = toy("status", "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def left(run):
    return next(stage for stage in run["stages"] if stage["stage"] == "left")


def has_reached(toy, step):
    running = status(toy)["running"]
    return running and (left(running[0])["step"] or 0) >= step


@pytest.fixture
def slow(toy):
    process = toy.start("run", *SLOW_LEFT)
    wait_until(lambda: has_reached(toy, 3), "left steps")
    yield process
    process.kill()
    process.communicate(timeout=60)


def test_a_run_is_seen_followed_and_cancelled_from_outside(toy, slow, prefect_url):
    [run] = status(toy)["running"]
    assert (run["pipeline"], run["state"], run["driver"]["pid"]) == ("toy", "running", slow.pid)
    stage = left(run)
    assert (stage["state"], stage["total"], stage["tokens_per_second"]) == ("running", 600, 100.0)
    assert stage["loss"] <= 1 / 3
    assert 0 < stage["eta_seconds"] < 600
    assert {each["stage"]: each["state"] for each in run["stages"]}["data"] == "done"
    assert run["prefect_flow_run"]
    assert run["links"]["prefect"].startswith(prefect_url.removesuffix("/api"))
    shown = toy("status").stdout
    assert "/600  loss 0." in shown
    assert "100 tok/s  ETA " in shown

    follower = toy.start("logs", "left", "--follow")
    started = family(slow)
    assert len(started) >= 3
    cancelled = toy("cancel", run["id"][-4:])
    assert (cancelled.returncode, cancelled.stderr) == (0, "")
    assert cancelled.stdout.startswith(f"{run['id']} is stopped; ")
    assert not alive(started)
    assert slow.wait(timeout=60) == 130
    message, errors = follower.communicate(timeout=60)
    assert (follower.returncode, errors) == (0, "")
    assert "local mode" in message

    document = status(toy)
    assert not document["running"]
    assert (document["last"][0]["id"], document["last"][0]["state"]) == (run["id"], "stopped")
    assert toy("logs", "toy/left", "-n", "1").stdout == message.splitlines(keepends=True)[-1]
    assert toy("cancel", "latest").stdout == f"{run['id']} has ended: stopped\n"


@pytest.mark.slow  # quick in unit/flows/test_status_report.py
def test_a_run_that_was_killed_is_shown_as_died_with_the_command_that_resumes(toy, slow):
    started = family(slow)
    slow.kill()
    slow.wait(timeout=60)
    wait_until_gone(started)  # its stage may have reported another step
    document = status(toy)
    assert not document["running"]
    [run] = document["last"]
    assert run["state"] == "died"
    assert run["command"].startswith("posttrain run --config-dir ")
    shown = toy("status").stdout
    where = f"{run['driver']['host']} was killed at step {left(run)['step']} of left"
    assert f"its driver on {where}; run the same command again" in shown
    assert run["command"] in shown
    assert toy("cancel", "latest").stdout.startswith(f"{run['id']} died before")


def test_a_stage_that_joins_a_cluster_leaves_the_address_of_its_dashboard(tmp_path, monkeypatch):
    from flows.stages.resources import connect

    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.2:6379")
    monkeypatch.setattr("ray.init", lambda **_: SimpleNamespace(dashboard_url="10.0.0.2:8265"))
    (tmp_path / "work").mkdir()
    resources = Resources(launcher=Launcher.CLUSTER)
    connect(Job(stage="left", method=ToyTraining(), inputs={}, resources=resources, directory=tmp_path))
    assert dashboard_file(tmp_path).read_text() == "10.0.0.2:8265"


def test_doctor_finds_what_is_wrong_here(toy, prefect_url):
    fit = toy("doctor", "--json", "tracking=none")
    document = json.loads(fit.stdout)
    errors = [finding for finding in document["findings"] if finding["level"] == "error"]
    assert (fit.returncode, document["ok"], errors) == (0, True, [])
    assert any(finding["found"] == f"PREFECT_API_URL={prefect_url} answers" for finding in document["findings"])

    toy.environment["PREFECT_API_URL"] = "http://127.0.0.1:9/api"
    wrong = toy("doctor", "stages.sft.method.betta=1")
    assert (wrong.returncode, wrong.stderr) == (2, "")
    assert "error  configuration  stages.sft.method.betta" in wrong.stdout
    assert "PREFECT_API_URL=http://127.0.0.1:9/api: nothing answers" in wrong.stdout
