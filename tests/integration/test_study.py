"""A study of Optuna's under kills and under two processes, without a pipeline."""

import subprocess
import sys

import pytest

from tests.command import REPOSITORY

# Runs its trials; of the one whose number is given, it dies by SIGKILL in the middle.
_SCRIPT = """
import os, signal, sys, time
from functools import partial
from pathlib import Path
from flows.sweep.folder import SweepFiles
from flows.sweep.study import Study, best_and_plots
from tests.sweeps import RANDOM, complete, maximize, space_of, sweep

settings = sweep(sampler=RANDOM, num_trials=6, objectives={"best": maximize()})
space, folder = space_of({"lr": "interval(0,1)"}), Path(sys.argv[1])
study = Study(settings, space, folder)
files = SweepFiles(folder, settings, space, [], None, partial(best_and_plots, settings, space))
with study.owning():
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
    out, _ = process.communicate(timeout=60)
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
    assert not list(tmp_path.glob("*.tmp")) and not list((tmp_path / "processes").iterdir())
