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
from flows.planning import reads
from flows.planning.plan import make_plan
from flows.progress import observer, run_record
from flows.progress.observer import RunRecorder
from flows.progress.run_record import RunRecord, SweepRecord, latest, new_id, read_run_record, run_ids, run_record_path
from lineage.errors import ArtifactError, PipelineError, StoppedError
from lineage.gc import guard
from lineage.owner import Owner
from lineage.tracker import Tracker
from tests.command import CONF, wait_until
from tests.finished import finish
from tests.written_store import WrittenStore, node


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
def record(plan):
    return RunRecorder(plan, ["pipeline=toy"], Recorded(), plan.stale)


def the_note(plan) -> RunRecord:
    (run_id,) = run_ids(plan.pipeline.store)
    note = read_run_record(run_record_path(plan.pipeline.store, run_id))
    assert note
    return note


def test_a_run_shows_its_stages_before_they_begin(plan, record):
    with record.open():
        note = the_note(plan)
    assert (note.pipeline, note.words, note.outcome) == ("toy", ["pipeline=toy"], None)
    assert note.driver.pid == os.getpid()
    assert {title: stage.after for title, stage in note.stages.items()} == {
        "data": [], "model": ["data"], "left": ["data", "model"], "right": ["data", "model"],
    }  # fmt: skip
    assert (note.stages["right"].workers, note.stages["right"].cpus, note.stages["left"].cpus) == (2, 2, 1)


def test_every_change_is_written(plan, record):
    with record.open():
        record.waiting("left", "1 CPU")
        wait_until(lambda: the_note(plan).stages["left"].state == "waiting", "waits", seconds=5)
        metrics = plan.entry(plan.stage("left")).metrics
        record.running("left", metrics, 10)
        wait_until(lambda: the_note(plan).stages["left"].state == "running", "runs", seconds=5)
        assert the_note(plan).stages["left"].total == 10
        assert Path(the_note(plan).stages["left"].directory) == metrics.parent
        record.done("left", 1.5, {})
        record.reused("data")
        record.failed("right", "no memory")
        record.announce("\nmay this model be promoted?\n")
    note = the_note(plan)
    assert {title: stage.state for title, stage in note.stages.items()} == {
        "data": "reused", "model": "pending", "left": "done", "right": "failed",
    }  # fmt: skip
    assert (note.stages["left"].seconds, note.stages["right"].reason) == (1.5, "no memory")
    assert note.said == "may this model be promoted?"
    assert (note.outcome, note.cause) == ("failed", "right failed; see posttrain logs right")
    assert note.ended


def test_a_run_whose_stages_are_made_is_done_and_a_pruned_trial_is_no_failure(plan, record):
    with record.open():
        record.done("left", 1.5, {})
        record.pruned("right#2", "step 3: others do better")
    assert the_note(plan).outcome == "done"
    assert the_note(plan).stages["right#2"].state == "pruned"


def test_a_stage_comes_after_all_data_though_it_reads_none(plan):
    extra = replace(plan.stage("data"), name="extra")
    pipeline = replace(plan.pipeline, stages={"extra": extra.stage, **plan.pipeline.stages})
    wide = replace(plan, pipeline=pipeline, stages=[extra, *plan.stages])
    with RunRecorder(wide, [], Recorded(), wide.stale).open():
        assert the_note(plan).stages["model"].after == ["extra", "data"]


def test_what_is_reused_is_waited_for_by_nobody(plan):
    with RunRecorder(plan, [], Recorded(), [plan.stage("model")]).open():
        assert the_note(plan).stages["model"].after == []


def test_a_sweep_shows_which_stages_are_shared_and_is_judged_by_no_gate(plan, monkeypatch):
    refusal = SimpleNamespace(refusal=lambda: "gate refuses left")
    monkeypatch.setattr(observer, "judgements", lambda made: [refusal])
    sweep = SweepRecord(folder=str(plan.pipeline.store / "sweeps" / "s"), own=["left", "right"], trials=3)
    with RunRecorder(plan, [], Recorded(), [*plan.stale, plan.stage("left")], sweep).open():
        assert list(the_note(plan).stages) == ["data", "model"]
    assert (the_note(plan).outcome, the_note(plan).sweep) == ("done", sweep)


def test_a_run_whose_gate_refuses_says_so(plan, record, monkeypatch):
    refusal = SimpleNamespace(refusal=lambda: "gate refuses left")
    monkeypatch.setattr(observer, "judgements", lambda made: [refusal])
    with record.open():
        pass
    assert (the_note(plan).outcome, the_note(plan).cause) == ("refused", "gate refuses left")


def test_a_wait_that_goes_on_is_no_change(record):
    with record.open():
        record.waiting("left", "1 CPU")
        before = record._note
        record.waiting("left", "1 CPU")
        assert record._note.stages is before.stages


@pytest.mark.parametrize(
    ("error", "outcome", "cause"),
    [
        (KeyboardInterrupt(), "stopped", ""),
        (StoppedError("the run was stopped"), "stopped", ""),
        (PipelineError("stage left failed"), "failed", "stage left failed"),
        (ValueError(), "failed", "ValueError"),
    ],
)
def test_the_end_is_what_leaves_the_context(plan, record, error, outcome, cause):
    with pytest.raises(type(error)), record.open():
        raise error
    assert (the_note(plan).outcome, the_note(plan).cause) == (outcome, cause)


def test_the_run_of_mlflow_is_named_as_soon_as_there_is_one(plan):
    tracker = Recorded()
    with RunRecorder(plan, [], tracker, plan.stale).open():
        assert the_note(plan).links.mlflow_run is None
        tracker.run_id = "abc"
    assert the_note(plan).links.mlflow_run == "abc"
    assert the_note(plan).links.mlflow.startswith("sqlite:///")


def test_a_trial_of_a_sweep_goes_by_its_title(plan, record):
    with record.open():
        record.waiting("left#4", "1 CPU")
    note = the_note(plan).stages["left#4"]
    assert (note.state, note.cpus, note.directory) == ("waiting", 1, "")


def test_no_older_note_is_written_over_a_newer_one(plan, record, monkeypatch):
    writing = record._writing

    class Overtaken:
        """The lock of the writers, before which another one was faster."""

        def __enter__(self):
            monkeypatch.setattr(record, "_writing", writing)
            record.reused("data")
            record._write()
            writing.acquire()

        def __exit__(self, *_):
            writing.release()

    monkeypatch.setattr(record, "_writing", Overtaken())
    record._write()
    assert the_note(plan).stages["data"].state == "reused"


def test_a_store_that_cannot_be_written_stops_no_run(plan, record):
    store = plan.pipeline.store
    store.mkdir()
    (store / "runs").write_text("in the way")
    with record.open():
        record.running("left", store / "metrics.jsonl", None)
    assert (store / "runs").read_text() == "in the way"


def note_of(pid=1, started=0.0, host="elsewhere", **fields):
    driver = Owner(host=host, pid=pid, started=started, token="")
    return RunRecord(id=new_id(), pipeline="toy", words=[], driver=driver, started=0.0, stages={}, **fields)


def test_a_run_of_another_host_dies_by_silence(tmp_path):
    note = note_of()
    note.write(tmp_path)
    assert note.is_live(tmp_path)
    os.utime(
        run_record_path(tmp_path, note.id), (0, time.time() - run_record.EXPIRY_SECONDS - run_record.SKEW_SECONDS - 1)
    )
    assert note.is_dead(tmp_path)
    assert not replace(note, outcome="done").is_live(tmp_path)


def test_a_pid_that_another_process_has_now_is_no_driver(tmp_path):
    here = Owner.here()
    alive, other = note_of(here.pid, here.started, here.host), note_of(here.pid, here.started - 100, here.host)
    for note in (alive, other):
        note.write(tmp_path)
    assert (alive.is_live(tmp_path), other.is_live(tmp_path)) == (True, False)


def test_a_broken_note_hides_no_other(tmp_path):
    note = note_of()
    note.write(tmp_path)
    for name, content in {"20990101-000000-aaaa": '{"id": ', "20990101-000000-bbbb": json.dumps({"id": 1})}.items():
        (tmp_path / "runs" / f"{name}.json").write_text(content)
    assert list(latest(tmp_path)) == [note]


def test_a_long_run_is_found_behind_many_short_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(run_record, "_CHECKED", 2)
    notes = [replace(note_of(), id=f"2026010{day}-000000-0000", outcome="done") for day in range(1, 7)]
    for index, note in enumerate(notes):
        note.write(tmp_path)
        if index != 1:
            os.utime(run_record_path(tmp_path, note.id), (0, 0))
    assert list(latest(tmp_path)) == [notes[5], notes[4], notes[1]]


def test_what_is_freed_before_a_run_has_noted_it_ends_the_run_at_its_begin(plan):
    finish(plan, "data")
    again = make_plan(plan.pipeline)
    shutil.rmtree(again.entry(again.stage("data")).path)
    with pytest.raises(ArtifactError, match="run again"), RunRecorder(again, [], Recorded(), again.stale).open():
        pytest.fail("it began")
    assert the_note(plan).outcome == "failed" and "run again" in the_note(plan).cause


def test_where_gc_cannot_be_kept_out_the_note_is_written_all_the_same(plan, record, monkeypatch):
    def refuse(store):
        raise OSError("no locks here")

    monkeypatch.setattr(reads, "guard", refuse)
    with record.open():
        assert the_note(plan).reads


def test_what_a_further_plan_reads_is_noted_too(plan, record, tmp_path):
    """As that of a trial, which may read what another pipeline has made."""
    named = WrittenStore(plan.pipeline.store)
    rows = named.stage("corpus", {"rows": named.source("rows")})
    path = f"sources.rows.path={plan.pipeline.store}/corpus/{rows.fingerprint[:16]}/output/content.txt"
    words = ["pipeline=toy", "model=none", path, f"store={plan.pipeline.store}"]
    trial = make_plan(load_pipeline(words, CONF))
    with record.open():
        before = the_note(plan).reads
        record.claim([trial])
        assert set(the_note(plan).reads) - set(before) >= {node(rows)}
        shutil.rmtree(plan.pipeline.store / "corpus")
        with pytest.raises(ArtifactError, match="run again"):
            record.claim([trial])


def test_a_run_that_begins_waits_until_gc_has_freed_what_it_is_at(plan, record):
    begun = []

    def begin():
        with record.open():
            begun.append(run_ids(plan.pipeline.store))

    run = threading.Thread(target=begin)
    with guard(plan.pipeline.store):
        run.start()
        run.join(0.3)
        assert (begun, run_ids(plan.pipeline.store)) == ([], [])
    run.join()
    assert len(begun[0]) == 1
