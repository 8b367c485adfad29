"""The sweeps of ``conf/sweep/`` on the default pipeline, read and planned; none is run."""

import pytest

from flows.sweep.plan import read_sweep
from flows.sweep.space import fixed_overrides
from lineage.errors import ConfigError
from tasks.evaluate.report import POLICY_METRICS

BETA = "stages.dpo.method.beta=tag(log,interval(0.01,0.5))"


@pytest.fixture(autouse=True)
def _apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_optuna_judges_by_a_metric_that_evaluate_has():
    stated = read_sweep(["sweep=optuna", BETA, "adapter=full,lora"])
    stage, policy, metric = stated.sweep.objectives["best"].metric.split("/")
    names = [planned.name for planned in stated.plan.stages]
    assert stage in names and policy in names and metric in POLICY_METRICS
    assert list(stated.params) == ["stages.dpo.method.beta", "adapter"]


def test_asha_prunes_by_a_stage_of_the_pipeline():
    assert read_sweep(["sweep=asha", BETA]).sweep.pruning.stage == "dpo"
    with pytest.raises(ConfigError, match=r"sweep\.pruning\.stage=dpp.*did you mean dpo"):
        read_sweep(["sweep=asha", "sweep.pruning.stage=dpp", BETA])


@pytest.mark.parametrize("stage", ["dpo", "sft"])
def test_the_learning_rate_experiment_is_of_the_stage_that_is_named(stage):
    stated = read_sweep(["sweep=lr-range", f"sweep.until={stage}"])
    plans = [planned.plan for planned in stated.known]
    methods = [plan.stage(stage).stage.method for plan in plans]
    assert [method.num_steps for method in methods] == [20] * 5
    assert f"stages.{stage}.method.num_epochs=null" in fixed_overrides(
        stated.sweep
    )  # a pipeline's own would be a second
    assert len({method.learning_rate for method in methods}) == 5
    assert all(plan.stages[-1].name == stage for plan in plans)


def test_the_command_line_has_the_last_word_on_rates_and_steps():
    stated = read_sweep(
        ["sweep=lr-range", "stages.dpo.method.learning_rate=1e-6,1e-5", "stages.dpo.method.num_steps=9"]
    )
    methods = [planned.plan.stage("dpo").stage.method for planned in stated.known]
    assert [(method.learning_rate, method.num_steps) for method in methods] == [(1e-6, 9), (1e-5, 9)]
