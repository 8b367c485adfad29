"""What is around a method: order, reuse, failure, stop. Toy stages, real processes, real Prefect, real Ray Train."""

import json
import shutil
import signal
import socket
from pathlib import Path

import psutil
import pytest

from tests.command import TOY, Command, family, wait_until, wait_until_gone
from tests.prefect_api import PrefectApi

HERE = socket.gethostname()
SLOW_LEFT = ("stages.left.method.num_steps=600", "stages.left.method.step_seconds=0.1")


def step_of(folder, stage):
    files = list((folder / "artifacts" / stage).glob("*/metrics.jsonl"))
    return len(files[0].read_text().splitlines()) if files else 0


def test_runs_reuses_and_reruns_only_what_changed(toy, prefect_url):
    toys = {"flows": {"name": {"any_": ["toy"]}}}
    before = [run["id"] for run in PrefectApi(prefect_url).post("/flow_runs/filter", toys)]
    first = toy.run()
    assert {name: row["seconds"] > 0 for name, row in first.items()} == dict.fromkeys(first, True)

    [run] = [run for run in PrefectApi(prefect_url).post("/flow_runs/filter", toys) if run["id"] not in before]
    tasks = PrefectApi(prefect_url).post("/task_runs/filter", {"flow_runs": {"id": {"any_": [run["id"]]}}})
    assert run["state_type"] == "COMPLETED"
    assert sorted(task["name"] for task in tasks) == ["data", "left", "model", "right"]

    second = toy("run")
    assert second.returncode == 0
    assert "nothing to do: all 4 stages are finished" in second.stdout
    assert len(PrefectApi(prefect_url).post("/flow_runs/filter", toys)) == len(before) + 1

    third = toy.run("stages.left.method.learning_rate=0.2")
    assert {name for name, row in third.items() if row["seconds"]} == {"left"}
    assert set(toy.states("resources.micro_batch_size=4").values()) == {"reuse"}


COLLECTS = """
import gc
from tests.toy_methods import ToyTraining

class Collects(ToyTraining):
    def run(self, inputs, ctx):
        super().run(inputs, ctx)
        return {"loss": 1.0, "enabled": float(gc.isenabled()), "frozen": float(gc.get_freeze_count())}
"""


def test_a_stage_collects_its_own_garbage_and_looks_at_nothing_that_the_fork_server_imported(toy):
    (toy.folder / "own.py").write_text(COLLECTS)
    left = toy.run("stages.left.method._target_=own.Collects", "~stages.right")["left"]["metrics"]
    assert left["enabled"] == 1
    assert left["frozen"] > 100_000


def test_a_failed_stage_is_named_and_its_sibling_finishes(toy):
    result = toy("run", "stages.left.method.fail=true", "stages.right.method.step_seconds=0.5")
    assert result.returncode == 1
    assert f"stage left failed: rank 0 on {HERE} at step 1: ValueError: told to fail (log: " in result.stderr
    assert "Traceback" not in result.stderr + result.stdout
    log = result.stderr.split("(log: ")[-1].split(")")[0]
    assert 'raise ValueError("told to fail")' in Path(log).read_text()
    assert toy.states()["right"] == "run"  # of the default recipe
    assert toy.states("stages.right.method.step_seconds=0.5")["right"] == "reuse"


def test_a_config_error_is_one_message_and_exit_code_2(toy):
    result = toy("run", "stages.left.method.betta=1")
    assert result.returncode == 2
    assert result.stderr.startswith("posttrain: stages.left.method.betta: unknown key")
    assert "Traceback" not in result.stderr
    assert toy("plan", "--nonsense").returncode == 2


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 130), (signal.SIGINT, 130)], ids=["kill", "term", "int"]
)
def test_a_stop_leaves_no_process_and_keeps_what_was_finished(toy, number, code):
    process = toy.start("run", *SLOW_LEFT)
    wait_until(lambda: step_of(toy.folder, "left") > 2, "left steps")
    wait_until(lambda: list((toy.folder / "artifacts/right").glob("*/manifest.json")), "right finishes")
    started = family(process)
    assert len(started) >= 3
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    wait_until_gone(started)
    assert "Traceback" not in errors
    left = "run" if number == signal.SIGKILL else "resume"  # who is asked to end saves first
    assert toy.states(*SLOW_LEFT) == {"data": "reuse", "model": "reuse", "left": left, "right": "reuse"}
    again = toy.run(SLOW_LEFT[1], "stages.left.method.num_steps=3")
    assert {name for name, row in again.items() if row["seconds"]} == {"left"}


def test_a_killed_stage_process_is_a_failed_stage(toy):
    process = toy.start("run", *SLOW_LEFT, "resources.max_failures=0")
    wait_until(lambda: step_of(toy.folder, "left") > 2, "left steps")
    stages = [each for each in family(process) if "left" in _stage(each)]
    assert len(stages) == 1
    stages[0].kill()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"stage left failed: rank 0 on {HERE} was killed by SIGKILL at step " in errors
    assert "; out of memory? (log: " in errors


def test_a_killed_stage_process_is_started_again_from_its_checkpoint(toy):
    saving = ("stages.left.method.num_steps=40", "stages.left.method.step_seconds=0.1", "resources.save_steps=5")
    process = toy.start("run", *saving)
    wait_until(lambda: list((toy.folder / "artifacts/left").glob("*/checkpoints/step-10")), "left saves")
    [stage] = [each for each in family(process) if "left" in _stage(each)]
    stage.kill()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "killed by SIGKILL" in errors
    assert "it goes on from its checkpoint of step 10" in errors or "of step 15" in errors
    [directory] = (toy.folder / "artifacts/left").iterdir()
    steps = [json.loads(line)["step"] for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 41))
    resumed_at = json.loads((directory / "manifest.json").read_text())["provenance"]["resumed_at"]
    assert len(resumed_at) == 1
    assert resumed_at[0] in (10, 15)
    assert not (directory / "checkpoints").exists()


def _stage(process: psutil.Process) -> str:
    """Which stage a process runs: the one whose log it writes."""
    try:
        return next((file.path for file in process.open_files() if file.path.endswith("stage.log")), "")
    except psutil.Error:
        return ""


def test_two_runs_at_once_train_a_shared_stage_once(toy):
    slow = ("stages.model.method.size=3", "stages.left.method.step_seconds=0.5", "stages.right.method.step_seconds=0.5")
    both = [toy.start("run", "--json", *slow) for _ in range(2)]
    rows = []
    for process in both:
        out, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        rows.append({row["stage"]: row for row in json.loads(out)["stages"]})
    for stage in rows[0]:
        assert sorted(bool(each[stage]["seconds"]) for each in rows) == [False, True], stage


@pytest.mark.slow
def test_a_run_that_waits_for_another_can_be_stopped(toy):
    first = toy.start("run", *SLOW_LEFT)
    wait_until(lambda: step_of(toy.folder, "left") > 2, "left steps")
    assert "is making it now" in toy("plan", *SLOW_LEFT).stdout
    second = toy.start("run", *SLOW_LEFT)
    assert any("waits for another run" in line for line in second.stderr)  # reads up to that line
    second.send_signal(signal.SIGTERM)
    _, errors = second.communicate(timeout=10)
    assert second.returncode == 130
    assert "FAILED" not in errors
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=30)


def test_a_prefect_server_that_does_not_answer_is_a_wrong_setting(tmp_path):
    (tmp_path / "rows.txt").write_text("rows")
    url = "http://127.0.0.1:9/api"
    toy = Command(tmp_path, *TOY, environment={"PREFECT_API_URL": url})
    result = toy("run")
    assert result.returncode == 2
    assert f"PREFECT_API_URL={url}: no Prefect server answers there" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_works_without_a_server_and_leaves_none(tmp_path, prefect_database):
    (tmp_path / "rows.txt").write_text("rows")
    home = shutil.copytree(prefect_database, tmp_path / "home")
    toy = Command(tmp_path, *TOY, environment={"PREFECT_HOME": str(home)})
    process = toy.start("run", *SLOW_LEFT)
    wait_until(lambda: step_of(toy.folder, "left") > 2, "left steps")
    started = family(process)
    servers = [each for each in started if "prefect" in " ".join(each.cmdline())]
    assert len(servers) == 1, "one embedded server, ours"
    process.kill()
    process.communicate(timeout=60)
    wait_until_gone(started)


@pytest.mark.slow
def test_a_stage_runs_in_the_foreground_for_a_debugger(toy):
    process = toy.start("run", *SLOW_LEFT, "stages.left.resources.launcher=foreground")
    wait_until(lambda: step_of(toy.folder, "left") > 2, "left steps")
    assert not any("left" in _stage(each) for each in family(process))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert toy.states(*SLOW_LEFT)["left"] == "resume"
