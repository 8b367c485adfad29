"""How much of a sweep runs at once."""

import subprocess

import pytest

from flows.sweep.planner import Planner
from flows.sweep.room import Room, make_room
from flows.sweep.trial import Trial
from lineage.errors import ConfigError
from tests.command import CONF


@pytest.fixture
def left(tmp_path):
    (tmp_path / "rows.txt").write_text("rows")

    def planned(*words):
        given = ["pipeline=toy", "model=none", f"sources.rows.path={tmp_path}/rows.txt", *words]
        return Planner(given, config_dir=CONF).plan(Trial(number=0, params={})).plan.stage("left")

    return planned


def test_a_stage_takes_its_cpus_and_gives_them_back(left):
    stage, room = left("stages.left.resources.cpus_per_worker=2"), Room((3, 0))
    assert [room.take(stage), room.take(stage)] == [True, False]
    room.give_back(stage)
    assert room.take(stage)


def test_who_asks_for_more_than_there_is_gets_all_of_it(left):
    stage, room = left("stages.left.resources.cpus_per_worker=8"), Room((2, 0))
    assert [room.take(stage), room.take(stage)] == [True, False]
    assert room.times(stage) == 1


@pytest.mark.parametrize(("cpus", "times"), [(1, 4), (2, 2), (3, 1)])
def test_counts_how_often_a_stage_fits(left, cpus, times):
    assert Room((4, 0)).times(left(f"stages.left.resources.cpus_per_worker={cpus}")) == times


def test_workers_on_a_cluster_take_its_cpus_and_not_ours(left, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    stage, here = left("stages.left.resources={num_workers: 4, micro_batch_size: 2, launcher: cluster}"), left()
    room = Room((1, 0), cluster=(8, 0))
    assert [room.take(stage), room.take(stage), room.take(here)] == [True, True, True]
    assert not room.take(stage)


def test_one_place_that_is_full_is_told_from_the_other(left, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    there, here = left("stages.left.resources.launcher=cluster"), left()
    room = Room((1, 0), cluster=(2, 0))
    assert (room.place(there), room.place(here)) == ("cluster", "here")
    assert room.take(here) and not room.take(here)
    assert room.take(there)


def test_a_cluster_is_asked_what_it_holds_unless_parallel_is_stated(left, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    stage = left("stages.left.resources.launcher=cluster", "stages.left.resources.cpus_per_worker=2")
    answer = subprocess.CompletedProcess([], 0, 'noise\n{"CPU": 6.0, "GPU": 0.0}\n', "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    assert make_room([stage], None).times(stage) == 3

    def refuse(*_, **__):
        raise subprocess.CalledProcessError(1, "ask")

    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(ConfigError, match=r"the cluster does not say .* sweep.parallel"):
        make_room([stage], None)
    room = make_room([stage], 2)
    assert all(room.take(stage) for _ in range(20))
