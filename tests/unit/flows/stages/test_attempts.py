"""How often a stage is tried, and what it goes on from, with runs that end as they are told."""

import copy
import json
import pickle
import shutil
import socket
from dataclasses import replace
from uuid import uuid4

import psutil
import pytest

from flows.progress.run_record import RunRecord, StageRecord
from flows.stages.execute import begin, fitting, last_intact, mirror_of, nodes_used, run_attempts, settle_last_run
from flows.stages.exit_reasons import failed, left
from flows.stages.job import Job
from flows.stages.resources import Cluster, Node
from lineage.checkpoints import NOT_SENT
from lineage.errors import AskedError, LostError, NoMemoryError, ShortError, StageError
from lineage.filesystem.owner import Owner, host
from lineage.record.attempts import Attempt, attempts, record_attempt, resumed_at
from lineage.store import Store
from tasks.train.loop.heartbeat import HeartbeatFile, Phase
from tests.command import sleeper_of
from tests.finished import save

KILLED = LostError("left", "was killed", "log")
ASKED = AskedError("left", "was asked to end, and saved", "log")


class Stage:
    """Each of its attempts saves at a step, or at none, and ends so."""

    def __init__(self, toy, max_failures=2):
        plan = toy(f"stages.left.resources.max_failures={max_failures}")
        self.planned = plan.stage("left")
        self.entry = plan.entry(self.planned)
        self.job = Job(
            stage="left", method=self.planned.stage.method, inputs={}, resources=self.planned.stage.resources,
            directory=self.entry.path,
        )  # fmt: skip
        self.began = []
        self.damages, self.not_sent = False, ""

    def run(self, *ends):
        left = iter(ends)

        def attempt(job):
            self.began.append(int(job.resume_from.name.removeprefix("step-")) if job.resume_from else 0)
            saved, end = next(left)
            if saved:
                path = save(self.entry, saved)
                if self.damages:
                    (path / "state.txt").write_text("flipped")
            if self.not_sent:
                (self.entry.work / NOT_SENT).write_text(self.not_sent)
            if end:
                raise end
            return {"loss": 1.0}

        checkpoint = last_intact(self.planned, self.entry)
        begin(self.planned, self.entry, checkpoint, lambda: None)
        return run_attempts(self.planned, self.entry, self.job, checkpoint, attempt, lambda line: None)


@pytest.mark.parametrize("harm", ["nothing is there", "the newest is damaged here", "the newest is damaged there"])
def test_what_this_machine_lost_comes_from_the_mirror_once_its_digests_are_checked(toy, tmp_path, caplog, harm):
    stage = Stage(
        lambda *overrides: toy(*overrides, f"stages.left.resources.checkpoint_mirror=file://{tmp_path}/mirror")
    )
    checkpoints, mirror = stage.entry.checkpoints, mirror_of(stage.planned, stage.entry)
    mirror.require_writable()
    for step in (4, 6):
        save(stage.entry, step)
        mirror.push(checkpoints.path(step), checkpoints.read(step))
    if harm == "the newest is damaged here":
        (checkpoints.path(6) / "state.txt").write_text("flipped")
    else:
        shutil.rmtree(stage.entry.path)
    if harm == "the newest is damaged there":
        [file] = (tmp_path / "mirror").glob("left/*/step-6/state.txt")
        file.write_text("flipped")
    step = 4 if harm == "the newest is damaged there" else 6
    assert last_intact(stage.planned, stage.entry).step == step
    assert checkpoints.damage(step) == []
    assert ("state.txt has SHA-256" in caplog.text) == (step == 4)
    mirror.keep([4])
    assert mirror.steps() == [4]


@pytest.mark.parametrize("end", [KILLED, StageError("left", "loss=nan", "log", 2)])
def test_a_mirror_that_is_lost_is_named_with_the_cause_of_the_failure_and_holds_up_no_resume(toy, tmp_path, end):
    place = tmp_path / "mirror"
    stage = Stage(lambda *given: toy(*given, f"stages.left.resources.checkpoint_mirror=file://{place}"), max_failures=1)
    stage.not_sent = "its checkpoint of step 4 was not sent to file://m (OSError): it has none"
    place.write_text("no directory")
    cause = rf"{end.cause}; its checkpoint of step 4 was not sent to file://m \(OSError\): it has none \(log: "
    save(stage.entry, 2)
    with pytest.raises(type(end), match=cause) as error:
        stage.run((None, copy.deepcopy(end)), (None, copy.deepcopy(end)))
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)
    assert stage.began == [2, 2] if end is KILLED else [2]
    assert left(stage.job).startswith("left saved at step 2; its checkpoint of step 4 was not sent to ")


def test_a_stage_that_gets_on_is_tried_for_as_long_as_it_takes(toy):
    stage = Stage(toy, max_failures=1)
    assert stage.run((2, KILLED), (4, KILLED), (6, KILLED), (None, None)) == {"loss": 1.0}
    assert stage.began == [0, 2, 4, 6]


def test_one_that_does_not_get_on_is_given_up(toy):
    stage = Stage(toy, max_failures=2)
    with pytest.raises(LostError):
        stage.run((2, KILLED), (None, KILLED), (None, KILLED), (None, None))
    assert stage.began == [0, 2, 2]


@pytest.mark.parametrize(
    ("ends", "began"),
    [([(2, ASKED), (4, ASKED), (6, KILLED)], [0, 2, 4]), ([(None, ASKED)], [0])],
    ids=["saved", "saved nothing"],
)
def test_who_saves_because_it_is_asked_to_end_does_not_fail(toy, ends, began):
    stage = Stage(toy, max_failures=0)
    with pytest.raises(LostError):
        stage.run(*ends)
    assert stage.began == began


def test_one_without_memory_resumes_with_fewer_rows_and_does_not_fail(toy):
    stage = Stage(toy, max_failures=0)
    rows, run = [], []
    short = [failed(stage.job, 0, NoMemoryError("out of memory", rows)) for rows in (4, 2)]
    assert [type(each) for each in short] == [ShortError, ShortError]
    assert str(short[0]).startswith("stage left failed: out of memory (log: ")

    def attempt(job):
        rows.append(job.most_rows)
        if len(rows) <= len(short):
            raise short[len(rows) - 1]
        return {"loss": 1.0}

    assert run_attempts(stage.planned, stage.entry, stage.job, None, attempt, run.append) == {"loss": 1.0}
    assert rows == [None, 4, 2]
    assert run[0].endswith("it starts again from step 0 with micro_batch_size=4")


def test_a_lost_node_leaves_fewer_workers_and_a_new_one_brings_them_back(toy, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    nodes = tuple(Node(host=name, node=f"node {name}", cpus=2.0) for name in "abc")
    setting = "stages.left.resources"
    options = {"launcher": "cluster", "num_workers": 4, "num_nodes": 2, "min_workers": 1, "micro_batch_size": 1,
             "cpus_per_worker": 1, "max_failures": 9}  # fmt: skip
    planned = toy(*(f"{setting}.{name}={value}" for name, value in options.items())).stage("left")
    message, seen = [], []
    for held in (nodes[:2], nodes[:1], nodes, ()):
        monkeypatch.setattr("flows.stages.execute.ask_cluster", lambda held=held: Cluster(nodes=held))
        found = fitting(planned, replace(planned.stage.resources, micro_batch_size=2), message.append)
        seen.append((found.num_workers, found.num_nodes, found.micro_batch_size))
    assert seen == [(4, 2, 2), (2, 1, 2), (4, 2, 2), (4, 2, 2)]  # where none fit, all are waited for
    assert message == [
        "left: runs with 2 of 4 workers, on 1 node, the most that fit and divide global_batch_size=8, which stays "
        "(accumulation 2): the cluster has 1 node: a (node a) with 2 CPUs"
    ]


@pytest.mark.parametrize("least", ["null", "1"])
def test_an_attempt_has_the_workers_that_fit_and_they_are_recorded(toy, monkeypatch, least):
    stage = Stage(toy)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    cluster = Cluster(nodes=(Node(host="a", node="1", cpus=1.0),))
    monkeypatch.setattr("flows.stages.execute.ask_cluster", lambda: cluster)
    options = {
        "launcher": "cluster",
        "num_workers": 2,
        "min_workers": least,
        "micro_batch_size": 1,
        "cpus_per_worker": 1,
    }
    stage.planned = toy(*(f"stages.left.resources.{name}={value}" for name, value in options.items())).stage("left")
    stage.job = replace(stage.job, resources=stage.planned.stage.resources)
    workers = []

    def attempt(job):
        workers.append(job.resources.num_workers)
        for rank in range(job.resources.num_workers):
            HeartbeatFile(stage.entry.work, rank, None, node="10.0.0.1, node 1").mark(1, Phase.STEPPING)
        if len(workers) < 2:
            raise KILLED
        return {"loss": 1.0}

    begin(stage.planned, stage.entry, None, lambda: None)
    run_attempts(stage.planned, stage.entry, stage.job, None, attempt, lambda line: None)
    assert workers == ([2, 2] if least == "null" else [2, 1])
    assert len({each.kind for each in attempts(stage.entry.path)}) == len(set(workers))
    assert nodes_used(stage.entry) == [
        {"host": socket.gethostname(), "node": "10.0.0.1, node 1", "workers": workers[-1], "gpu": ""}
    ]


def test_checkpoints_that_are_all_damaged_are_not_passed_over(toy, caplog):
    stage = Stage(toy)
    for step in (2, 4):
        (save(stage.entry, step) / "checkpoint.json").unlink()
    stage.entry.open()
    with pytest.raises(StageError) as caught:
        last_intact(stage.planned, stage.entry)
    log = stage.entry.logs / "stage.log"
    assert str(caught.value) == (
        "stage left failed: none of its checkpoints is what was committed: step-4/checkpoint.json is missing, and 1 "
        f"more; restore the files, or lose their steps and start again with restart=[left] (log: {log})"
    )
    assert caplog.text == ""  # it is said once
    assert [line.partition("checkpoints/")[2] for line in log.read_text().splitlines()] == [
        "step-4/checkpoint.json is missing", "step-2/checkpoint.json is missing",
    ]  # fmt: skip
    assert attempts(stage.entry.path) == []


def test_what_a_restart_threw_away_was_not_resumed():
    made = [Attempt(time=0.0, host="h", pid=1, step=step, code_digest="c") for step in (0, 20, 30)]
    assert resumed_at(made) == [20, 30]
    assert resumed_at([*made, replace(made[0], step=0)]) == []
    assert resumed_at([*made, replace(made[0], step=20)]) == [20]


def test_an_attempt_notes_how_far_the_one_before_came(toy):
    stage = Stage(toy)
    begin(stage.planned, stage.entry, None, lambda: None)
    stage.entry.metrics.write_text('{"step": 7, "time": 0.0, "metrics": {}}\n{"step": 8, "ti')
    begin(stage.planned, stage.entry, None, lambda: None)
    assert [each.reached for each in attempts(stage.entry.path)] == [0, 7]


DEAD = replace(Owner.here(), pid=2**30)


@pytest.fixture
def entry(tmp_path):
    entry = Store(tmp_path).entry("sft", "0123456789abcdef")
    entry.begin()
    entry.metrics.write_text(
        "".join(json.dumps({"step": step, "time": 1.0, "metrics": {}}) + "\n" for step in (16, 17))
    )
    record_attempt(entry.path, 0, "code")
    return entry


def note(tmp_path, run_id: str, *, state: str = "running", reason: str = "", **fields) -> None:
    elsewhere = f"/mnt/{tmp_path.name}/sft/0123456789abcdef"  # as another host has it
    stages = {"sft#3": StageRecord(state=state, since=0.0, directory=elsewhere, reason=reason)}
    fields = {"driver": DEAD, **fields}
    RunRecord(id=run_id, pipeline="toy", cli_args=[], started=0.0, stages=stages, **fields).write(tmp_path)


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({}, f"its driver on {host()} was killed at step 17"),
        ({"outcome": "stopped"}, f"its run on {host()} was stopped at step 17"),
        ({"outcome": "failed", "state": "failed", "reason": "stage sft failed: no\nmemory"}, "stage sft failed: no"),
        ({"state": "pending"}, ""),
        ({"driver": Owner.here()}, ""),
    ],
    ids=["killed", "stopped", "failed", "never began", "lives"],
)
def test_it_is_read_in_the_note_of_the_last_run_that_made_it(tmp_path, entry, fields, cause):
    note(tmp_path, "20260101-000000-aaaa", **fields)
    assert settle_last_run(tmp_path, entry) == cause


def test_the_last_run_counts_and_of_a_first_attempt_nothing_settle_last_run(tmp_path, entry):
    note(tmp_path, "20260101-000000-aaaa", outcome="stopped")
    note(tmp_path, "20260102-000000-aaaa")
    note(tmp_path, "20260103-000000-aaaa", driver=Owner.here())  # our own
    assert "was killed" in settle_last_run(tmp_path, entry)
    (entry.path / "attempts.jsonl").unlink()
    assert settle_last_run(tmp_path, entry) == ""


@pytest.mark.parametrize(
    ("fields", "is_ended"),
    [({}, True), ({"driver": Owner.here()}, False), ({"state": "pending"}, False), ({"outcome": "failed"}, False)],
    ids=["killed", "lives", "never began", "failed"],
)
def test_what_a_killed_driver_left_of_a_stage_is_ended_and_nothing_of_another_run(tmp_path, entry, fields, is_ended):
    killed = f"20260101-000000-{uuid4().hex[:8]}"  # its processes are found among all of the machine
    note(tmp_path, killed, **fields)
    left, other = sleeper_of(killed), sleeper_of("20260101-000000-bbbb")
    settle_last_run(tmp_path, entry)
    for each in (left, other):
        assert psutil.pid_exists(each.pid) != (is_ended and each is left)
        each.kill()
        each.wait(120)


def test_a_checkpoint_that_was_gone_back_behind_is_no_progress(toy):
    stage = Stage(toy, max_failures=1)
    save(stage.entry, 2)
    (save(stage.entry, 4) / "state.txt").write_text("flipped")
    with pytest.raises(LostError):
        stage.run((None, KILLED), (None, KILLED), (None, None))
    assert stage.began == [2, 2]


def test_checkpoints_that_are_damaged_as_they_are_saved_are_no_progress(toy):
    stage = Stage(toy, max_failures=1)
    save(stage.entry, 2)
    stage.damages = True
    with pytest.raises(LostError):
        stage.run(*[(4, KILLED)] * 5)
    assert stage.began == [2, 2]
