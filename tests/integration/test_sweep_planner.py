"""Trials as plans: composed once, with the same result as each by itself; and those of the shipped sweeps."""

import pytest

from flows.declare.config import Composer, compose_tree
from flows.planning.plan import make_plan
from flows.sweep.folder import sweep_folder
from flows.sweep.plan import SweepPlan, count_stages, read_sweep, union, varying
from lineage.errors import ConfigError
from tasks.evaluate.report import POLICY_METRICS
from tests.command import CONF
from tests.sweeps import sweep

RATE = "stages.left.method.learning_rate"


@pytest.fixture
def cli_args(tmp_path):
    (tmp_path / "rows.txt").write_text("rows")
    return ["pipeline=toy", "model=none", f"sources.rows.path={tmp_path}/rows.txt", f"store={tmp_path}/store"]


@pytest.mark.parametrize(
    "more",
    [
        ["stages.dpo.method.beta=0.2"],
        ["stages.dpo.method={beta: 0.3}", "stages.dpo.method.seed=null"],
        ["stages.sft.method.chat_template='a, \"b\"'"],
        ["model=pretrained", "sources.base.path=x"],
        ["adapter=lora"],
    ],
)
def test_a_value_on_a_copy_is_composed_as_if_it_had_been_there_from_the_start(more):
    composer = Composer(["stages.dpo.method.num_steps=3"])
    assert composer.tree(more) == compose_tree(["stages.dpo.method.num_steps=3", *more])
    assert composer.tree() == compose_tree(["stages.dpo.method.num_steps=3"])


def _plan(cli_args):
    return SweepPlan(sweep=sweep(), params={}, space={}, overrides=cli_args, config_dir=CONF)


def test_a_mistake_in_a_trial_names_the_trial(cli_args):
    with pytest.raises(ConfigError, match=r"trial 4: stages.left.method.rate=1: .*unknown key; .*did you mean"):
        _plan(cli_args).trial(4, {"stages.left.method.rate": "1"})


def test_a_source_is_pinned_once_for_all_trials(cli_args, monkeypatch):
    import flows.planning.plan

    pinned = []
    pin = flows.planning.plan.pin
    monkeypatch.setattr(flows.planning.plan, "pin", lambda *args: pinned.append(args[0]) or pin(*args))
    sweep = read_sweep([*cli_args, f"{RATE}=0.1,0.2,0.3"], CONF)
    assert pinned == ["rows"]
    alone = [make_plan(each.plan.pipeline) for each in sweep.known]
    assert [each.plan.stages for each in sweep.known] == [each.stages for each in alone]


OPTUNA = [
    "sweep=optuna", "sweep.objectives.best={metric: left/loss, direction: minimize}",
    "stages.left.method.level=interval(0,1)",
]  # fmt: skip


@pytest.mark.parametrize("kind", [[f"{RATE}=0.1,0.2"], OPTUNA])
def test_a_sweep_on_other_data_or_settings_is_another_and_one_on_other_resources_is_not(cli_args, tmp_path, kind):
    def folder(*more):
        configured = read_sweep([*cli_args, *kind, *more], CONF)
        return sweep_folder(tmp_path, "toy", configured.sweep, configured.params, union(configured.samples))

    first = folder()
    assert folder() == folder("stages.left.resources.cpus_per_worker=2") == folder("code_drift=rerun") == first
    assert folder("stages.right.method.num_steps=4") != first
    (tmp_path / "rows.txt").write_text("other rows")
    assert folder() != first


def test_each_choice_of_a_sampler_tells_sweeps_apart(cli_args, tmp_path):
    (tmp_path / "more.txt").write_text("rows")
    choice = [*cli_args[:2], cli_args[3], *OPTUNA, f"sources.rows.path={tmp_path}/rows.txt,{tmp_path}/more.txt"]
    before = set(union(read_sweep(choice, CONF).samples))
    (tmp_path / "more.txt").write_text("other rows")
    assert set(union(read_sweep(choice, CONF).samples)) != before


def test_until_leaves_out_what_the_stage_does_not_need(cli_args):
    sweep = read_sweep([*cli_args, f"{RATE}=0.1,0.2", "sweep.until=left"], CONF)
    assert count_stages(sweep.known) == {"data": 1, "model": 1, "left": 2}
    with pytest.raises(ConfigError, match=r"sweep.until=lef: no such stage; .*did you mean left"):
        read_sweep([*cli_args, f"{RATE}=0.1,0.2", "sweep.until=lef"], CONF)


@pytest.mark.parametrize(
    ("field", "own"),
    [
        (RATE, {"left"}),
        ("stages.model.method.size", {"model", "left", "right"}),
        ("adapter", {"data", "model", "left", "right"}),
        ("sources.rows.path", {"data", "model", "left", "right"}),
    ],
)
def test_a_field_may_change_its_stage_and_all_that_is_made_from_it(cli_args, field, own):
    assert varying(_plan(cli_args).plan.pipeline, [field]) == own


def test_the_command_line_has_the_last_word_on_what_is_fixed(cli_args):
    fixed = "sweep.fixed={stages.left.method.num_steps: 7, stages.right.method.num_steps: 7}"
    sweep = read_sweep([*cli_args, f"{RATE}=0.1,0.2", fixed, "stages.left.method.num_steps=5"], CONF)
    stages = sweep.plan.pipeline.stages
    assert (stages["left"].method.num_steps, stages["right"].method.num_steps) == (5, 7)


def test_a_stage_in_the_foreground_is_refused(cli_args):
    with pytest.raises(ConfigError, match=r"trial 0: .*launcher=foreground: a sweep runs stages side by side"):
        read_sweep([*cli_args, f"{RATE}=0.1,0.2", "stages.left.resources.launcher=foreground"], CONF)


# The sweeps of ``conf/sweep/`` on the default pipeline: read and planned, none is run.
BETA = "stages.dpo.method.beta=tag(log,interval(0.01,0.5))"


def test_optuna_judges_by_a_metric_that_evaluate_has():
    configured = read_sweep(["sweep=optuna", BETA, "adapter=full,lora"])
    stage, policy, metric = configured.sweep.objectives["best"].metric.split("/")
    names = [planned.name for planned in configured.plan.stages]
    assert stage in names and policy in names and metric in POLICY_METRICS
    assert list(configured.params) == ["stages.dpo.method.beta", "adapter"]


def test_asha_prunes_by_a_stage_of_the_pipeline():
    assert read_sweep(["sweep=asha", BETA]).sweep.pruning.stage == "dpo"
    with pytest.raises(ConfigError, match=r"sweep\.pruning\.stage=dpp.*did you mean dpo"):
        read_sweep(["sweep=asha", "sweep.pruning.stage=dpp", BETA])


@pytest.mark.parametrize("stage", ["dpo", "sft"])
def test_the_learning_rate_experiment_is_of_the_stage_that_is_named(stage):
    configured = read_sweep(["sweep=lr-range", f"sweep.until={stage}"])
    plans = [planned.plan for planned in configured.known]
    methods = [plan.stage(stage).stage.method for plan in plans]
    assert [method.num_steps for method in methods] == [20] * 5
    assert f"stages.{stage}.method.num_epochs=null" in configured.overrides  # a pipeline's own would be a second
    assert len({method.learning_rate for method in methods}) == 5
    assert all(plan.stages[-1].name == stage for plan in plans)


def test_the_command_line_has_the_last_word_on_rates_and_steps():
    configured = read_sweep(
        ["sweep=lr-range", "stages.dpo.method.learning_rate=1e-6,1e-5", "stages.dpo.method.num_steps=9"]
    )
    methods = [planned.plan.stage("dpo").stage.method for planned in configured.known]
    assert [(method.learning_rate, method.num_steps) for method in methods] == [(1e-6, 9), (1e-5, 9)]
