"""What is around a method: order, reuse, failure, stop. Toy stages, real processes, real Prefect, real Ray Train."""

import importlib.util
import json
import shutil
import signal
import socket

import psutil
import pytest

from lineage.store import Entry
from tests.command import TOY, Command, family, wait_until, wait_until_gone
from tests.prefect_api import PrefectApi
from tests.toy_interrupted import unbroken
from tests.toy_methods import ToyTraining

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
    assert "nothing to do: all 4 stages are finished" in second.stdout and "left   reused" in second.stdout
    assert len(PrefectApi(prefect_url).post("/flow_runs/filter", toys)) == len(before) + 1

    third = toy.run("stages.left.method.learning_rate=0.2")
    assert {name for name, row in third.items() if row["seconds"]} == {"left"}
    assert set(toy.states("resources.micro_batch_size=4").values()) == {"reuse"}


def test_a_run_ends_with_the_page_of_its_model_and_is_as_good_without_it(toy):
    page = toy.folder / "artifacts/pipelines/toy/report.html"
    assert f"\npage     {page.relative_to(toy.folder)}\n" in toy("run").stdout
    own, other = page.read_text(), "stages.right.method.learning_rate=0.2"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flows.reports.model.model_page", lambda reports: 1 / 0)
        done = toy("run", other)
    assert done.returncode == 0 and "page  " not in done.stdout and page.read_text() == own
    assert "is not written (ZeroDivisionError: division by zero)" in done.stderr
    assert "page     artifacts/" in toy("run", other).stdout  # all is reused, and the page was of another model
    assert page.read_text() != own
    page.unlink()
    page.mkdir()
    done = toy("run", other)
    assert done.returncode == 0 and "is not written (IsADirectoryError" in done.stderr


@pytest.mark.slow  # tests/libraries/flows/test_trackers.py has each tracker
def test_other_trackers_have_a_run_of_each_stage(toy):
    others = [name for name in ("wandb", "trackio") if importlib.util.find_spec(name)]
    toy.environment |= {"WANDB_MODE": "offline"}
    toy.run(f"tracking=[{','.join(['none', 'tensorboard', *others])}]")  # stdout is one JSON object all the same
    stages, logs = ["data", "left", "model", "right"], toy.folder / "artifacts/logs"
    assert sorted(path.parent.name.split()[0] for path in logs.glob("tensorboard/toy/*/events*")) == stages
    assert len(list(logs.glob("wandb/offline-run-*"))) == (4 if "wandb" in others else 0)
    for name in ("tensorboard", *others):
        note = next((toy.folder / "artifacts/left").glob(f"*/{name}.json"))
        assert json.loads(note.read_text())["step"] == ToyTraining.num_steps


def test_a_failed_stage_is_named_and_its_sibling_finishes(toy):
    result = toy("run", "stages.left.method.fail=true", "stages.right.method.step_seconds=0.5")
    assert result.returncode == 1
    assert f"stage left failed: rank 0 on {HERE} at step 1: ValueError: set to fail (log: " in result.stderr
    assert "Traceback" not in result.stderr + result.stdout
    log = result.stderr.split("(log: ")[-1].split(")")[0]
    assert 'raise ValueError("set to fail")' in (toy.folder / log).read_text()
    assert toy.states()["right"] == "run"  # of the default recipe
    assert toy.states("stages.right.method.step_seconds=0.5")["right"] == "reuse"
    [last] = json.loads(toy("status", "--json").stdout)["last"]
    assert last["state"] == "failed" and "set to fail" in last["cause"]
    assert {row["stage"]: row["state"] for row in last["stages"]}["left"] == "failed"
    assert "set to fail" in toy("logs", "left").stdout


def test_a_config_error_is_one_message_and_exit_code_2(toy):
    result = toy("run", "stages.left.method.betta=1")
    assert result.returncode == 2
    assert result.stderr.startswith("posttrain: stages.left.method.betta: unknown key")
    assert "Traceback" not in result.stderr
    assert toy("plan", "--nonsense").returncode == 2


def _stage(process: psutil.Process) -> str:
    """Which stage a process runs: the one whose log it writes."""
    try:
        return next((file.path for file in process.open_files() if file.path.endswith("stage.log")), "")
    except psutil.Error:
        return ""


def test_two_runs_at_once_train_a_shared_stage_once(toy):
    slow = ("stages.model.method.size=3", "stages.left.method.step_seconds=0.2", "stages.right.method.step_seconds=0.2")
    both = [toy.start("run", "--json", *slow) for _ in range(2)]
    rows = []
    for process in both:
        out, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        rows.append({row["stage"]: row for row in json.loads(out)["stages"]})
    for stage in rows[0]:
        assert sorted(bool(each[stage]["seconds"]) for each in rows) == [False, True], stage


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


@pytest.mark.slow  # quick in unit/flows/stages/test_execute.py
def test_a_source_that_changes_while_it_is_read_is_not_committed_under_its_old_name(toy, tmp_path):
    process = toy.start("run", "stages.data.method.seconds=3", "resources.launcher=foreground")
    wait_until(lambda: list(tmp_path.glob("artifacts/data/*/output/rows.txt")), "the rows are read")
    (tmp_path / "rows.txt").write_text("other rows")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "rows.txt has changed since the plan was made" in err
    assert not list(tmp_path.glob("artifacts/data/*/manifest.json"))


EDITS = """from pathlib import Path
from tests.toy_methods import ToyModel, ToyRows

class Edits(ToyRows):
    def run(self, inputs, ctx):
        own = Path("own.py")
        own.write_text(own.read_text().replace("pass", "size: int = 1"))
        return super().run(inputs, ctx)
"""


def test_code_that_changes_between_plan_and_stage_is_not_recorded_as_the_old_one(toy, tmp_path):
    (tmp_path / "edits.py").write_text(EDITS)
    (tmp_path / "own.py").write_text("from tests.toy_methods import ToyModel\n\nclass Own(ToyModel):\n    pass\n")
    overrides = ("stages.model.method._target_=own.Own", "stages.data.method._target_=edits.Edits")
    done = toy("run", *overrides)
    assert done.returncode == 1
    assert "the code of own has changed since the plan was made" in done.stderr
    again = toy.run(*overrides)
    assert [name for name, row in again.items() if row["state"] == "run"] == ["model", "left", "right"]


SLEPT_STEPS = 20


@pytest.mark.slow
def test_a_suspended_driver_keeps_its_lock_and_who_waits_says_whose(toy):
    overrides = (f"stages.left.method.num_steps={SLEPT_STEPS}", "stages.left.method.step_seconds=0.1")
    toy.run("stages.left.method.num_steps=1")  # data and model
    [row] = [row for row in json.loads(toy("plan", "--json", *overrides).stdout)["stages"] if row["stage"] == "left"]
    directory = toy.folder / "artifacts" / "left" / row["fingerprint"][:16]
    sleeper = toy.start("run", *overrides)
    wait_until(lambda: (directory / "metrics.jsonl").exists(), "the first step")
    sleeper.send_signal(signal.SIGSTOP)
    waiter = toy.start("run", *overrides)
    whose = f"waits for another run that makes it (process {sleeper.pid} on {socket.gethostname()})"
    read = [waiter.stderr.readline()]
    while whose not in read[-1]:
        read.append(waiter.stderr.readline())
        assert read[-1], read
    sleeper.send_signal(signal.SIGCONT)
    for process in (sleeper, waiter):
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert "reused: another run made it" in errors
    steps = [json.loads(line)["step"] for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, SLEPT_STEPS + 1))
    manifest = Entry(directory).manifest()
    assert manifest and manifest.output_digest == unbroken(ToyTraining(num_steps=SLEPT_STEPS))
    assert toy.states(*overrides)["left"] == "reuse"
    assert {"lock", "work", "checkpoints"}.isdisjoint(path.name for path in directory.iterdir())
