"""Deployments as a team runs them: a real Prefect server, a real `posttrain serve`, a real worker."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from flows.progress.run_record import Links, OpenFlow, RunRecord, new_id
from lineage.filesystem.owner import Owner
from tests.command import CONF, REPOSITORY, alive, family, wait_until
from tests.prefect_api import PrefectApi, serve
from tests.web_server import save_block, webhook

pytestmark = pytest.mark.integration

ENGINE = "PREFECT__FLOW_RUN_ID"  # what Prefect sets in the process of a run
WORDS = ["model=none", "tracking=none", "sources.rows.path=rows.txt"]
SLOW = ["stages.data.method.seconds=300"]
NOTIFY = "notify=custom-webhook/ops"
OWN_PIPELINE = """\
# @package _global_
defaults: [toy, _self_]
name: toy-own
stages: {data: {method: {_target_: own.OwnRows}}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where the command is called: data, and groups of the user's own, two of them no good."""
    folder = tmp_path_factory.mktemp("serve")
    (folder / "rows.txt").write_text("rows")
    shutil.copytree(CONF, folder / "groups")
    (folder / "groups/pipeline/unreadable.yaml").write_text("stages: {")
    (folder / "groups/pipeline/toy-own.yaml").write_text(OWN_PIPELINE)
    (folder / "own.py").write_text("from tests.toy_methods import ToyRows\n\n\nclass OwnRows(ToyRows):\n    pass\n")
    return folder


@pytest.fixture(scope="module")
def environment(prefect_url, folder) -> dict[str, str]:
    return {
        **os.environ, "PREFECT_API_URL": prefect_url, "PREFECT_HOME": str(folder / "home"),
        "PYTHONPATH": str(REPOSITORY), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PWD": str(folder), "PREFECT_WORKER_QUERY_SECONDS": "1",
    }  # fmt: skip


@pytest.fixture(scope="module")
def api(prefect_url) -> PrefectApi:
    return PrefectApi(prefect_url)


@pytest.fixture(scope="module")
def heard(environment) -> Iterator[list[dict[str, str]]]:
    """What whom ``notify`` names was told so far."""
    with webhook() as (address, heard):
        save_block("ops", address, environment)
        yield heard


def output(heard: list[dict[str, str]]) -> tuple[str, str]:
    """Subject and body of the one message since the last call."""
    wait_until(lambda: heard, "the listener hears it")
    [message] = heard
    heard.clear()
    return message["subject"], message["body"]


@pytest.fixture(scope="module")
def served(folder, environment):
    process = serve(folder, environment, "--config-dir", "groups", *WORDS)
    yield process
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def running(api: PrefectApi, served: subprocess.Popen, *overrides: str) -> tuple[str, list[psutil.Process]]:
    """A run whose first stage has begun, and its processes."""
    before = {process.pid for process in family(served)}
    run = api.start("toy/local", *(overrides or SLOW))

    def new() -> list[psutil.Process]:
        return [process for process in family(served) if process.pid not in before]

    wait_until(lambda: "RUNNING" in api.stages(run).values() and len(new()) >= 2, "a stage runs")
    return run, new()


@pytest.fixture(autouse=True)
def nothing_goes_on(prefect_url) -> Iterator[None]:
    """A test that fails midway leaves no run for which all others would wait; runs that other files killed stay."""
    api = PrefectApi(prefect_url)

    def active() -> set[str]:
        states = {"state": {"type": {"any_": ["RUNNING", "PAUSED", "PENDING"]}}}
        return {run["id"] for run in api.post("/flow_runs/filter", {"flow_runs": states})}

    before = active()
    yield
    for run in active() - before:
        api.set_state(run, "CANCELLING")
        api.end(run)


def posttrain(folder: Path, environment: dict[str, str], *arguments: str) -> str:
    """What a command says."""
    called = [sys.executable, "-m", "flows", *arguments]
    return subprocess.run(called, cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout


def drivers(served: subprocess.Popen) -> list[psutil.Process]:
    """The process of each run."""
    return [each for each in family(served) if "prefect.engine" in " ".join(each.cmdline())]


def test_every_pipeline_is_registered_and_what_cannot_be_read_is_named(served, api, folder):
    names = {each["name"] for each in api.post("/flows/filter", {})}
    assert {"toy", "toy-gated", "cpt-sft-dpo", "cpt-sft-dpo-gated"} <= names
    log = (folder / "serve.log").read_text()
    assert "posttrain: left out" in log and "unreadable.yaml" in log
    assert "cpt-sft-dpo/local  needs overrides: " in log


@pytest.mark.slow
def test_a_run_makes_what_is_not_finished_and_its_page_tells_of_it(served, api):
    run = api.start("toy/local")
    assert api.end(run)["message"].startswith("4 of 4 stages run in")
    assert api.stages(run) == dict.fromkeys(["data", "left", "model", "right"], "COMPLETED")
    page = api.artifacts(run)
    assert "| left | run |" in page["toy-plan"]["data"]
    assert page["toy-left-progress"]["data"] == 100.0 and "loss 0.333" in page["toy-left-progress"]["description"]
    made = api.run(run)
    assert made["tags"] == ["pipeline:toy"] and made["name"].startswith("toy ")

    run = api.start("toy/local")
    state = api.end(run)
    assert (state["type"], state["message"]) == ("COMPLETED", "nothing to do: all 4 stages are finished")
    assert api.stages(run) == {}


@pytest.mark.slow  # quick in test_deployments.py
def test_a_wrong_override_fails_before_any_stage(served, api):
    run = api.start("toy/local", "stages.left.method.learning_rat=1")
    state = api.end(run)
    assert state["type"] == "FAILED" and "did you mean learning_rate" in state["message"]
    assert api.stages(run) == {}


@pytest.mark.slow
def test_a_refused_gate_is_no_completed_run(served, api):
    worse = ["stages.evaluate.method.wins.left=0", "tracking.mlflow=true"]
    run = api.start("toy-gated/local", *worse)
    state = api.end(run)
    assert (state["type"], state["name"]) == ("FAILED", "Refused")
    assert "beats_parent" in state["message"]
    page = api.artifacts(run)
    assert "| left | 0 of 40 |" in page["toy-gated-evaluate"]["data"]
    assert "beats_parent" in page["toy-gated-gate"]["data"]
    assert "| gate | `" in page["toy-gated-mlflow"]["data"] and "mlflow.db" in page["toy-gated-mlflow"]["description"]


@pytest.mark.slow
def test_a_champion_that_is_kept_completes_a_run(served, api):
    worse = ["stages.evaluate.method.wins.left=0", "tracking.mlflow=true"]
    state = api.end(api.start("toy-gated/local", *worse, "retrain.promote=left"))
    assert (state["type"], state["name"]) == ("COMPLETED", "ChampionKept")  # what such a pipeline is for


@pytest.mark.slow
def test_a_person_rejects_by_cancelling_the_run_that_asks_and_approves_by_resuming_it(served, api, folder):
    def asked(learning_rate: float) -> str:
        model = [f"stages.left.method.learning_rate={learning_rate}", "stages.evaluate.method.wins.left=40"]
        run = api.start("toy-gated/local", *model, "gate.approval=required")
        api.wait(run, lambda run: run["state_type"] == "PAUSED")
        return run

    def output() -> list[tuple[str, str]]:
        file = folder / "artifacts/promotions.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [(each["action"], each["who"]) for each in map(json.loads, lines)]

    run = asked(0.3)
    api.set_state(run, "CANCELLING")
    assert api.end(run)["type"] == "CANCELLED"
    wait_until(lambda: output() == [("reject", f"Prefect, flow run {run}")], "it is recorded")

    run = asked(0.4)
    api.post(f"/flow_runs/{run}/resume", {"run_input": {"who": "Ada", "why": "read its answers"}})
    assert api.end(run)["type"] == "COMPLETED"
    assert output()[1:] == [("approve", "Ada")]

    run = asked(0.5)
    [driver] = [each for each in drivers(served) if each.environ()[ENGINE] == run]
    driver.terminate()
    state = api.end(run)
    assert state["type"] == "CRASHED" and "run it again to be asked again" in state["message"]
    assert len(output()) == 2  # no approval has come


@pytest.mark.slow
def test_code_that_was_not_planned_is_refused_unless_set(served, api, folder):
    pipeline = folder / "groups/pipeline/toy.yaml"
    declared = pipeline.read_text()
    try:
        pipeline.write_text(declared + "# changed\n")
        planned = api.deployment("toy/local")["version"]
        state = api.end(api.start("toy/local"))
        assert (
            state["type"] == "FAILED" and f"planned with the code {planned}, and the code here is" in state["message"]
        )
        assert api.end(api.start("toy/local", any_code=True))["type"] == "COMPLETED"
    finally:
        pipeline.write_text(declared)


@pytest.mark.slow
def test_a_gpu_pool_is_drawn_on_and_one_that_is_not_there_refused(served, api):
    long = ["stages.left.method.num_steps=1000", "stages.left.method.step_seconds=0.3"]
    wants = ["resources.gpu_pool=a100", "tracking.mlflow=true", *long]
    state = api.end(api.start("toy/local", *wants))
    assert state["type"] == "FAILED" and "prefect gcl create a100 --limit" in state["message"]
    api.post("/v2/concurrency_limits/", {"name": "a100", "limit": 1})
    run, processes = running(api, served, *wants)
    wait_until(lambda: api.get("/v2/concurrency_limits/a100")["active_slots"] == 1, "it holds a slot")
    wait_until(lambda: 0 < api.artifacts(run).get("toy-left-progress", {"data": 0})["data"] < 100, "its bar moves")
    wait_until(lambda: "toy-mlflow" in api.artifacts(run), "MLflow has the run")  # before it ends
    assert "| this run | `" in api.artifacts(run)["toy-mlflow"]["data"]
    api.set_state(run, "CANCELLING")
    assert api.end(run)["type"] == "CANCELLED"
    wait_until(lambda: not alive(processes), "all processes end")
    assert api.get("/v2/concurrency_limits/a100")["active_slots"] == 0


@pytest.mark.slow
def test_one_run_of_a_pipeline_at_a_time_and_a_cancelled_one_leaves_nothing(served, api, folder, environment):
    run, processes = running(api, served)
    other = api.start("toy/local")
    wait_until(lambda: "waits for another run of toy" in api.log(other), "the second waits")
    state = api.end(api.start("toy/local"))
    assert (state["type"], state["message"].split(",")[0]) == (
        "COMPLETED",
        "left to another run with the same overrides",
    )

    def noted() -> dict[str, dict]:
        """By flow run."""
        runs = json.loads(posttrain(folder, environment, "status", "--json"))["running"]
        return {each["prefect_flow_run"]: each for each in runs}

    third = api.start("toy/local", "stages.left.method.num_steps=2")  # another than what waits
    wait_until(lambda: third in noted(), "the third waits too")
    waits = ("waiting", "another run of toy")
    states = {flow_run: (each["state"], each["waits_for"]) for flow_run, each in noted().items()}
    assert states == {run: ("running", ""), other: waits, third: waits}
    assert " is stopped; " in posttrain(folder, environment, "cancel", noted()[third]["id"])
    assert api.end(third)["type"] == "CANCELLED"
    assert set(noted()) == {run, other}
    api.set_state(run, "CANCELLING")
    assert api.end(run)["type"] == "CANCELLED"
    wait_until(lambda: not alive(processes), "all processes end")
    assert api.end(other)["type"] == "COMPLETED"
    wait_until(lambda: noted() == {}, "neither is noted any more")


@pytest.mark.slow
def test_posttrain_cancel_ends_it_through_prefect(served, api, folder, environment):
    run, processes = running(api, served)
    assert " is stopped; " in posttrain(folder, environment, "cancel", "latest")
    assert not alive(processes)
    assert api.end(run)["type"] == "CANCELLED"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("sources.rows.path=gone.txt", "gone.txt: no such file"),
        pytest.param("resources.gpu_pool=nowhere", "prefect gcl create nowhere", marks=pytest.mark.slow),
        pytest.param("store=/proc/store", "/proc/store", marks=pytest.mark.slow),
    ],
)
def test_a_failure_before_any_stage_is_reported(served, api, heard, override, why):
    state = api.end(api.start("toy/local", "stages.data.method.seconds=0.1", NOTIFY, override))
    assert state["type"] == "FAILED" and why in state["message"]
    subject, body = output(heard)
    assert subject == "toy: failed" and why in body


@pytest.mark.slow
def test_a_killed_run_is_a_crash_and_leaves_nothing(served, api, heard):
    run, processes = running(api, served, *SLOW, NOTIFY)
    [driver] = drivers(served)
    driver.kill()
    assert api.end(run)["type"] == "CRASHED"
    wait_until(lambda: not alive(processes), "all processes end")
    subject, body = output(heard)
    assert subject == "toy: crashed" and f"The run {api.run(run)['name']!r} crashed: " in body


@pytest.mark.slow
def test_a_killed_server_takes_its_runs_along_and_the_next_one_closes_what_died_unheard(
    served, api, folder, environment, heard
):
    run, processes = running(api, served, *SLOW, NOTIFY)
    served.kill()
    served.wait(120)
    assert api.end(run)["type"] == "CRASHED"  # its own process has said so
    wait_until(lambda: not alive(processes), "all processes end")
    assert output(heard)[0] == "toy: crashed"

    unheard = api.start("toy/local")
    api.set_state(unheard, "RUNNING")
    gone = replace(Owner.here(), started=0.0)  # our pid, of another time
    RunRecord(
        id=new_id(), pipeline="toy", cli_args=[], driver=gone, started=0.0, stages={}, links=Links(deployed=True),
        open_flow=OpenFlow(flow_run=unheard, api=environment["PREFECT_API_URL"]),
    ).write(folder / "artifacts")  # fmt: skip
    process = serve(folder, environment, "--config-dir", "groups", *WORDS, NOTIFY)
    try:
        assert api.end(unheard)["type"] == "CRASHED"
        assert output(heard)[0] == "toy: crashed"
        assert api.end(api.start("toy/local"))["type"] == "COMPLETED"
        heard.clear()
        stopped, _ = running(api, process)
    finally:
        process.send_signal(signal.SIGINT)
        while process.poll() is None:  # someone who has no patience
            time.sleep(0.1)
            process.send_signal(signal.SIGINT)
    assert process.returncode == 0
    assert "Traceback" not in (folder / "serve.log").read_text()
    assert api.end(stopped)["type"] == "CANCELLED"
    subject, body = output(heard)
    assert subject == "toy: stopped" and "Runner is shutting down." in body


@pytest.mark.slow
def test_a_worker_runs_what_prefect_yaml_deploys(api, folder, environment):
    arguments = ["--config-dir", "groups", "pipeline=toy-own", *WORDS, "store=team"]
    team = {**environment, "POSTTRAIN_WORDS": " ".join(arguments)}
    for command in (
        [sys.executable, "-m", "flows.prefect.deployments", *arguments],
        ["prefect", "work-pool", "create", "posttrain", "--type", "process"],
        ["prefect", "--no-prompt", "deploy", "--all"],
    ):
        done = subprocess.run(command, cwd=folder, env=team, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    with (folder / "worker.log").open("w") as log:
        worker = subprocess.Popen(
            ["prefect", "worker", "start", "--pool", "posttrain"], cwd=folder.parent, env=environment,
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        state = api.end(api.start("toy-own/team"))
        assert state["type"] == "COMPLETED", state
        assert (folder / "team/left").is_dir()
        (folder / "own.py").write_text((folder / "own.py").read_text() + "# changed\n")
        state = api.end(api.start("toy-own/team"))
        assert state["type"] == "FAILED" and "this run was planned with the code" in state["message"]
    finally:
        for process in reversed(family(worker)):
            if psutil.pid_exists(process.pid):
                process.kill()
        worker.wait(120)
