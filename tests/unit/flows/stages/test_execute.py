"""One stage, with processes that do as they are told."""

import contextlib
import json
import os
import signal
import socket
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest

from flows.declare.config import load_pipeline
from flows.planning.plan import make_plan
from flows.stages import execute as execute_module
from flows.stages.execute import begin, execute, notes_on, workers_hardware
from flows.stages.job import Job
from flows.stages.launch import context_of
from flows.stages.run import Run
from flows.stages.stops import stoppable
from lineage.errors import PipelineError, PrunedError, StageError, StoppedError
from lineage.filesystem.lock import Lock
from lineage.record.attempts import attempts, record_attempt
from lineage.record.tracker import Tracker
from tasks.data.preparing.report import DataReport, SourceReport
from tests.finished import finish, save


class Heard(list):
    """A listener that keeps state, title and text of each event."""

    def __call__(self, event):
        self.append((event.state, event.title, event.text))


class Ending:
    """Processes that all end so."""

    def __init__(self, error):
        self.error = error

    def raise_if_ended(self, directory):
        pass

    def run(self, job):
        raise self.error


@pytest.fixture
def plan(toy):
    return toy()


@pytest.mark.parametrize(
    ("error", "expected"),
    [(PrunedError("pruned at step 3"), ("pruned", "data#1", "pruned at step 3")),
     (StageError("data", "no memory", "x"), ("failed", "data#1", "stage data failed: no memory (log: x)"))],
)  # fmt: skip
def test_a_stage_that_is_pruned_is_not_told_as_failed(plan, error, expected):
    heard = Heard()
    run = Run(plan=plan, processes=Ending(error), emit=heard, tracker=Tracker(), titles={"data": "data#1"})
    with pytest.raises(PipelineError):
        execute(run, plan.stage("data"))
    assert heard[-1] == expected
    assert [each[0] for each in heard if each[0] in ("pruned", "failed")] == [expected[0]]


def test_an_error_that_nothing_foresaw_is_reported_as_a_failure_too(plan):
    heard = Heard()
    with pytest.raises(RuntimeError):
        execute(
            Run(plan=plan, processes=Ending(RuntimeError("a bug")), emit=heard, tracker=Tracker()), plan.stage("data")
        )
    assert heard[-1] == ("failed", "data", "a bug")


def test_a_stage_that_waits_says_for_whose_lock(plan, monkeypatch):
    heard, entry = Heard(), plan.entry(plan.stage("data"))
    lock = Lock(entry.path)
    assert lock.try_acquire()
    run = Run(plan=plan, processes=Ending(StoppedError("stopped")), emit=heard, tracker=Tracker())
    stops = iter([None, StoppedError("stopped")])

    def raise_if_ended(directory):
        if stop := next(stops):
            raise stop

    monkeypatch.setattr(run.processes, "raise_if_ended", raise_if_ended)
    with lock.holding(), pytest.raises(StoppedError):
        execute(run, plan.stage("data"))
    who = f"another run that makes it (process {os.getpid()} on {socket.gethostname()})"
    assert heard == [("waiting", "data", who), ("stopped", "data", "stopped")]


class Writing:
    """Processes that all write an output."""

    def raise_if_ended(self, directory):
        pass

    def run(self, job):
        (job.directory / "output" / "model.txt").write_text("weights")
        return {"loss": 1.0}


@pytest.fixture
def half_done(toy):
    """A plan with all but ``left``, which other code has trained up to its checkpoint of step 4, and one step more."""
    plan = toy()
    finish(plan, "data", "model")
    entry = plan.entry(plan.stage("left"))
    save(entry, 4)
    record_attempt(entry.path, 0, "other code")
    entry.metrics.write_text("".join(f'{{"step": {step}, "time": 0, "metrics": {{}}}}\n' for step in range(1, 6)))
    return plan


def test_the_manifest_names_all_code_that_trained_it(half_done):
    run = Run(plan=half_done, processes=Writing(), emit=Heard(), tracker=Tracker())
    made_by = execute(run, half_done.stage("left")).manifest.provenance
    assert made_by.resumed_at == [4]
    assert made_by.code_digests == ["other code", half_done.stage("left").code_digest]


def test_what_a_training_did_beside_its_steps_is_announced(half_done, monkeypatch):
    did = {"adaptive/interventions": 2.0, "adaptive/spike/step_9": 0.5}
    write = Writing.run

    def run(self, job):
        lines = [{"step": step, "error": "its process ended by SIGKILL"} for step in (4, 0)]
        lines.append({"step": 2, "error": "", "failed": {"tone": "it returned nan for row 0"}})
        (job.directory / "evaluation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return {**write(self, job), **did}

    monkeypatch.setattr(Writing, "run", run)
    heard = Heard()
    plan = Run(plan=half_done, processes=Writing(), emit=heard, tracker=Tracker())
    manifest = execute(plan, half_done.stage("left")).manifest
    assert [text for state, _, text in heard if state == "message"] == [
        "left: 2 interventions in its learning rate (schedule.adaptive), named in its log and manifest",
        "left: no score of step 0; step 4: its process ended by SIGKILL",
        "left: no score of step 2, tone: it returned nan for row 0",
    ]
    assert [*manifest.failed_scores] == ["step 0", "step 2, tone", "step 4"]
    assert manifest == half_done.entry(half_done.stage("left")).manifest()


@pytest.mark.parametrize(
    ("patient", "why"),
    [
        (("validation",), "val/loss no longer fell (validation.patience)"),
        (("evaluation",), "its score was no better (evaluation.patience)"),
        (
            ("validation", "evaluation"),
            "val/loss no longer fell (validation.patience) or its score was no better (evaluation.patience)",
        ),
    ],
)
def test_it_says_whose_patience_ended_a_training(patient, why):
    settings = {name: SimpleNamespace(patience=2 if name in patient else None) for name in ("validation", "evaluation")}
    notes = [*notes_on(SimpleNamespace(**settings), {"ended_early_at_step": 60.0})]
    assert notes == [f"ended early at step 60: {why}"]


def test_what_a_data_stage_did_not_use_is_announced_once(tmp_path, monkeypatch):
    def written(processes, job):
        ignored = {"id": 2000, **{f"column {number}": 1 for number in range(11)}}
        source = SourceReport(path="rows.jsonl", format="f", evidence="", mapping={}, ignored_columns=ignored)
        dropped = {"between the sides": 65, "no answer": 1, "outside the slice": 9, "left out by the mixture": 7}
        other = SourceReport(path="all.jsonl", format="f", evidence="", mapping={}, rows_read=2017, dropped=dropped)
        DataReport(counts={}, sources={"rows": source, "rows_2": other}).write(job.directory / "output")
        return {}

    monkeypatch.setattr(Writing, "run", written)
    plan, heard = make_plan(load_pipeline([f"store={tmp_path}/store"])), Heard()
    execute(Run(plan=plan, processes=Writing(), emit=heard, tracker=Tracker()), plan.stage("preferences"))
    line, rows = [text for state, _, text in heard if state == "message"]
    assert rows == "preferences: not used of all.jsonl: 66 of 2,017 rows: between the sides 65, no answer 1"
    assert line.startswith("preferences: columns of rows.jsonl that are not read: id (2,000 rows), column 0 (1 row), ")
    assert line.endswith(" and 2 more")


class AskedInItsLastStep(Writing):
    """Processes that are asked to end when nothing is left to save."""

    def run(self, job):
        os.kill(os.getpid(), signal.SIGTERM)
        return super().run(job)


def test_a_stop_in_the_last_step_of_a_training_in_this_process_waits_for_its_output(toy):
    plan, heard = toy("stages.left.resources.launcher=foreground"), Heard()
    finish(plan, "data", "model")
    run = Run(plan=plan, processes=AskedInItsLastStep(), emit=heard, tracker=Tracker())
    with pytest.raises(KeyboardInterrupt), stoppable():
        execute(run, plan.stage("left"))
    assert plan.entry(plan.stage("left")).is_finished()
    assert ("done", "left", "") in heard


@pytest.mark.parametrize(("memory", "cpus"), [(None, 1), (10, 1), (26, 3), (51, 5), (400, 8)])
def test_a_stage_takes_as_large_a_share_of_the_cpus_as_of_the_memory(toy, monkeypatch, memory, cpus):
    """So that two of them never need more memory than there is."""
    plan, asked = toy("stages.data.resources.cpus_per_worker=1"), list[int]()

    @contextlib.contextmanager
    def admitted(*args):
        asked.append(args[0])
        yield ()

    monkeypatch.setattr(execute_module, "admitted", admitted)
    monkeypatch.setattr(execute_module, "count_cpus", lambda: 8)
    monkeypatch.setattr(execute_module, "capacity", lambda resources: 100)
    need = memory and SimpleNamespace(memory=memory - 5, shared=5)
    monkeypatch.setattr(execute_module.Estimator, "estimate", lambda self, planned: need)
    run = Run(plan=plan, processes=Ending(StageError("data", "begun", "log")), emit=Heard(), tracker=Tracker())
    with pytest.raises(StageError, match="begun"):
        execute(run, plan.stage("data"))
    assert asked == [cpus]


def test_a_source_that_changes_during_the_wait_is_not_read(plan, tmp_path, monkeypatch):
    @contextlib.contextmanager
    def admitted(*args):
        (tmp_path / "rows.txt").write_text("other rows")
        yield ()

    monkeypatch.setattr(execute_module, "admitted", admitted)
    run = Run(plan=plan, processes=Ending(StageError("data", "begun", "log")), emit=Heard(), tracker=Tracker())
    with pytest.raises(StageError, match="has changed since the plan was made"):
        execute(run, plan.stage("data"))


def test_a_stage_that_is_gone_on_with_on_another_machine_says_from_where(half_done, monkeypatch):
    planned = half_done.stage("left")
    entry = half_done.entry(planned)
    (entry.path / "attempts.jsonl").unlink()
    begin(planned, entry, None, lambda: None)  # makes it all on this machine ...
    save(entry, 4)
    monkeypatch.setattr(execute_module, "hardware", lambda: {"cpu": "another"})  # ... and then on another
    run = Run(plan=half_done, processes=Writing(), emit=Heard(), tracker=Tracker())
    made_by = execute(run, planned).manifest.provenance
    assert (made_by.resumed_at, made_by.changed_at) == ([4], [4])
    assert made_by.hardware == {"cpu": "another"}


def test_of_the_machines_of_a_cluster_elsewhere_nothing_is_reported(toy, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    plan = toy("stages.left.resources.launcher=cluster")
    assert workers_hardware(plan.stage("left")) == {}
    assert workers_hardware(plan.stage("data"))["cpu"]


def test_what_the_stage_resumes_from_is_looked_at_after_the_wait(half_done, monkeypatch):
    planned = half_done.stage("left")
    entry = half_done.entry(planned)
    newest = save(entry, 6)

    @contextlib.contextmanager
    def admitted(*args):
        (newest / "state.txt").write_text("flipped")
        yield ()

    monkeypatch.setattr(execute_module, "admitted", admitted)
    run = Run(plan=half_done, processes=Writing(), emit=Heard(), tracker=Tracker())
    assert execute(run, planned).manifest.provenance.resumed_at == [4]


def test_a_run_that_is_stopped_while_it_waits_has_begun_nothing(half_done, monkeypatch):
    @contextlib.contextmanager
    def stopped(*args):
        raise StoppedError("the run was stopped")
        yield

    entry = half_done.entry(half_done.stage("left"))
    before = entry.metrics.read_text()
    monkeypatch.setattr(execute_module, "admitted", stopped)
    with pytest.raises(StoppedError):
        execute(Run(plan=half_done, processes=Writing(), emit=Heard(), tracker=Tracker()), half_done.stage("left"))
    assert [each.step for each in attempts(entry.path)] == [0]
    assert entry.metrics.read_text() == before


class Changing:
    """Processes that run a method here, while something changes a file before the report of a step."""

    def __init__(self, step, file):
        self.step, self.file = step, file

    def raise_if_ended(self, directory):
        pass

    def run(self, job):
        context = context_of(job)

        def report(step, metrics):
            if step == self.step:
                self.file.write_text("changed")
            context.report(step, metrics)

        return job.method.run(job.resolve_inputs(), replace(context, report=report))


@pytest.fixture
def on_base(toy, tmp_path):
    """A plan whose training reads a model of the user's, with finished rows, and a file of that model."""
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    (base / "model.txt").write_text("0")
    (base / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    overrides = [f"sources.base={{kind: checkpoint, path: {base}}}", "stages.left.inputs.policy=source:base"]

    def plan():
        return toy(*(f"+{word}" if word.startswith("sources") else word for word in overrides))

    finish(plan(), "data")
    return plan, base / "model.txt"


def test_a_base_that_changes_during_its_training_loses_nothing(on_base):
    make, file = on_base
    heard, plan = Heard(), make()
    run = Run(plan=plan, processes=Changing(2, file), emit=heard, tracker=Tracker())
    manifest = execute(run, plan.stage("left")).manifest
    assert manifest.inputs["policy"].digest == plan.stage("left").inputs["policy"].pinned.digest
    [reported] = [text for _, _, text in heard if "has changed" in text]
    assert reported.startswith(f"left: sources.base: {file.parent} has changed since the stage loaded it")
    assert make().stage("left").fingerprint != manifest.fingerprint


@pytest.mark.parametrize("has_loaded", [True, False])
def test_a_base_that_changes_before_the_end_of_any_stage_fails_it_where_it_was_not_loaded_yet(on_base, has_loaded):
    class Loading(Changing):
        def run(self, job):
            if has_loaded:
                context_of(job).loaded("policy")
                assert job.loaded_models() == {"policy"}
            self.file.write_text("changed")
            (job.entry.output / "model.txt").write_text("0")
            return {}

    make, file = on_base
    heard, plan = Heard(), make()
    run = Run(plan=plan, processes=Loading(0, file), emit=heard, tracker=Tracker())
    if has_loaded:
        assert execute(run, plan.stage("left")).manifest
        assert [text for _, _, text in heard if "has changed since the stage loaded it" in text]
    else:
        with pytest.raises(StageError, match=r"sources\.base: .* has changed since the plan was made"):
            execute(run, plan.stage("left"))


def test_workers_that_note_their_models_at_once_lose_none(on_base):
    class Noting(Changing):
        def run(self, job):
            job = replace(job, inputs={**job.inputs, "reference": job.inputs["policy"]})
            with mock.patch.object(Job, "loaded_models", return_value=set()):  # each looked before the other wrote
                for slot in ("policy", "reference"):
                    job.require_loaded(slot)
            assert job.loaded_models() == {"policy", "reference"}
            raise PipelineError("it is enough")

    make, file = on_base
    plan = make()
    with pytest.raises(PipelineError, match="it is enough"):
        execute(Run(plan=plan, processes=Noting(0, file), emit=Heard(), tracker=Tracker()), plan.stage("left"))


def test_a_base_that_changes_while_it_is_loaded_ends_the_training_at_its_first_step(on_base):
    make, file = on_base
    plan = make()
    with pytest.raises(PipelineError, match=r"sources\.base: .* has changed since the plan was made"):
        execute(Run(plan=plan, processes=Changing(1, file), emit=Heard(), tracker=Tracker()), plan.stage("left"))
    assert not plan.entry(plan.stage("left")).metrics.exists()
