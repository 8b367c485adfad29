"""``posttrain tune``: rounds, budget, rerun, refusal. Toy stages, whose curves follow from their settings."""

import csv
import json
import os
import re
from pathlib import Path

import pytest
import yaml

from flows.sweep.tune import Tuning, read_tuning
from lineage.errors import ConfigError
from tests.command import TOY, Command, call
from tests.miniature import MODEL, STEPS, write_own_rows


@pytest.fixture
def toy(tmp_path, prefect_url):
    (tmp_path / "rows.txt").write_text("rows")
    overrides = ["pipeline=toy-tuned", *(word for word in TOY if not word.startswith("pipeline="))]
    return Command(tmp_path, *overrides, environment={"PREFECT_API_URL": prefect_url})


def tune(toy: Command, *overrides: str) -> tuple[dict, list[str]]:
    """The printed object, and the stages that were started."""
    result = toy("tune", "tuned", "--json", *overrides)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout), re.findall(r"^(\S+) +started", result.stderr, re.MULTILINE)


@pytest.mark.parametrize(
    ("pipeline", "stage", "metric", "direction"),
    [
        ("sft-grpo", "sft", "sft/held_out_loss", "minimize"), ("sft-grpo", "grpo", "grpo/reward", "maximize"),
        ("rlhf-ppo", "ppo", "ppo/reward", "maximize"),
    ],
)  # fmt: skip
def test_it_tunes_by_what_the_method_reports_of_its_progress(pipeline, stage, metric, direction):
    plan = read_tuning(Tuning(stage=stage), [f"pipeline={pipeline}", "tracking=none"], None)
    [objective] = plan.sweep.objectives.values()
    assert (objective.metric, objective.direction) == (metric, direction)
    assert any("validation" in each for each in plan.overrides) == (stage == "sft")


@pytest.mark.parametrize("metric", ["rewards/chosn", "evaluate/dpo/preference_acuracy", "held_out_loss"])
def test_a_metric_that_is_not_measured_is_refused_before_any_trial(metric):
    with pytest.raises(ConfigError, match=rf"--metric (dpo/)?{metric}: \w+ does not measure it"):
        read_tuning(Tuning(stage="dpo", metric=metric), ["tracking=none"], None)


def settings(found: dict) -> list[dict[str, str]]:
    names = "stages.tuned.method."
    return [
        {name.removeprefix(names): value for name, value in trial["params"].items() if name.startswith(names)}
        for trial in found["trials"]
    ]


def test_each_round_changes_what_the_doctor_finds_the_best_is_kept_and_a_killed_command_resumes(toy):
    found, started = tune(toy)
    longer = {"num_steps": "120", "num_epochs": "null"}
    assert settings(found) == [{}, {"learning_rate": "0.003"}, {"learning_rate": "0.003", **longer}]
    assert sorted(started) == ["data", "model", "tuned#0", "tuned#1", "tuned#2"]
    assert [(each["name"], each["trials"], each["best"]) for each in found["rounds"]] == [
        ("learning rate", [0, 1], 1), ("batch", [1], 1), ("epochs", [1, 2], 2), ("regularization", [2], 2),
    ]  # fmt: skip
    assert found["rounds"][0]["finding"].startswith("slow: ")
    assert found["rounds"][2]["finding"].startswith("still-falling: ")
    folder = Path(found["sweep"])
    best = yaml.safe_load((folder / "best.yaml").read_text())
    assert (best["trial"], best["values"]["best"]) == (2, pytest.approx(3 * 2.718281828 ** (-0.36)))
    rows = list(csv.DictReader((folder / "trials.csv").open()))
    assert [row["stages.tuned.method.learning_rate"] for row in rows] == ["", "0.003", "0.003"]
    assert rows[1]["because.tuned"].startswith("slow:tuned@")
    assert (folder / "rounds.md").read_text().count("\n") == 6

    results = (folder / "trials.jsonl").read_text().splitlines(keepends=True)
    (folder / "trials.jsonl").write_text("".join(results[:2]))  # as a kill leaves them
    again, started = tune(toy)
    assert (again["trials"], again["rounds"], started) == (found["trials"], found["rounds"], [])
    reused = toy.states("--overrides-from", str(folder / "best.yaml"))
    assert (reused["tuned"], reused["after"]) == ("reuse", "run")


def test_both_sides_are_tried_where_the_doctor_finds_nothing_and_a_failed_side_is_a_result(toy):
    quick = ("stages.tuned.method.learning_rate=0.02", "stages.tuned.method.highest=0.03", "--rounds", "1")
    found, _ = tune(toy, *quick, "--metric", "loss")
    assert settings(found) == [{}, {"learning_rate": "0.06"}, {"learning_rate": "0.0067"}]
    assert [trial["state"] for trial in found["trials"]] == ["complete", "failed", "complete"]
    assert found["rounds"][0]["best"] == 0


@pytest.mark.slow
def test_it_ends_before_a_budget_of_steps_is_passed_and_a_larger_one_resumes(toy):
    found, started = tune(toy, "--budget-steps", "130")
    assert [trial["number"] for trial in found["trials"]] == [0, 1]
    assert found["stopped"] == "round 3, epochs: trial 2: it would make 240 of --budget-steps 130; not started"
    assert "tuned#2" not in started
    found, started = tune(toy, "--budget-steps", "240")
    assert (len(found["trials"]), found["stopped"], started) == (3, None, ["tuned#2"])


@pytest.mark.slow
def test_a_metric_of_a_later_stage_judges_by_that_stage(toy):
    found, started = tune(toy, "--metric", "after/loss", "--steps", "50", "--rounds", "1")
    assert {"tuned#0", "after#0", "tuned#1", "after#1"} <= set(started)
    assert "other" not in started
    assert "after/loss" in found["trials"][0]["metrics"]
    assert found["rounds"][0]["best"] == 0  # equal: the first


@pytest.mark.slow
def test_a_first_trial_that_failed_is_tried_again(toy):
    overrides = ("stages.tuned.method.highest=1e-9", "--rounds", "1", "--metric", "loss")
    for _ in range(2):
        result = toy("tune", "tuned", *overrides)
        assert result.returncode == 1
        assert "tuned#0" in re.findall(r"^(\S+) +started", result.stderr, re.MULTILINE)
    assert "trials failed" in result.stderr


def test_a_dry_run_prints_the_first_round_and_runs_nothing(toy):
    result = toy("tune", "tuned", "--dry-run", "--json")
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)
    rate = "stages.tuned.method.learning_rate"
    assert [row["params"] for row in rows] == [{}, {rate: "0.003"}, {rate: "0.00033"}]
    assert [row["steps"] for row in rows] == [60, 60, 60]
    assert not (toy.folder / "artifacts").exists()
    text = toy("tune", "tuned", "--dry-run", "--budget-steps", "130").stdout
    assert text.count("unless diagnose finds something") == 2
    assert text.count("it would make") == 1 and "it would make 180 of --budget-steps 130" in text


def test_a_budget_of_money_counts_gpu_hours_and_what_trials_share_once(tmp_path):
    priced = ("resources.gpus_per_worker=1", "resources.price_per_gpu_hour=3600")
    asked = ["tune", "sft", "--dry-run", "--json", *priced, "--budget-money"]
    rows = json.loads(call([*asked, "1000"], tmp_path, dict(os.environ)).stdout)
    assert [row["over"] for row in rows] == [None, None, None]
    assert rows[0]["money"] == pytest.approx(rows[0]["seconds"])  # a second costs 1
    assert [row["steps"] for row in rows[1:]] == [400, 400] and rows[0]["steps"] > 400  # the first makes what it reads
    rows = json.loads(call([*asked, str(rows[0]["money"] + 1e-6)], tmp_path, dict(os.environ)).stdout)
    assert [bool(row["over"]) for row in rows] == [False, True, True]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("data",), "data: no stage that trains; there are: tuned, after, other"),
        (("tuned", "stages.tuned.method.learning_rate=1,2"), "tune chooses what varies"),
        (("tuned", "--metric", "other/loss"), "other does not read tuned"),
        (("tuned", "--rounds", "0"), "--rounds 0: a number above 0 is accepted"),
        (("tuned", "--budget-money", "1"), "price_per_gpu_hour=None, and 0 GPUs"),
    ],
)
def test_what_cannot_be_tuned_is_refused(toy, overrides, message):
    result = toy("tune", *overrides)
    assert result.returncode == 2
    assert message in result.stderr
    assert not (toy.folder / "artifacts").exists()


@pytest.mark.slow
def test_a_real_stage_is_tuned_by_its_loss_on_held_out_rows(tmp_path, prefect_url):
    overrides = (*MODEL, *STEPS, *write_own_rows(tmp_path), "stages.sft.method.learning_rate=1e-6")
    mini = Command(tmp_path, *overrides, environment={"PREFECT_API_URL": prefect_url})
    result = mini("tune", "sft", "--steps", "60", "--rounds", "1", "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["rounds"][0]["finding"].startswith("flat: ")
    first, second = found["trials"]
    assert float(second["params"]["stages.sft.method.learning_rate"]) >= 5e-6
    assert second["values"]["best"] == second["metrics"]["sft/held_out_loss"] < first["values"]["best"]
    assert found["rounds"][0]["best"] == found["best"][0]["trial"] == 1
    assert "dpo" not in second["stages"]
