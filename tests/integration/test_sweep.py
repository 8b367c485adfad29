"""Sweeps: parents once, failures, stops, reruns, pruning, the record. Toy stages, real processes, real Prefect."""

import json
import re
import signal
from pathlib import Path

import pytest

from tests.command import TOY, Command, family, wait_until, wait_until_gone
from tests.prefect_api import PrefectApi

RATES, TWO_LEVELS = "stages.left.method.learning_rate=0.1,0.2,0.3", "stages.left.method.level=0,10"
BEST = "sweep.objectives.best={metric: left/loss, direction: minimize}"
# Every combination, by Optuna; a trial whose loss is above 5 is pruned at its first report.
PRUNED = (
    "sweep=optuna", "sweep.num_trials=2", BEST, "sweep.sampler._target_=optuna.samplers.BruteForceSampler",
    "sweep.pruning={pruner: {_target_: optuna.pruners.ThresholdPruner, upper: 5.0},"
    " stage: left, metric: loss, direction: minimize}",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "rows.txt").write_text("rows")
    return tmp_path


def command(folder, prefect_url, tracked=False):
    return Command(folder, *TOY, environment={"PREFECT_API_URL": prefect_url}, tracked=tracked)


@pytest.fixture
def toy(folder, prefect_url):
    return command(folder, prefect_url)


@pytest.fixture
def tracked(folder, prefect_url, uri):
    return command(folder, prefect_url, tracked=True)


def sweep(toy, *overrides, code=0):
    result = toy("run", "--multirun", "--json", *overrides)
    assert result.returncode == code, result.stderr
    return json.loads(result.stdout), result.stderr


def states(reported):
    return [trial["state"] for trial in reported["trials"]]


def made(folder, stage):
    return len(list((folder / "artifacts" / stage).glob("*/manifest.json")))


def started(stderr):
    return re.findall(r"^(\S+) +(?:started|resumes)", stderr, re.MULTILINE)


def prefect_runs(url, folder):
    body = {"flow_runs": {"name": {"any_": [path.name for path in (folder / "artifacts" / "sweeps").iterdir()]}}}
    return [run["state_type"] for run in PrefectApi(url).post("/flow_runs/filter", body)]


def test_what_trials_share_is_made_once_and_a_rerun_makes_what_is_missing(toy, folder, prefect_url):
    reported, errors = sweep(toy, RATES)
    assert states(reported) == ["complete"] * 3
    assert {stage: made(folder, stage) for stage in ("data", "model", "left", "right")} == {
        "data": 1, "model": 1, "left": 3, "right": 1,
    }  # fmt: skip
    assert "data 1, model 1, left 3, right 1: 6 of 6 to run" in errors
    assert sorted(started(errors)) == ["data", "left#0", "left#1", "left#2", "model", "right"]
    assert prefect_runs(prefect_url, folder) == ["COMPLETED"]

    again, errors = sweep(toy, RATES)
    assert (states(again), started(errors), again["trials"]) == (["complete"] * 3, [], reported["trials"])
    assert prefect_runs(prefect_url, folder) == ["COMPLETED"]

    (
        Path(reported["sweep"]) / "trials.jsonl"
    ).unlink()  # as a stop leaves it between the last stage and the end of a trial
    remembered, _ = sweep(toy, RATES)
    assert remembered["trials"] == reported["trials"] and all(trial["seconds"] > 0 for trial in reported["trials"])
    refused = toy("run", "--multirun", RATES, "sweep.objectives.best={metric: left/nope, direction: minimize}")
    assert refused.returncode == 2 and "left is finished and has not measured it; it measured loss" in refused.stderr

    assert not (folder / "artifacts" / "pipelines").exists()  # no sweep moves the view


@pytest.mark.slow  # quick in test_sweep_engine.py
def test_a_failed_trial_is_reported_at_once_and_stops_no_other(toy, folder, prefect_url):
    overrides = ("stages.left.method.fail=true,false", "stages.left.method.step_seconds=0.2", "sweep.parallel=1")
    reported, errors = sweep(toy, *overrides, code=1)
    assert states(reported) == ["failed", "complete"]
    lines = errors.splitlines()
    failed = next(line for line in lines if line.startswith("trial 0 failed: stages.left.method.fail=True: stage left"))
    assert "ValueError: set to fail" in failed
    assert lines.index(failed) < next(place for place, line in enumerate(lines) if re.match("left#1 +started", line))
    again = "the same command again tries these, and only these\n"
    assert errors.endswith(f"posttrain: 1 of 2 trials failed: 0; each reported why when it failed; {again}")
    assert prefect_runs(prefect_url, folder) == ["FAILED"]
    _, errors = sweep(toy, *overrides, code=1)
    assert started(errors) == ["left#0"]


@pytest.mark.slow  # quick in test_sweep_engine.py
def test_a_shared_stage_that_fails_ends_the_trials_that_need_it(toy, folder):
    (folder / "rows.txt").write_bytes(b"\xff")  # no text
    reported, errors = sweep(toy, RATES, code=1)
    assert states(reported) == ["failed"] * 3
    assert errors.count("UnicodeDecodeError") == 4  # of the stage, and of each trial
    assert made(folder, "model") == 0


def test_what_is_wrong_with_a_trial_or_a_word_is_reported_before_anything_starts(toy, folder):
    for arguments, message in (
        (("--multirun", "stages.left.method.num_steps=3,x"), "trial 1: stages.left.method.num_steps=x: "),
        (("--multirun",), "a sweep needs a field that varies"),
        (("--multirun", "store=a,b"), "store: cannot vary"),
        (("--multirun", RATES, *PRUNED, "sweep.sampler.sed=3"), "unexpected keyword argument 'sed'"),
        (("--multirun", RATES, *PRUNED, "sweep.pruning.pruner.uper=3"), "keyword argument 'uper'"),
        ((RATES,), "run --multirun tries each"),
        ((BEST,), "one run tries nothing; add --multirun"),
        (("--overrides-from", "rows.txt"), "--overrides-from rows.txt: holds no list of overrides"),
    ):
        result = toy("run", *arguments)
        assert (result.returncode, result.stderr[:11]) == (2, "posttrain: "), result.stderr
        assert message in result.stderr
    assert not (folder / "artifacts").exists()


@pytest.mark.slow
def test_a_stopped_sweep_leaves_no_process_and_resumes_where_it_was(toy, folder):
    overrides = ("stages.left.method.step_seconds=0,0.2", "stages.left.method.num_steps=40")
    process = toy.start("run", "--multirun", "--json", *overrides, stderr=folder / "errors.txt")
    wait_until(lambda: made(folder, "left") == 1 and made(folder, "right") == 1, "the first trial ends")
    wait_until(lambda: "left#1" in started((folder / "errors.txt").read_text()), "the second one begins")
    running = family(process)
    assert len(running) >= 3
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    wait_until_gone(running)
    reported, errors = sweep(toy, *overrides)
    assert (states(reported), started(errors)) == (["complete"] * 2, ["left#1"])
    _, errors = sweep(toy, *overrides, "stages.right.method.num_steps=2")  # another sweep
    assert started(errors) == ["right"]


def test_mlflow_shows_the_trials_below_the_sweep_and_the_best_is_a_run_with_nothing_to_do(tracked, folder, uri):
    reported, _ = sweep(tracked, TWO_LEVELS, BEST)

    from lineage.mlflow.address import connect

    client = connect(uri)
    runs = client.search_runs([client.get_experiment_by_name("toy").experiment_id])
    [parent] = [run for run in runs if run.info.run_id == reported["mlflow_run_id"]]
    assert parent.info.run_name == f"sweep {reported['sweep'].rpartition('/')[2]}"
    assert parent.info.status == "FINISHED"
    below = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert sorted(run.info.run_name for run in below) == [
        "data", "left#0", "left#1", "model", "right", "trial 0", "trial 1",
    ]  # fmt: skip
    trials = {run.info.run_name: run for run in below if run.info.run_name.startswith("trial")}
    assert [trials[name].data.params for name in ("trial 0", "trial 1")] == [
        {"stages.left.method.level": "0"}, {"stages.left.method.level": "10"},
    ]  # fmt: skip
    assert trials["trial 1"].data.metrics["left/loss"] == trials["trial 1"].data.metrics["best"] == 10 + 1 / 3
    by_name = {run.info.run_name: run.info.run_id for run in below}
    assert trials["trial 1"].data.tags["posttrain.stage_run.left"] == by_name["left#1"]
    assert trials["trial 1"].data.tags["posttrain.stage_run.data"] == by_name["data"]
    artifacts = {each.path for each in client.list_artifacts(parent.info.run_id)}
    assert artifacts == {"best.html", "best.yaml", "plots.html", "trials.csv"}

    [best] = reported["best"]
    assert (best["trial"], best["overrides"][-1]) == (0, "stages.left.method.level=0")
    winner = tracked("run", "--overrides-from", best["file"])
    assert winner.returncode == 0 and "nothing to do: all 4 stages are finished" in winner.stdout


@pytest.mark.slow  # quick in test_sweep_engine.py
def test_a_pruned_trial_ends_its_process_and_the_sweep_resumes(tracked, folder, uri):
    steps = ("stages.left.method.num_steps=40", "stages.left.method.step_seconds=0.1")
    reported, errors = sweep(tracked, *PRUNED, TWO_LEVELS, *steps)
    assert sorted(states(reported)) == ["complete", "pruned"]
    [pruned] = [trial for trial in reported["trials"] if trial["state"] == "pruned"]
    number = pruned["number"]
    assert f"trial {number} pruned: stages.left.method.level=10: pruned at step 1 of left#{number}" in errors
    assert made(folder, "left") == 1
    [left] = [path for path in (folder / "artifacts/left").iterdir() if not (path / "manifest.json").exists()]
    assert len((left / "metrics.jsonl").read_text().splitlines()) < 40

    from lineage.mlflow.address import connect

    client = connect(uri)
    runs = client.search_runs([client.get_experiment_by_name("toy").experiment_id])
    status = {run.info.run_name: run.info.status for run in runs}
    assert (status[f"left#{number}"], status[f"trial {number}"]) == ("KILLED", "KILLED")
    assert (status[f"left#{1 - number}"], status[f"trial {1 - number}"]) == ("FINISHED", "FINISHED")
    assert [run.info.status for run in runs if run.info.run_name.startswith("sweep")] == ["FINISHED"]


@pytest.mark.slow
def test_a_sampler_that_is_stopped_resumes_with_the_trial_it_was_at(toy, folder):
    overrides = ("sweep=optuna", "sweep.num_trials=2", BEST, "sweep.parallel=1",
             "stages.left.method.step_seconds=interval(0.01,0.02)", "stages.left.method.num_steps=100")  # fmt: skip
    process = toy.start("run", "--multirun", "--json", *overrides, stderr=folder / "errors.txt")
    wait_until(lambda: "left#0" in started((folder / "errors.txt").read_text()), "a trial begins")
    process.kill()
    process.communicate(timeout=60)
    reported, errors = sweep(toy, *overrides)
    assert states(reported) == ["complete"] * 2
    assert [title for title in started(errors) if title.startswith("left")] == ["left#0", "left#1"]
    assert made(folder, "left") == 2
