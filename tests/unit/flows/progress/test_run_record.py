"""The note of a run: what it is at, for what it waits, how it ends, and whether it lives."""

import json
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from flows.declare.config import load_pipeline
from flows.planning.plan import make_plan
from flows.progress import recorder, run_record
from flows.progress.recorder import RunRecorder, WaitingNote
from flows.progress.run_record import (
    Links,
    RunRecord,
    StageRecord,
    SweepRecord,
    is_to_begin,
    latest,
    new_id,
    read_run_record,
    run_ids,
    run_record_path,
    silent_drivers,
    waits_for,
)
from lineage.errors import ArtifactError, PipelineError, StoppedError
from lineage.gc import guard
from lineage.owner import Owner
from lineage.tracker import Tracker
from tests.command import CONF, wait_until
from tests.finished import event, finish
from tests.written_store import WrittenStore, node

REFUSAL = SimpleNamespace(refusal=lambda: "gate refuses left")


class Recorded(Tracker):
    """A tracker whose record is opened a moment later."""

    run_id: str | None = None

    def execution_id(self):
        return self.run_id


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "rows.txt").write_text("rows")
    words = ["pipeline=toy", "model=none", f"sources.rows.path={tmp_path}/rows.txt", f"store={tmp_path}/store"]
    workers = ["stages.right.resources.num_workers=2", "resources.micro_batch_size=4"]
    return make_plan(load_pipeline([*words, *workers], CONF))


@pytest.fixture
def journal(plan):
    return RunRecorder(plan, ["pipeline=toy"], Recorded(), plan.stale)


def the_note(store):
    (run_id,) = run_ids(store)
    note = read_run_record(run_record_path(store, run_id))
    assert note
    return note


def test_a_run_shows_its_stages_before_they_begin_and_writes_every_change(plan, journal):
    store = plan.pipeline.store
    with journal.open():
        note = the_note(store)
        assert (note.pipeline, note.words, note.outcome) == ("toy", ["pipeline=toy"], None)
        assert note.driver.pid == os.getpid()
        assert {title: stage.after for title, stage in note.stages.items()} == {
            "data": [], "model": ["data"], "left": ["data", "model"], "right": ["data", "model"],
        }  # fmt: skip
        assert (note.stages["right"].workers, note.stages["right"].cpus, note.stages["left"].cpus) == (2, 2, 1)
        journal.on(event("waiting", "1 CPU", title="left"))
        wait_until(lambda: the_note(store).stages["left"].state == "waiting", "waits", seconds=5)
        directory = plan.entry(plan.stage("left")).path
        journal.on(event("running", title="left", directory=directory, num_steps=10))
        wait_until(lambda: the_note(store).stages["left"].state == "running", "runs", seconds=5)
        assert the_note(store).stages["left"].total == 10
        assert Path(the_note(store).stages["left"].directory) == directory
        journal.on(event("done", title="left", seconds=1.5))
        journal.on(event("reused", title="data"))
        journal.on(event("failed", "no memory", title="right"))
        journal.on(event("message", "\nmay this model be promoted?\n"))
        journal.on(event("stopped", title="left"))
    note = the_note(store)
    assert {title: stage.state for title, stage in note.stages.items()} == {
        "data": "reused", "model": "pending", "left": "done", "right": "failed",
    }  # fmt: skip
    assert (note.stages["left"].seconds, note.stages["right"].reason) == (1.5, "no memory")
    assert note.said == "may this model be promoted?"
    assert (note.outcome, note.cause) == ("failed", "right failed; see posttrain logs right")
    assert note.ended


def test_a_run_is_done_though_a_trial_was_pruned_and_refused_by_a_gate_unless_it_is_a_sweep(plan, journal, monkeypatch):
    store = plan.pipeline.store
    with journal.open():
        journal.on(event("done", title="left", seconds=1.5))
        journal.on(event("pruned", "step 3: others do better", title="right#2"))
    assert (the_note(store).outcome, the_note(store).stages["right#2"].state) == ("done", "pruned")
    monkeypatch.setattr(recorder, "judgements", lambda made: [REFUSAL])
    for sweep, outcome, cause in (
        (None, "refused", "gate refuses left"),
        (SweepRecord(folder=str(store / "sweeps" / "s"), own=["left", "right"], trials=3), "done", ""),
    ):
        shutil.rmtree(store / "runs")
        with RunRecorder(plan, [], Recorded(), plan.stale, sweep).open():
            shown = set(the_note(store).stages)
        assert shown == ({"data", "model"} if sweep else {"data", "model", "left", "right"})
        assert (the_note(store).outcome, the_note(store).cause, the_note(store).sweep) == (outcome, cause, sweep)


@pytest.mark.parametrize(
    ("error", "outcome", "cause"),
    [
        (KeyboardInterrupt(), "stopped", ""),
        (StoppedError("the run was stopped"), "stopped", ""),
        (PipelineError("stage left failed"), "failed", "stage left failed"),
        (ValueError(), "failed", "ValueError"),
    ],
)
def test_the_end_is_what_leaves_the_context(plan, journal, error, outcome, cause):
    with pytest.raises(type(error)), journal.open():
        raise error
    assert (the_note(plan.pipeline.store).outcome, the_note(plan.pipeline.store).cause) == (outcome, cause)


def test_the_run_of_mlflow_is_named_as_soon_as_there_is_one(plan):
    tracker = Recorded()
    with RunRecorder(plan, [], tracker, plan.stale).open():
        assert the_note(plan.pipeline.store).links.mlflow_run is None
        tracker.run_id = "abc"
    links = the_note(plan.pipeline.store).links
    assert links.mlflow_run == "abc" and links.mlflow.startswith("sqlite:///")


def test_a_store_that_cannot_be_written_stops_no_run_and_ends_no_wait(plan, journal):
    store = plan.pipeline.store
    store.mkdir()
    (store / "runs").write_text("in the way")
    with journal.open():
        journal.on(event("running", title="left", directory=store))
    waiting = WaitingNote(store, "toy", [])
    with waiting.open():
        waiting.waits_for("another run")
    assert (store / "runs").read_text() == "in the way"


def test_a_stage_comes_after_all_data_though_it_reads_none(plan):
    extra = replace(plan.stage("data"), name="extra")
    pipeline = replace(plan.pipeline, stages={"extra": extra.stage, **plan.pipeline.stages})
    wide = replace(plan, pipeline=pipeline, stages=[extra, *plan.stages])
    with RunRecorder(wide, [], Recorded(), wide.stale).open():
        assert the_note(plan.pipeline.store).stages["model"].after == ["extra", "data"]


def test_what_is_reused_is_waited_for_by_nothing(plan):
    with RunRecorder(plan, [], Recorded(), [plan.stage("model")]).open():
        assert the_note(plan.pipeline.store).stages["model"].after == []


def test_what_is_deleted_before_a_run_has_noted_it_ends_the_run_at_its_begin(plan):
    finish(plan, "data")
    again = make_plan(plan.pipeline)
    shutil.rmtree(again.entry(again.stage("data")).path)
    with pytest.raises(ArtifactError, match="run again"), RunRecorder(again, [], Recorded(), again.stale).open():
        pytest.fail("it began")
    assert the_note(plan.pipeline.store).outcome == "failed" and "run again" in the_note(plan.pipeline.store).cause


def test_what_a_further_plan_reads_is_noted_too(plan, journal):
    """As that of a trial, which may read what another pipeline has made."""
    store = plan.pipeline.store
    named = WrittenStore(store)
    rows = named.stage("corpus", {"rows": named.source("rows")})
    path = f"sources.rows.path={store}/corpus/{rows.fingerprint[:16]}/output/content.txt"
    trial = make_plan(load_pipeline(["pipeline=toy", "model=none", path, f"store={store}"], CONF))
    with journal.open():
        before = the_note(store).reads
        journal.claim([trial])
        assert set(the_note(store).reads) - set(before) >= {node(rows)}
        shutil.rmtree(store / "corpus")
        with pytest.raises(ArtifactError, match="run again"):
            journal.claim([trial])


def test_a_run_that_begins_waits_until_gc_has_deleted_what_it_is_at(plan, journal):
    begun, store = [], plan.pipeline.store

    def begin():
        with journal.open():
            begun.append(run_ids(store))

    run = threading.Thread(target=begin)
    with guard(store):
        run.start()
        run.join(0.3)
        assert (begun, run_ids(store)) == ([], [])
    run.join()
    assert len(begun[0]) == 1


# Which runs live.


def note_of(driver, run_id=None, **fields):
    known = {"pipeline": "toy", "words": [], "driver": driver, "started": 0.0, "stages": {}}
    return RunRecord(id=run_id or new_id(), **{**known, **fields})


HERE = Owner.here()
ELSEWHERE = replace(HERE, host="elsewhere")


def test_a_run_of_another_host_dies_by_silence_and_one_of_this_host_with_its_process(tmp_path):
    note, alive, other = note_of(ELSEWHERE), note_of(HERE), note_of(replace(HERE, started=HERE.started - 100))
    for each in (note, alive, other):
        each.write(tmp_path)
    assert [each.is_live(tmp_path) for each in (note, alive, other)] == [True, True, False]
    os.utime(
        run_record_path(tmp_path, note.id), (0, time.time() - run_record.EXPIRY_SECONDS - run_record.SKEW_SECONDS - 1)
    )
    assert note.is_dead(tmp_path)
    assert not replace(note, outcome="done").is_live(tmp_path)
    for name, content in {"20990101-000000-aaaa": '{"id": ', "20990101-000000-bbbb": json.dumps({"id": 1})}.items():
        (tmp_path / "runs" / f"{name}.json").write_text(content)  # broken ones hide no other
    assert len(list(latest(tmp_path))) == 3


def test_a_long_run_is_found_behind_many_short_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(run_record, "_CHECKED", 2)
    notes = [note_of(ELSEWHERE, f"2026010{day}-000000-0000", outcome="done") for day in range(1, 7)]
    for index, note in enumerate(notes):
        note.write(tmp_path)
        if index != 1:
            os.utime(run_record_path(tmp_path, note.id), (0, 0))
    assert list(latest(tmp_path)) == [notes[5], notes[4], notes[1]]


def test_a_driver_of_another_machine_is_gone_when_none_of_its_runs_is_heard(tmp_path):
    drivers = ELSEWHERE, replace(ELSEWHERE, token="new"), replace(HERE, started=0.0)  # of which the kernel knows
    old, new, here = (note_of(driver, f"2026010{day}-000000-aaaa") for day, driver in enumerate(drivers))
    for each in (old, new, here):
        each.write(tmp_path)
    for each in (old, here):
        os.utime(run_record_path(tmp_path, each.id), (0, 0))
    assert silent_drivers(tmp_path) == []  # a process that has run more than one
    os.utime(run_record_path(tmp_path, new.id), (0, 0))
    assert silent_drivers(tmp_path) == [new.driver, old.driver]


# For what a run or a stage waits.


def test_a_run_that_waits_is_noted_until_its_turn_comes(tmp_path):
    waiting = WaitingNote(tmp_path, "toy", ["pipeline=toy"])
    with waiting.open():
        assert run_ids(tmp_path) == []  # it has not had to wait
        waiting.waits_for("another run of toy: daily")
        note = the_note(tmp_path)
        assert (note.pipeline, note.words, note.driver.pid) == ("toy", ["pipeline=toy"], os.getpid())
        assert note.waits_for == "another run of toy: daily" and note.is_live(tmp_path)
        waiting.waits_for("another run of toy: nightly")
        assert the_note(tmp_path).waits_for == "another run of toy: nightly"
    assert run_ids(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "outcome", "cause"), [(KeyboardInterrupt(), "stopped", ""), (OSError("disk full"), "failed", "disk full")]
)
def test_what_cuts_a_wait_off_is_its_end(tmp_path, error, outcome, cause):
    def wait():
        waiting = WaitingNote(tmp_path, "toy", [])
        with waiting.open():
            waiting.waits_for("another run")
            raise error

    with pytest.raises(type(error)):
        wait()
    note = the_note(tmp_path)
    assert (note.outcome, note.cause, note.waits_for) == (outcome, cause, "another run")
    assert note.ended


SWEEP = SweepRecord(folder="s", own=["left"], trials=3)


def stage(state="pending", **fields):
    return StageRecord(state=state, since=0.0, directory="", **fields)


def run_with(stages=(), **fields):
    stages = {**dict(stages), "left": stage(after=["data", "model"])}
    return replace(note_of(HERE, stages=stages, links=Links(flow_run="f")), **fields)


@pytest.mark.parametrize(
    ("data", "model", "expected"),
    [
        ("pending", "pending", "data, model"), ("running", "pending", "data, model"), ("done", "pending", "model"),
        ("reused", "running", "model"), ("done", "failed", "model"), ("done", "reused", "its turn"),
    ],
)  # fmt: skip
def test_what_is_made_is_waited_for_no_more(data, model, expected):
    assert waits_for("left", run_with({"data": stage(data), "model": stage(model)})) == expected


def test_what_only_waits_to_be_begun_says_by_whom_and_what_has_begun_waits_for_nothing():
    run = run_with({"data": stage()})
    assert waits_for("data", run) == "its turn"
    assert waits_for("data", replace(run, links=Links())) == "Prefect"
    assert waits_for("data", replace(run, links=Links(), in_flow=False)) == "its turn"
    assert waits_for("data", replace(run, sweep=SWEEP)) == "a slot"
    assert waits_for("data", run_with({"data": stage("waiting", reason="1 CPU")})) == "1 CPU"
    for state in ("running", "done", "reused", "failed", "pruned"):
        begun = run_with({"data": stage(state, reason="x")})
        assert (waits_for("data", begun), is_to_begin("data", begun)) == ("", False)
    shared = run_with({"model": stage(after=["data"])}, sweep=replace(SWEEP, own=["data", "left"]))
    assert waits_for("model", shared) == "data"
    assert waits_for("model", replace(shared, stages={**shared.stages, "data#0": stage("done")})) == "a slot"


def test_the_stages_of_trials_to_come_are_known():
    run = run_with({"model": stage("waiting", reason="1 CPU")}, sweep=SWEEP)
    titles = ("left", "left#0", "left#2", "left#3", "left#x", "right#1", "model")
    assert [title for title in titles if is_to_begin(title, run)] == ["left", "left#0", "left#2"]
    assert waits_for("left#2", run) == ""
    assert is_to_begin("left#99", replace(run, sweep=replace(SWEEP, trials=None)))
