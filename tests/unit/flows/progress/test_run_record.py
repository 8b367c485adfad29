"""The note of a run: what it is at, for what it waits, how it ends, and whether it lives."""

import contextlib
import json
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from flows.declare.config import load_pipeline
from flows.planning.plan import make_plan
from flows.progress import recorder, run_record
from flows.progress.recorder import RunRecorder
from flows.progress.run_record import (
    Links,
    OpenFlow,
    RunRecord,
    StageRecord,
    SweepRecord,
    is_to_begin,
    latest,
    left_open,
    new_id,
    read_run_record,
    run_ids,
    run_record_path,
    runs_of,
    silent_drivers,
    waits_for,
)
from lineage.errors import ArtifactError, PipelineError, StoppedError
from lineage.filesystem.owner import Owner
from lineage.gc import guard
from lineage.record.tracker import Tracker
from tests.command import CONF, wait_until
from tests.finished import event, finish
from tests.written_store import WrittenStore, node

REFUSAL = "gate refuses left"


class Recorded(Tracker):
    """A tracker whose record is opened a moment later."""

    run_id: str | None = None
    is_complete = True

    def execution_id(self):
        return self.run_id


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "rows.txt").write_text("rows")
    overrides = ["pipeline=toy", "model=none", f"sources.rows.path={tmp_path}/rows.txt", f"store={tmp_path}/store"]
    workers = ["stages.right.resources.num_workers=2", "resources.micro_batch_size=4"]
    return make_plan(load_pipeline([*overrides, *workers], CONF))


@contextlib.contextmanager
def recording(plan, tracker=None, stages=None, sweep=None):
    """The record of a run of a plan."""
    recorder = RunRecorder(plan.home, plan.pipeline.name, ["pipeline=toy"])
    running = recorder.running(plan, tracker or Recorded(), plan.stale if stages is None else stages, sweep)
    with recorder.open(), running:
        yield recorder


def the_note(store):
    (run_id,) = run_ids(store)
    note = read_run_record(run_record_path(store, run_id))
    assert note
    return note


def test_a_run_shows_its_stages_before_they_begin_and_writes_every_change(plan):
    store = plan.pipeline.store
    with recording(plan) as journal:
        note = the_note(store)
        assert (note.pipeline, note.cli_args, note.outcome) == ("toy", ["pipeline=toy"], None)
        assert note.driver.pid == os.getpid()
        assert {title: stage.after for title, stage in note.stages.items()} == {
            "data": [], "model": ["data"], "left": ["data", "model"], "right": ["data", "model"],
        }  # fmt: skip
        assert (note.stages["right"].workers, note.stages["right"].cpus, note.stages["left"].cpus) == (2, 2, 1)
        journal.on(event("waiting", "1 CPU", title="left"))
        wait_until(lambda: the_note(store).stages["left"].state == "waiting", "waits")
        directory = plan.entry(plan.stage("left")).path
        journal.on(event("running", title="left", directory=directory, num_steps=10))
        wait_until(lambda: the_note(store).stages["left"].state == "running", "runs")
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
    assert note.message == "may this model be promoted?"
    assert (note.outcome, note.cause) == ("failed", "right failed; see posttrain logs right")
    assert note.ended


def test_a_run_is_done_though_a_trial_was_pruned_and_refused_by_a_gate_unless_it_is_a_sweep(plan, monkeypatch):
    store = plan.pipeline.store
    with recording(plan) as journal:
        journal.on(event("done", title="left", seconds=1.5))
        journal.on(event("pruned", "step 3: others do better", title="right#2"))
    assert (the_note(store).outcome, the_note(store).stages["right#2"].state) == ("done", "pruned")
    monkeypatch.setattr(recorder, "refusals", lambda made: [REFUSAL])
    for sweep, outcome, cause in (
        (None, "refused", "gate refuses left"),
        (SweepRecord(folder=str(store / "sweeps" / "s"), own=["left", "right"], trials=3), "done", ""),
    ):
        shutil.rmtree(store / "runs")
        with recording(plan, sweep=sweep):
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
def test_the_end_is_what_leaves_the_context(plan, error, outcome, cause):
    with pytest.raises(type(error)), recording(plan):
        raise error
    assert (the_note(plan.pipeline.store).outcome, the_note(plan.pipeline.store).cause) == (outcome, cause)


def test_the_run_of_mlflow_is_named_as_soon_as_there_is_one(plan):
    tracker = Recorded()
    with recording(plan, tracker):
        assert the_note(plan.pipeline.store).links.mlflow_run is None
        tracker.run_id = "abc"
    links = the_note(plan.pipeline.store).links
    assert links.mlflow_run == "abc" and links.mlflow.startswith("sqlite:///")


def test_a_store_that_cannot_be_written_stops_no_run_and_ends_no_wait(plan):
    store = plan.pipeline.store
    store.mkdir()
    (store / "runs").write_text("in the way")
    with recording(plan) as journal:
        journal.on(event("running", title="left", directory=store))
    waiting = RunRecorder(store, "toy", [])
    with waiting.open():
        waiting.change(lambda record: replace(record, waits_for="another run"))
    assert (store / "runs").read_text() == "in the way"


def test_a_stage_comes_after_all_data_though_it_reads_none(plan):
    extra = replace(plan.stage("data"), name="extra")
    pipeline = replace(plan.pipeline, stages={"extra": extra.stage, **plan.pipeline.stages})
    wide = replace(plan, pipeline=pipeline, stages=[extra, *plan.stages])
    with recording(wide):
        assert the_note(plan.pipeline.store).stages["model"].after == ["extra", "data"]


def test_what_is_reused_is_waited_for_by_nothing(plan):
    with recording(plan, stages=[plan.stage("model")]):
        assert the_note(plan.pipeline.store).stages["model"].after == []


def test_what_is_deleted_before_a_run_has_noted_it_ends_the_run_at_its_begin(plan):
    finish(plan, "data")
    again = make_plan(plan.pipeline)
    shutil.rmtree(again.entry(again.stage("data")).path)
    with pytest.raises(ArtifactError, match="run again"), recording(again):
        pytest.fail("it began")
    assert the_note(plan.pipeline.store).outcome == "failed" and "run again" in the_note(plan.pipeline.store).cause


def test_what_a_further_plan_reads_is_noted_too(plan):
    """As that of a trial, which may read what another pipeline has made."""
    store = plan.pipeline.store
    named = WrittenStore(store)
    rows = named.stage("corpus", {"rows": named.source("rows")})
    path = f"sources.rows.path={store}/corpus/{rows.fingerprint[:16]}/output/content.txt"
    trial = make_plan(load_pipeline(["pipeline=toy", "model=none", path, f"store={store}"], CONF))
    with recording(plan) as journal:
        before = the_note(store).reads
        journal.claim([trial])
        assert set(the_note(store).reads) - set(before) >= {node(rows)}
        shutil.rmtree(store / "corpus")
        with pytest.raises(ArtifactError, match="run again"):
            journal.claim([trial])


def test_a_run_that_begins_waits_until_gc_has_deleted_what_it_is_at(plan):
    begun, store = [], plan.pipeline.store

    def begin():
        with recording(plan):
            begun.append(run_ids(store))

    run = threading.Thread(target=begin)
    with guard(store):
        run.start()
        run.join(0.3)
        assert (begun, run_ids(store)) == ([], [])
    run.join(120)
    assert len(begun[0]) == 1


# Which runs live.


def note_of(driver, run_id=None, **fields):
    known = {"pipeline": "toy", "cli_args": [], "driver": driver, "started": 0.0, "stages": {}}
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


def test_the_run_of_a_stage_is_found_behind_any_number_of_later_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(run_record, "_CHECKED", 2)
    notes = [note_of(ELSEWHERE, f"2026010{day}-000000-0000", outcome="done") for day in range(1, 7)]
    directory = tmp_path / "sft" / "0123456789abcdef"
    stage = StageRecord(state="done", since=0.0, directory=str(directory))
    notes[0] = replace(notes[0], stages={"sft": stage})
    for note in notes:
        note.write(tmp_path)
        os.utime(run_record_path(tmp_path, note.id), (0, 0))
    [(found, of_stage)] = runs_of(tmp_path, directory)
    assert (found.id, of_stage.directory) == (notes[0].id, str(directory))


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


def test_a_run_of_a_deployment_has_one_record_from_its_wait_to_the_end_that_prefect_knows(plan):
    store, flow = plan.pipeline.store, OpenFlow(flow_run="f", api=None)
    recorder = RunRecorder(store, "toy", ["pipeline=toy"])
    with recorder.open():
        recorder.change(lambda record: replace(record, open_flow=flow))
        assert (the_note(store).open_flow, the_note(store).driver.pid) == (flow, os.getpid())
        for waiting in ("another run of toy: daily", "another run of toy: nightly", ""):
            recorder.change(lambda record, waiting=waiting: replace(record, waits_for=waiting))
            assert the_note(store).waits_for == waiting and the_note(store).is_live(store)
        with recorder.running(plan, Recorded(), plan.stale):
            assert list(the_note(store).stages) == ["data", "model", "left", "right"]
    recorder.change(lambda record: replace(record, open_flow=replace(flow, end="COMPLETED")))
    assert (the_note(store).outcome, the_note(store).open_flow.end) == ("done", "COMPLETED")
    the_note(store).reported(store, to_prefect=True)
    assert the_note(store).open_flow is None


def test_a_run_of_a_deployment_that_has_nothing_to_do_leaves_no_record(tmp_path):
    recorder = RunRecorder(tmp_path, "toy", [])
    with recorder.open():
        recorder.change(lambda record: replace(record, open_flow=OpenFlow(flow_run="f", api=None)))
    the_note(tmp_path).reported(tmp_path, to_mlflow=True)
    the_note(tmp_path).reported(tmp_path, to_prefect=True)
    assert run_ids(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "outcome", "cause"), [(KeyboardInterrupt(), "stopped", ""), (OSError("disk full"), "failed", "disk full")]
)
def test_what_cuts_a_wait_off_is_its_end(tmp_path, error, outcome, cause):
    waiting = RunRecorder(tmp_path, "toy", [])
    waiting.change(lambda record: replace(record, waits_for="another run"))
    with pytest.raises(type(error)), waiting.open():
        raise error
    the_note(tmp_path).reported(tmp_path, to_prefect=True)
    note = the_note(tmp_path)
    assert (note.outcome, note.cause, note.waits_for) == (outcome, cause, "another run")
    assert note.ended


# What MLflow and Prefect have yet to know.


def test_a_run_is_open_in_mlflow_until_all_of_it_is_there(plan):
    store, tracker = plan.pipeline.store, Recorded()
    for is_complete in (True, False):
        tracker.is_complete = False
        with recording(plan, tracker) as journal:
            assert the_note(store).open_mlflow
            tracker.is_complete = is_complete
        assert the_note(store).open_mlflow is not is_complete
        assert left_open(store) == []  # its process lives, and has it written
        dead = replace(the_note(store), driver=replace(HERE, started=0.0))
        dead.write(store)
        assert left_open(store) == ([] if is_complete else [dead])
        run_record_path(store, journal.record.id).unlink()


def test_what_is_reported_is_no_heartbeat(tmp_path):
    note = note_of(ELSEWHERE, open_mlflow=True, open_flow=OpenFlow(flow_run="f", api=None), waits_for="another run")
    note.write(tmp_path)
    assert left_open(tmp_path) == []
    os.utime(run_record_path(tmp_path, note.id), (0, 0))
    assert left_open(tmp_path) == [note]
    note.reported(tmp_path, to_mlflow=True)
    note.reported(tmp_path, to_prefect=True)  # another command
    assert (the_note(tmp_path).open_mlflow, the_note(tmp_path).open_flow) == (False, None)
    assert note.is_dead(tmp_path) and left_open(tmp_path) == []


def test_what_prefect_has_yet_to_know_is_found_behind_many_later_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(run_record, "_CHECKED", 2)
    dead = replace(HERE, started=0.0)
    note = note_of(dead, "20260101-000000-0000", open_flow=OpenFlow(flow_run="f", api=None))
    for each in [note, *(note_of(dead, f"2026010{day}-000000-0000", outcome="done") for day in range(2, 7))]:
        each.write(tmp_path)
        os.utime(run_record_path(tmp_path, each.id), (0, 0))
    assert left_open(tmp_path) == [note]


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


def test_a_record_of_an_earlier_version_is_read_with_its_names_of_today(tmp_path):
    note = note_of(HERE, cli_args=["pipeline=toy"], message="waits")
    note.write(tmp_path)
    path = run_record_path(tmp_path, note.id)
    path.write_text(path.read_text().replace('"cli_args"', '"words"').replace('"message"', '"said"'))
    assert read_run_record(path) == note
