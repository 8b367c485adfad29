"""For what a stage of a run waits, told as it is now."""

from dataclasses import replace

import pytest

from flows.progress.run_record import Links, RunRecord, StageRecord, SweepRecord, is_to_begin, waits_for
from lineage.owner import Owner

SWEEP = SweepRecord(folder="s", own=["left"], trials=3)


def stage(state="pending", **fields):
    return StageRecord(state=state, since=0.0, directory="", **fields)


def note(**fields):
    stages = fields.pop("stages", {}) | {"left": stage(after=["data", "model"])}
    return RunRecord(
        id="r", pipeline="toy", words=[], driver=Owner.here(), started=0.0, stages=stages, links=Links(flow_run="f"),
        **fields,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("data", "model", "expected"),
    [
        ("pending", "pending", "data, model"), ("running", "pending", "data, model"), ("done", "pending", "model"),
        ("reused", "running", "model"), ("done", "failed", "model"), ("done", "reused", "its turn"),
    ],
)  # fmt: skip
def test_what_is_made_is_waited_for_no_more(data, model, expected):
    assert waits_for("left", note(stages={"data": stage(data), "model": stage(model)})) == expected


def test_what_only_waits_to_be_begun_says_by_whom():
    run = note(stages={"data": stage()})
    assert waits_for("data", run) == "its turn"
    assert waits_for("data", replace(run, links=Links())) == "Prefect"
    assert waits_for("data", replace(run, links=Links(), in_flow=False)) == "its turn"
    assert waits_for("data", replace(run, sweep=SWEEP)) == "a slot"
    assert waits_for("data", note(stages={"data": stage("waiting", reason="1 CPU")})) == "1 CPU"


@pytest.mark.parametrize("state", ["running", "done", "reused", "failed", "pruned"])
def test_what_has_begun_waits_for_nothing(state):
    run = note(stages={"data": stage(state, reason="x")})
    assert (waits_for("data", run), is_to_begin("data", run)) == ("", False)


def test_a_shared_stage_waits_for_data_that_each_trial_makes():
    run = note(stages={"model": stage(after=["data"])}, sweep=replace(SWEEP, own=["data", "left"]))
    assert waits_for("model", run) == "data"
    made = replace(run, stages={**run.stages, "data#0": stage("done")})
    assert waits_for("model", made) == "a slot"


@pytest.mark.parametrize(
    ("title", "expected"),
    [("left", True), ("left#0", True), ("left#2", True), ("left#3", False), ("left#x", False), ("right#1", False),
     ("model", False)],
)  # fmt: skip
def test_the_stages_of_trials_to_come_are_known(title, expected):
    run = note(stages={"model": stage("waiting", reason="1 CPU")}, sweep=SWEEP)
    assert is_to_begin(title, run) is expected
    assert waits_for("left#2", run) == ""


def test_of_a_sampler_that_goes_on_any_trial_may_come():
    assert is_to_begin("left#99", note(sweep=replace(SWEEP, trials=None)))
    assert not is_to_begin("left#99", note())
