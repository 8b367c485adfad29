"""What a trial is judged by, and what is refused before any trial starts."""

import math
import sys
from types import SimpleNamespace

import pytest

import tasks.reward_functions.metric as metric_module
import tasks.reward_functions.scorer as scorer_module
from flows.declare.config import load_pipeline
from flows.declare.sweep import Objective, Pruning
from flows.planning.checks import check_metrics
from flows.planning.plan import make_plan
from flows.sweep.plan import check_metrics as check_sweep_metrics
from flows.sweep.plan import check_sweep, objective_values, read_sweep
from flows.sweep.tune import Tuner, Tuning, read_tuning
from lineage.errors import ArtifactError, ConfigError
from tests.finished import finish
from tests.sweeps import TPE, manifest, maximize, minimize, sweep

BEST = "every_steps: 5, metrics: [f1], pick: best"
SAMPLED = {"sampler": TPE, "num_trials": 2}


def loss_per_score(manifests) -> float:
    return manifests["left"].metrics["loss"] / manifests["left"].metrics["score"]


def _function(name: str) -> Objective:
    return Objective(function=f"own_judges.{name}", direction="minimize")


def test_values_are_metrics_and_what_functions_return(monkeypatch):
    monkeypatch.setitem(sys.modules, "own_judges", SimpleNamespace(ratio=loss_per_score))
    objectives = {"best": maximize("left/score"), "ratio": _function("ratio"), "slash": maximize("left/accuracy/dpo")}
    found = objective_values(
        sweep(objectives=objectives), {"left": manifest(score=2.0, loss=1.0, **{"accuracy/dpo": 0.75})}
    )
    assert found == {"best": 2.0, "ratio": 0.5, "slash": 0.75}


@pytest.mark.parametrize(
    ("objective", "why"),
    [
        (
            maximize("left/scores"),
            r"no metric left/scores; there are: left/loss, left/score; did you mean left/score\?",
        ),
        (maximize("right/score"), "there are: left/loss, left/score"),
        (maximize("left/loss"), "is nan, not finite"),
        (_function("gone"), "cannot be imported"),
    ],
)
def test_a_trial_without_its_objectives_is_refused(objective, why):
    with pytest.raises(ArtifactError, match=why):
        objective_values(sweep(objectives={"best": objective}), {"left": manifest(score=2.0, loss=math.nan)})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"objectives": {"best": maximize("lefd/score")}},
            r"no trial runs a stage lefd; they run: data, left; did you mean left\?",
        ),
        ({"objectives": {"best": maximize("score")}}, "write STAGE/METRIC"),
        ({"objectives": {"best": Objective(function="no.such", direction="minimize")}}, "cannot be imported"),
        ({"objectives": {"best": Objective(function="math.pi", direction="minimize")}}, "not a function"),
    ],
)
def test_an_objective_that_cannot_be_is_refused(changes, why):
    with pytest.raises(ConfigError, match=why):
        check_sweep(sweep(**changes), {}, ["data", "left"])


def test_pruning_by_a_stage_that_no_trial_runs_is_refused():
    pruning = Pruning(
        pruner={"_target_": "optuna.pruners.NopPruner"}, stage="right", metric="loss", direction="minimize"
    )
    configured = sweep(sampler=TPE, num_trials=2, objectives={"best": maximize()}, pruning=pruning)
    check_sweep(configured, {}, ["left", "right"])
    with pytest.raises(ConfigError, match=r"sweep\.pruning\.stage=right"):
        check_sweep(configured, {}, ["left"])


PRUNING = Pruning(pruner={}, stage="left", metric="loss", direction="minimize")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_trials": 3}, r"sweep\.num_trials: is set without sweep\.sampler"),
        ({"pruning": PRUNING}, r"sweep\.pruning: is set without sweep\.sampler"),
        ({"sampler": TPE, "objectives": {"best": maximize()}}, r"set sweep\.num_trials"),
        ({"sampler": TPE, "num_trials": 3}, r"set sweep\.objectives"),
        (
            {"sampler": TPE, "num_trials": 3, "pruning": PRUNING, "objectives": {"a": maximize(), "b": minimize()}},
            "Optuna prunes by one objective, there are 2: a, b",
        ),
        ({"by_step": "loss"}, r"sweep\.until; set it"),
        ({"name": "../../evil"}, r"sweep\.name=\.\./\.\./evil: names a directory"),
    ],
)
def test_settings_that_cannot_work_together_are_refused(changes, why):
    with pytest.raises(ConfigError, match=why):
        sweep(**changes)


@pytest.mark.parametrize("configured", [{}, {"metric": "left/score", "function": "math.sqrt"}])
def test_an_objective_is_either_a_metric_or_a_function(configured):
    with pytest.raises(ConfigError, match="set one of them"):
        Objective(direction="minimize", **configured)


@pytest.mark.parametrize(
    ("metric", "why"),
    [
        ("evaluate/dpo/preference_acuracy", r"does not measure it; .*did you mean dpo/preference_accuracy\?"),
        ("evaluate/dop/preference_accuracy", r"does not measure it; .*did you mean dpo/preference_accuracy\?"),
        ("evaluate/reward_model/acuracy", r"does not measure it; .*did you mean reward_model/accuracy\?"),
        ("evaluate/dpo/unpaired_accuracy", "evaluate does not measure it"),
        ("evaluate/dpo/preference_accuracy", None),
        ("evaluate/weights/dpo", None),
        ("evaluate/reward_model/accuracy/wrong_topic", None),
        ("corpus/train_row", r"corpus does not measure it; .*did you mean train_rows\?"),
        ("corpus/train_rows", None),
        ("base/parameter", r"base does not measure it; it measures parameters, vocab_size; did you mean parameters\?"),
        ("merge/merge/modles", r"merge does not measure it; .*did you mean merge/models\?"),
        ("merge/merge/golden", None),
        ("gate/rule_worse", r"gate does not measure it; .*did you mean rules_worse\?"),
        ("gate/good/lo", r"gate does not measure it; .*did you mean good/low\?"),
        ("gate/good/low", None),
        ("dpo/weights/reward_model", None),
        ("dpo/merge/logps_diference", r"did you mean merge/logps_difference\?"),
        ("dpo/rewards/margin", r"dpo does not measure it; .*did you mean rewards/margins\?"),
        ("dpo/rewards/margins", None),
        ("cpt/held_out_loss", r"cpt does not measure it; set validation.every_steps; it measures"),
        ("cpt/learning_rate", "cpt does not measure it"),
        ("cpt/best_step", "cpt does not measure it"),
        ("cpt/diloco/rounds", "cpt does not measure it"),
        ("sft/evaluation/f1", None),
        ("sft/evaluation/base/f1/stderr", None),
        ("sft/evaluation/answer_perplexity/sports", None),
        ("sft/evaluation/f2", r"sft does not measure it; .*did you mean evaluation/f1\?"),
        ("sft/evaluation/preference_accuracy", "sft does not measure it"),
        ("cpt/evaluation/f1", "cpt does not measure it; set evaluation.every_steps"),
    ],
)
def test_a_metric_that_a_stage_will_not_measure_is_refused_by_the_plan(metric, why):
    overrides = ["+stage@stages.merge.method=merge", "stages.merge.method.combination=linear"]
    overrides += ["stages.merge.inputs={policy: sft, other: dpo}", "+stage@stages.gate.method=gate"]
    overrides += ["stages.gate.inputs={report: evaluate, candidate: dpo}"]
    overrides += ["stages.gate.method.rules.good={metric: text_perplexity, at_most: 9}"]
    overrides += ["+stages.sft.evaluation={every_steps: 5, metrics: [f1]}", "stages.dpo.method.beta=0.1,0.2"]
    overrides += [f"sweep.objectives.best={{metric: {metric}, direction: maximize}}"]  # last: one composition
    if why is None:
        assert read_sweep(overrides).num_trials == 2
        return
    with pytest.raises(ConfigError, match=why):
        read_sweep(overrides)


KINDS = {  # a metric as it is set -> its name
    **{each: each for each in ("exact", "numeric", "f1", "rouge_l", "bleu", "json", "refusal", "tokens", "distinct")},
    "{function: pass_at_k, k: 2, samples: 4}": "pass@2", "{function: tool_call, column: answer}": "tool_call",
    "python:own_scores.tone": "tone",
    "{function: 'python:own_scores.py:tone', allow_code: true, name: kind, mode: min}": "kind",
    "{function: win_rate, judge: python:own_scores.judge, length_control: true}": "length_controlled_win_rate",
    "{function: win_rate, judge: reward_model}": "judged_win_rate", "'lm_eval:own_task.yaml'": "lm_eval/own_task/acc",
}  # fmt: skip


def test_every_kind_of_metric_validates_ends_picks_bounds_prunes_and_ranks_trials(tmp_path, monkeypatch):
    for module in (metric_module, scorer_module):
        monkeypatch.setattr(module, "find_spec", lambda name: True)  # lm-eval, rouge-score and sacrebleu
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_scores.py").write_text("def tone(completions): ...\ndef judge(completions, references): ...\n")
    (tmp_path / "own_task.yaml").write_text("task: own_task\n")
    names, metrics = [*KINDS.values(), "preference_accuracy", "unfinished_share"], ", ".join(KINDS)
    bounds = ", ".join(f"g{number}: {{metric: '{name}', at_least: 0}}" for number, name in enumerate(names))
    scored = [
        f"+stages.dpo.evaluation={{every_steps: 5, metrics: [{metrics}], patience: 2, pick: gate, gate: {{{bounds}}}}}",
        "+stages.dpo.inputs.reward_model=reward", f"stages.evaluate.method.metrics=[{metrics}]",
    ]  # fmt: skip
    plan = make_plan(load_pipeline(["tracking=none", *scored]))
    for name in names:
        pruning = Pruning(pruner={}, stage="dpo", metric=f"evaluation/{name}", direction="maximize")
        for best in (f"dpo/evaluation/{name}", f"evaluate/dpo/{name}"):
            check_sweep_metrics(sweep(**SAMPLED, objectives={"best": maximize(best)}, pruning=pruning), plan)
        check_sweep_metrics(sweep(until="dpo", by_step=f"evaluation/{name}"), plan)
    for unknown in ("evaluation/f2", "evaluation/base/f1"):  # the start has no steps
        with pytest.raises(ConfigError, match="dpo does not measure it; it measures"):
            check_sweep_metrics(sweep(until="dpo", by_step=unknown), plan)
    for name in ("kind", "f1", "lm_eval/own_task/acc"):
        again = [*scored, f"stages.dpo.method.evaluation.metric='{name}'"]
        for asked in (f"evaluation/{name}", f"evaluate/dpo/{name}"):
            tuned = read_tuning(Tuning(stage="dpo", metric=asked), again, None).sweep.objectives["best"]
            assert tuned.direction == ("minimize" if name == "kind" else "maximize")
    labelled = read_tuning(Tuning(stage="sft", metric="evaluate/sft/answer_perplexity/sports"), ["tracking=none"], None)
    assert labelled.sweep.objectives["best"].direction == "minimize"


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["+stages.cpt.evaluation={every_steps: 5, metrics: [f1]}"], "f1 scores answers, and cpt trains on text"),
        (
            ["+stages.sft.evaluation={every_steps: 5, metrics: [{function: win_rate, judge: reward_model}]}"],
            r"stages.sft.method.evaluation.metrics: a reward model judges .*; set stages.sft.inputs.reward_model=STAGE",
        ),
        (["+stages.dpo.inputs.reward_model=reward"], "stages.dpo.inputs.reward_model=reward: nothing reads it"),
    ],
)
def test_what_the_rows_of_a_training_cannot_be_scored_by_is_refused_by_the_plan(overrides, why):
    with pytest.raises(ConfigError, match=why):
        check_metrics(load_pipeline(["tracking=none", *overrides]))


def test_a_reward_model_that_judges_checkpoints_is_identity_where_it_chooses_one():
    judge = "+stages.dpo.inputs.reward_model=reward"
    scored = "+stages.dpo.evaluation={every_steps: 5, metrics: [{function: win_rate, judge: reward_model}]"
    given = ([], [judge, scored + "}"], [judge, scored + ", pick: best}"])
    given = (*given, [*given[-1], "stages.reward.method.seed=7"])
    found = [make_plan(load_pipeline(["tracking=none", *each])).stage("dpo").fingerprint for each in given]
    assert found[0] == found[1] and len({*found}) == 3


def test_a_finished_stage_that_has_not_measured_the_metric_is_refused_by_the_plan(tmp_path):
    store = [f"store={tmp_path}/store", "tracking=none"]
    finish(make_plan(load_pipeline(store)), "corpus", "base", "cpt", "instructions", "sft", metrics={"loss": 1.0})
    scored = [*store, "+stages.sft.evaluation={every_steps: 5, metrics: [f1]}"]
    best = "sweep.objectives.best={metric: sft/evaluation/f1, direction: maximize}"
    with pytest.raises(ConfigError, match=r"sft is finished and has not measured it; it measured loss.*, or delete /"):
        read_sweep([*scored, best, "stages.dpo.method.beta=0.1,0.2"])
    assert read_sweep([*scored, best, "stages.sft.method.seed=5,6"]).num_trials == 2
    asked = Tuning(stage="sft", metric="evaluation/f1")
    tuned = read_tuning(asked, scored, None)
    with pytest.raises(ConfigError, match="sft is finished and has not measured it"):
        Tuner(tuned, asked)


@pytest.mark.parametrize(
    "overrides",
    [["sweep.objectives={best: {metric: grpo/loss, direction: minimize}}"], ["sweep.until=grpo", "sweep.by_step=loss"]],
)
def test_a_loss_that_says_nothing_ranks_no_trials(overrides):
    with pytest.raises(ConfigError, match=r"the loss of GRPO is of its own .*; name reward, to be maximized"):
        read_sweep(["pipeline=sft-grpo", *overrides, "stages.grpo.method.learning_rate=1e-4,1e-3"])


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (
            ["sweep=asha", "sweep.pruning.stage=sft", "sweep.pruning.metric=los"],
            r"pruning.metric=los: sft .*mean loss\?",
        ),
        (["sweep.until=sft", "sweep.by_step=los"], r"sweep.by_step=los: sft does not measure it.*mean loss\?"),
        (["sweep.until=corpus", "sweep.by_step=rows"], r"by_step=rows: corpus reports nothing while it runs; name a"),
    ],
)
def test_a_metric_that_no_step_reports_is_refused_by_the_plan(overrides, why):
    with pytest.raises(ConfigError, match=why):
        read_sweep([*overrides, "stages.sft.method.learning_rate=1e-4,1e-3"])


@pytest.mark.parametrize(
    ("field", "why"),
    [
        (
            "dpo.method.best={metric: los, mode: min, every_steps: 5}",
            r"stages.dpo.method.best.metric=los: dpo .*did you mean loss\?",
        ),
        (
            "dpo.resources.keep_best={metric: rewards/margin, mode: max}",
            r"keep_best.metric=.*did you mean rewards/margins\?",
        ),
        ("dpo.resources.keep_best={metric: rewards/margins}", None),
        ("corpus.resources.keep_best={metric: loss}", r"keep_best.metric=loss: corpus trains nothing, so it has no"),
        (f"sft.evaluation={{{BEST}, metric: f2}}", r"sft.method.evaluation.metric=f2: no checkpoint is .*mean f1\?"),
        (f"dpo.evaluation={{{BEST}, metric: logp_accuracy}}", None),
        (
            "sft.evaluation={every_steps: 5, pick: gate, gate: {a: {metric: 'lm_eval/*', at_least: 1}}}",
            r"sft.method.evaluation.gate.a.metric=lm_eval/\*: no checkpoint is scored by it; it may be in",
        ),
    ],
)
def test_checkpoints_are_ranked_by_a_metric_that_their_training_reports(field, why):
    pipeline = load_pipeline(["tracking=none", f"stages.{field}"])
    if why is None:
        check_metrics(pipeline)
        return
    with pytest.raises(ConfigError, match=why):
        check_metrics(pipeline)
