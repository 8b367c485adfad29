"""Trials that Optuna proposes: how many, which, and what a kill leaves of them."""

import subprocess
import sys
from threading import Thread

import optuna
import pytest

from flows.declare.sweep import Pruning
from flows.sweep.plan import check_sweep
from flows.sweep.study import Study
from lineage.errors import ConfigError
from tests.command import PATIENCE, REPOSITORY
from tests.sweeps import RANDOM, TPE, complete, ended, maximize, minimize, space_of, sweep

SPACE = {
    "lr": "tag(log,interval(1e-6,1e-2))",
    "r": "int(interval(1,64))",
    "adapter": "full,lora",
    "beta": "range(0.1,0.5,0.1)",
}


def _study(folder, params=SPACE, **changes):
    configured = {"sampler": RANDOM, "num_trials": 6, "objectives": {"best": maximize()}, **changes}
    return Study(sweep(**configured), space_of(params), folder)


def _check(**changes):
    configured = {"sampler": RANDOM, "num_trials": 6, "objectives": {"best": maximize()}, **changes}
    check_sweep(sweep(**configured), space_of(SPACE), ["left"])


def _asked(study, count: int) -> list:
    trials = []
    for _ in range(count):
        trials.append(study.ask())
        study.tell(complete(trials[-1][0], best=1.0))
    return trials


def test_it_draws_each_field_from_its_values(tmp_path):
    study = _study(tmp_path)
    trials = _asked(study, 6)
    for _, trial in trials:
        assert list(trial) == list(SPACE)
        assert 1e-6 <= float(trial["lr"]) <= 1e-2
        assert 1 <= int(trial["r"]) <= 64
        assert trial["adapter"] in ("full", "lora")
        assert trial["beta"] in ("0.1", "0.2", "0.3", "0.4")
    assert study.ask() is None
    assert sum(float(trial["lr"]) < 1e-4 for _, trial in trials) >= 2  # logarithmic; on a linear scale: none


def test_a_continued_sweep_proposes_what_an_uninterrupted_one_does(tmp_path):
    whole, first, second = (tmp_path / name for name in ("whole", "halves", "halves"))
    whole.mkdir(), first.mkdir()
    once = [params for _, params in _asked(_study(whole, sampler=TPE, num_trials=4), 4)]
    halves = _asked(_study(first, sampler=TPE, num_trials=4), 2) + _asked(_study(second, sampler=TPE, num_trials=4), 2)
    assert [params for _, params in halves] == once
    assert len({tuple(params.values()) for params in once}) == 4
    assert _study(second, num_trials=4).ask() is None
    assert _study(second, num_trials=5).ask()[0] == 4  # the total, not more of them


def test_the_seed_changes_what_is_proposed(tmp_path):
    (tmp_path / "other").mkdir()
    assert _study(tmp_path).ask()[1] != _study(tmp_path / "other", sampler=RANDOM | {"seed": 1}).ask()[1]


@pytest.mark.parametrize("end", ["killed", "failed"])
def test_a_trial_that_did_not_end_well_comes_again_first_and_the_same(tmp_path, end):
    study = _study(tmp_path, num_trials=2)
    lost = study.ask()
    if end == "failed":
        study.tell(ended(lost[0], "failed"))
    _asked(study, 1)
    assert study.ask() is None  # not in the same run
    del study  # as the end of its process
    again = _study(tmp_path, num_trials=2)
    assert again.ask() == lost
    again.tell(complete(lost[0], best=1.0))
    assert _study(tmp_path, num_trials=2).ask() is None


def test_the_trials_of_a_living_process_are_its_own(tmp_path):
    ours, theirs = (_study(tmp_path, num_trials=2) for _ in range(2))
    assert [ours.ask()[0], theirs.ask()[0]] == [0, 1]
    assert _study(tmp_path, num_trials=2).ask() is None
    del ours
    assert _study(tmp_path, num_trials=2).ask()[0] == 0


def test_a_trial_that_ends_while_another_process_asks_is_not_run_again(tmp_path, monkeypatch):
    ours, theirs = (_study(tmp_path, num_trials=2) for _ in range(2))
    number, _ = ours.ask()
    end = Thread(target=ours.tell, args=[complete(number, best=1.0)])
    read = theirs._study.get_trials

    def read_before_the_end(**kwargs):
        trials = read(**kwargs)
        end.start()
        end.join(0.3)
        return trials

    monkeypatch.setattr(theirs._study, "get_trials", read_before_the_end)
    assert theirs.ask()[0] == 1
    end.join(120)


def test_a_folder_of_the_lease_era_still_resumes(tmp_path):
    """Its open trial names an owner whose lease was a directory, left by a kill."""
    study = _study(tmp_path)
    number, params = study.ask()
    stored = optuna.load_study(study_name="sweep", storage=f"sqlite:///{tmp_path / 'study.db'}")
    optuna.Trial(stored, stored.trials[number]._trial_id).set_user_attr("owner", "gpu-3-4711-0a1b2c3d")
    del study
    (tmp_path / "processes" / "gpu-3-4711-0a1b2c3d").mkdir(parents=True)
    (tmp_path / "processes" / "gpu-3-4711-0a1b2c3d" / "lock").write_text("{}")
    assert _study(tmp_path).ask() == (number, params)


def test_a_finite_space_is_exhausted_before_the_last_trial(tmp_path):
    study = _study(
        tmp_path, {"a": "1,2", "b": "x,y"}, num_trials=50, sampler={"_target_": "optuna.samplers.BruteForceSampler"}
    )
    assert {tuple(params.values()) for _, params in _asked(study, 4)} == {
        ("1", "x"),
        ("1", "y"),
        ("2", "x"),
        ("2", "y"),
    }
    assert study.ask() is None


@pytest.mark.parametrize(
    ("sampler", "why"),
    [
        ({"_target_": "optuna.samplers.TPESample"}, "cannot be imported"),
        ({"_target_": "optuna.pruners.MedianPruner"}, "is not an optuna BaseSampler"),
        ({"_target_": "optuna.samplers.BaseSampler"}, "is not an optuna BaseSampler"),
        (
            {"_target_": "optuna.samplers.TPESampler", "sed": 1},
            "does not take .*unexpected keyword argument 'sed'.*seed",
        ),
        ({"_target_": "optuna.samplers.GridSampler", "search_space": {"other": [1]}}, "cannot draw from this space"),
        ({}, "cannot be imported"),
    ],
)
def test_a_sampler_that_cannot_be_is_refused_before_anything_starts(sampler, why):
    with pytest.raises(ConfigError, match=why):
        _check(sampler=sampler)


@pytest.mark.parametrize(
    "node",
    [
        {"_target_": "timeit.Timer", "stmt": "1"},
        {"_target_": "antigravity.Sampler"},
        {"_target_": "builtins.dict"},
        {
            "_target_": "optuna.samplers.PartialFixedSampler", "fixed_params": {},
            "base_sampler": {"_target_": "timeit.Timer", "stmt": "1"},
        },
    ],
)  # fmt: skip
def test_only_optunas_own_kinds_are_built_at_any_depth(node, monkeypatch):
    monkeypatch.setattr("timeit.Timer.__init__", lambda *_, **__: pytest.fail("it was built"))
    nested = {"_target_": "optuna.samplers.PartialFixedSampler", "fixed_params": {}, "base_sampler": node}
    with pytest.raises(
        ConfigError, match="is not an optuna BaseSampler or BasePruner or BaseCrossover or BaseMutation"
    ):
        _check(sampler=nested)
    assert "antigravity" not in sys.modules
    pruner = {"_target_": "optuna.pruners.PatientPruner", "wrapped_pruner": node, "patience": 0}
    with pytest.raises(ConfigError, match="is not an optuna BaseSampler or BasePruner or"):
        _check(pruning=Pruning(pruner=pruner, stage="left", metric="loss", direction="minimize"))


def test_a_sampler_may_have_parts_of_optunas():
    crossover = {"_target_": "optuna.samplers.nsgaii.UniformCrossover"}
    _check(sampler={"_target_": "optuna.samplers.NSGAIISampler", "population_size": 4, "crossover": crossover})


def _pruned(folder, losses, *, objective=None, pruner=None, direction="minimize") -> list[int]:
    """Numbers of the trials that were pruned, of trials that report these losses at steps 1, 2, 3."""
    pruner = pruner or {"_target_": "optuna.pruners.MedianPruner", "n_startup_trials": 2, "n_warmup_steps": 1}
    study = _study(
        folder, num_trials=len(losses), objectives={"best": objective or minimize()},
        pruning=Pruning(pruner=pruner, stage="left", metric="loss", direction=direction),
    )  # fmt: skip
    pruned = []
    for each in losses:
        number, _ = study.ask()
        if any(study.report(number, step, {"loss": loss}) for step, loss in enumerate(each, start=1)):
            pruned.append(number)
            study.tell(ended(number, "pruned"))
        else:
            study.tell(complete(number, best=1.0))
    return pruned


LOSSES = [[3, 2, 1], [3, 2, 1], [3, 9, 9], [3, 1, 0.5]]


RISING = [[1, 2], [1, 2], [1, 0]]
THRESHOLD = {"_target_": "optuna.pruners.ThresholdPruner", "upper": 5.0}
BRACKETS = {"_target_": "optuna.pruners.HyperbandPruner", "min_resource": 1, "max_resource": 2, "reduction_factor": 2}


@pytest.mark.parametrize(
    ("losses", "changes", "pruned"),
    [
        (LOSSES, {}, [2]),  # worse than the median
        (LOSSES, {"objective": maximize()}, [2]),  # a loss that is to fall under an objective that is to rise
        (RISING, {"direction": "maximize"}, [2]),
        (RISING, {"direction": "minimize"}, []),
        (LOSSES, {"objective": maximize(), "pruner": THRESHOLD}, [2]),  # of the metric as it is
        (LOSSES, {"objective": minimize(), "pruner": THRESHOLD}, [2]),
        ([[1, 1], [5, 5], [6, 6], [7, 7]], {"pruner": BRACKETS}, [2, 3]),
    ],
)
def test_a_pruner_prunes_by_metric_and_direction(tmp_path, losses, changes, pruned):
    assert _pruned(tmp_path, losses, **changes) == pruned


@pytest.mark.parametrize(
    ("pruner", "why"),
    [
        ({"_target_": "optuna.pruners.MedianPruner", "n_warmup_step": 1}, "keyword argument 'n_warmup_step'"),
        ({"_target_": "optuna.pruners.MedianPruner", "n_warmup_steps": -1}, "does not take"),
        ({"_target_": "optuna.samplers.TPESampler"}, "is not an optuna BasePruner"),
    ],
)
def test_a_pruner_that_cannot_be_is_refused_before_anything_starts(pruner, why):
    with pytest.raises(ConfigError, match=why):
        _check(pruning=Pruning(pruner=pruner, stage="left", metric="loss", direction="minimize"))


def test_a_metric_that_is_never_reported_prunes_nothing_and_is_warned_of(tmp_path, caplog):
    pruner = {"_target_": "optuna.pruners.ThresholdPruner", "upper": 0.0}
    pruning = Pruning(pruner=pruner, stage="left", metric="los", direction="minimize")
    study = _study(tmp_path, pruning=pruning)
    for _ in range(2):
        number, _ = study.ask()
        assert not study.report(number, 1, {"loss": 1.0})
        study.tell(complete(number, best=1.0))
    (warning,) = caplog.messages
    assert "left reports no such metric" in warning and "did you mean loss?" in warning


# Runs its trials; of the one whose number is given, it dies by SIGKILL in the middle.
_SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from flows.sweep.files import SweepFiles
from flows.sweep.study import Study
from tests.sweeps import RANDOM, complete, maximize, space_of, sweep

settings = sweep(sampler=RANDOM, num_trials=6, objectives={"best": maximize()})
space, folder = space_of({"lr": "interval(0,1)"}), Path(sys.argv[1])
study = Study(settings, space, folder)
files = SweepFiles(folder, settings, [], None)
for number, params in iter(study.ask, None):
    print(number, params["lr"], flush=True)
    if str(number) == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)
    files.add(complete(number, params, best=1.0))
    study.tell(complete(number, params, best=1.0))
"""


def start(folder, dies_in="none"):
    return subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, folder, dies_in], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )


def lines(process) -> list[str]:
    out, _ = process.communicate(timeout=60 * PATIENCE)
    return out.splitlines()


@pytest.mark.slow
def test_what_a_killed_process_was_at_comes_again_and_the_rest_as_if_nothing_had_been(tmp_path):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    whole.mkdir(), halves.mkdir()
    both = start(whole), start(halves, dies_in="2")
    once, first = (lines(each) for each in both)
    assert both[1].returncode == -9
    second = lines(start(halves))
    assert first + second[1:] == once
    assert second[0] == first[-1]


@pytest.mark.slow
def test_two_processes_share_a_sweep_and_no_trial_is_run_twice(tmp_path):
    both = start(tmp_path), start(tmp_path)
    found = [line for each in both for line in lines(each)]
    assert sorted(int(line.split()[0]) for line in found) == list(range(6))
    assert all(each.returncode == 0 for each in both)
    assert len((tmp_path / "trials.csv").read_text().splitlines()) == 7
    assert not list(tmp_path.glob("*.tmp"))
