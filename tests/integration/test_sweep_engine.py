"""Worker threads and shared stages, without Prefect; what a cluster answers, by a process with a Ray of the test."""

import threading
from types import SimpleNamespace

import pytest

from flows.stages.resources import Cluster, Node, ask_cluster
from flows.stages.run import Run
from flows.sweep import run as module
from flows.sweep.files import SweepFiles
from flows.sweep.plan import read_sweep
from lineage.errors import ConfigError, PipelineError, PrunedError
from lineage.record.tracker import Tracker
from tests.command import CONF

RATE, SIZE = "stages.left.method.learning_rate", "stages.model.method.size"
PATIENCE_SECONDS = 20.0


@pytest.fixture
def read(tmp_path):
    (tmp_path / "rows.txt").write_text("rows")
    overrides = ["pipeline=toy", "model=none", f"sources.rows.path={tmp_path}/rows.txt", f"store={tmp_path}/store"]
    return lambda *more: read_sweep([*overrides, *more], CONF)


class Proposals:
    """Proposes learning rates, and prunes the trials of these numbers at their first report."""

    def __init__(self, rates, prunes=()):
        self._left, self._prunes, self.results = list(enumerate(rates)), prunes, {}

    def ask(self):
        number, rate = self._left.pop(0) if self._left else (None, None)
        return None if rate is None else (number, {RATE: rate})

    def report(self, number, step, metrics):
        return number in self._prunes

    def tell(self, result):
        self.results[result.number] = result.state


@pytest.fixture
def drive(tmp_path, monkeypatch):
    """Runs a sweep; returns the titles of its stages in order, and number -> state and cause."""

    def drive(sweep, execute=lambda title: None, study=None, workers=1):
        titles, ended = [], []
        folder = tmp_path / "folder"
        folder.mkdir()
        files = SweepFiles(folder, sweep.sweep, [], None)

        def run_stage(run, planned):
            titles.append(run.title(planned))
            execute(run.title(planned))

        monkeypatch.setattr(module, "execute", run_stage)
        processes = SimpleNamespace(end=lambda path, why: ended.append((path.parent.name, str(why))), stop=lambda: None)
        if study:
            vars(sweep)["known"] = None
        recorder = SimpleNamespace(claim=lambda _: None)
        run = Run(
            plan=sweep.plan, processes=processes, emit=lambda event: None, tracker=Tracker(), recorder=recorder
        )  # fmt: skip
        engine = module.SweepRun(sweep, files, study, workers)
        engine.drive(run)
        return titles, {each.number: (each.state, each.cause) for each in module.trial_results(folder)}, ended

    return drive


def _fails(*bad, error=None):
    def execute(title):
        if title in bad:
            raise error or PipelineError(f"{title} failed")

    return execute


def test_what_trials_share_runs_once_under_the_number_of_the_first(read, drive):
    titles, results, _ = drive(read(f"{SIZE}=1,2", f"{RATE}=0.2,0.3", "sweep.until=left"))
    assert titles == ["data", "model#0", "left#0", "left#1", "model#2", "left#2", "left#3"]
    assert results == dict.fromkeys(range(4), ("complete", ""))


def test_trials_run_side_by_side_and_wait_for_a_stage_that_another_runs(read, drive):
    both = threading.Barrier(2, timeout=PATIENCE_SECONDS)
    titles, *_ = drive(
        read(f"{RATE}=0.2,0.3", "sweep.until=left"), lambda title: both.wait() if "left" in title else None, workers=2
    )
    assert sorted(titles) == ["data", "left#0", "left#1", "model"]
    assert titles[:2] == ["data", "model"]


def test_a_stage_runs_beside_another_that_it_does_not_read(read, drive):
    both = threading.Barrier(2, timeout=PATIENCE_SECONDS)
    sweep = read(f"{SIZE}=choice(1)", f"{RATE}=choice(0.2)")
    titles, results, _ = drive(sweep, lambda title: both.wait() if title in ("left#0", "right#0") else None)
    assert titles[:2] == ["data", "model#0"] and results == {0: ("complete", "")}


def test_a_failure_ends_those_trials_that_need_the_stage_and_no_other(read, drive):
    sweep = read(f"{SIZE}=1,2", f"{RATE}=0.2,0.3", "sweep.until=left")
    titles, results, _ = drive(sweep, _fails("model#0", "left#3"))
    assert titles == ["data", "model#0", "model#2", "left#2", "left#3"]
    assert {number: cause for number, (_, cause) in results.items()} == {
        0: "model#0 failed", 1: "model#0 failed", 2: "", 3: "left#3 failed",
    }  # fmt: skip


def test_what_needs_no_failed_stage_runs_before_its_trial_ends(read, drive):
    titles, results, _ = drive(read(f"{RATE}=choice(0.2)"), _fails("left#0"))
    assert "right" in titles and results == {0: ("failed", "left#0 failed")}


@pytest.mark.parametrize(("stage", "numbers"), [("right", [0]), ("left#0", [0, 1, 2])])
def test_after_a_failure_of_what_all_share_a_sampler_proposes_nothing_more(read, drive, stage, numbers):
    study = Proposals(("0.2", "0.3", "0.4"))
    _, results, _ = drive(read(f"{RATE}=choice(0.2)"), _fails(stage), study)
    assert list(results) == numbers and study.results[0] == "failed"


def test_a_proposal_that_a_method_refuses_is_a_failed_trial(read, drive):
    study = Proposals(("x", "0.3"))
    _, results, _ = drive(read(f"{RATE}=choice(0.2)", "sweep.until=left"), study=study)
    assert results[0][1].startswith(f"trial 0: {RATE}=x: ") and results[1] == ("complete", "")


def _pruning(sweep, stage):
    from flows.declare.sweep import Pruning

    pruning = Pruning(pruner={}, stage=stage, metric="loss", direction="minimize")
    object.__setattr__(sweep.sweep, "pruning", pruning)
    return sweep


def test_a_pruned_trial_ends_its_own_stage_and_leaves_shared_ones(read, drive, monkeypatch):
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.001)
    sweep = _pruning(read(f"{RATE}=choice(0.2)"), "left")
    metrics = sweep.plan.entry(sweep.plan.stage("left")).metrics
    pruned, other = (threading.Event() for _ in range(2))

    def execute(title):
        if title == "left#1":
            other.set()
            assert pruned.wait(PATIENCE_SECONDS)
        if title == "left#0":
            assert other.wait(PATIENCE_SECONDS)
            metrics.parent.mkdir(parents=True, exist_ok=True)
            metrics.write_text('{"step": 7, "time": 9e9, "metrics": {"loss": 9}}\n')
            assert pruned.wait(PATIENCE_SECONDS)
            raise PrunedError("pruned at step 7 of left#0")

    study = Proposals(("0.2", "0.3", "0.2"), prunes=[0])
    tell = study.tell
    study.tell = lambda result: (tell(result), pruned.set())
    titles, results, ended = drive(sweep, execute, study, workers=2)
    pruned = ("pruned", "pruned at step 7 of left#0")
    assert results == {0: pruned, 1: ("complete", ""), 2: pruned}  # 2 has the parameters of 0
    assert sorted(titles) == ["data", "left#0", "left#1", "model", "right"]
    assert [name for name, _ in ended] == ["left"]


def test_reports_of_an_earlier_attempt_prune_nothing(read, drive):
    sweep = _pruning(read(f"{RATE}=choice(0.2)", "sweep.until=left"), "left")
    metrics = sweep.plan.entry(sweep.plan.stage("left")).metrics
    metrics.parent.mkdir(parents=True)
    metrics.write_text('{"step": 7, "time": 0, "metrics": {"loss": 9}}\n')
    _, results, _ = drive(sweep, study=Proposals(("0.2",), prunes=[0]))
    assert results == {0: ("complete", "")}


def test_the_machine_or_sweep_parallel_decides_how_many_trials_run_at_once(read, monkeypatch):
    monkeypatch.setattr(module, "count_cpus", lambda: 4)
    cpus = "stages.left.resources.cpus_per_worker"
    for overrides, count in (
        ([], 4),
        ([f"{cpus}=2"], 2),
        ([f"{cpus}=3"], 1),
        ([f"{cpus}=8"], 1),
        (["sweep.parallel=9"], 9),
    ):
        assert module._num_workers(read(f"{RATE}=0.1,0.2", *overrides), None) == count


def test_as_many_trials_run_at_once_as_fit_on_the_cluster(read, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    overrides = [f"{RATE}=0.1,0.2", "stages.left.resources.launcher=cluster", "stages.left.resources.cpus_per_worker=2"]
    cluster = Cluster(nodes=tuple(Node(host="a", node=str(index), cpus=3.0) for index in range(2)))
    assert module._num_workers(read(*overrides), cluster) == 3
    assert module._num_workers(read(*overrides, "sweep.parallel=2"), cluster) == 2


RAY = """
import atexit
import sys
from types import SimpleNamespace

for stream in (sys.stdout, sys.stderr):
    print("a warning", file=stream)
    atexit.register(print, "the last words", file=stream)


def init(address, **options):
    if address == "ray://gone:1":
        raise ConnectionError("nothing is there")
    return SimpleNamespace(dashboard_url=None)


def nodes():
    resources = {"CPU": 6.0, "GPU": 1.0, "accelerator_type:H100": 1.0}
    place = {"NodeManagerHostname": "a", "NodeManagerAddress": "10.0.0.1", "NodeID": "1"}
    return [{"Alive": True, "Resources": resources, **place}]
"""


def test_an_answer_of_a_cluster_is_read_and_its_refusal_named_whatever_ray_prints(tmp_path, monkeypatch):
    """Ray prints as it is imported and at exit, on stdout and stderr."""
    package = tmp_path / "ray"
    (package / "_private").mkdir(parents=True)
    for file, text in (
        ("__init__.py", RAY), ("exceptions.py", "class AuthenticationError(Exception): ..."),
        ("_private/__init__.py", ""), ("_private/state.py", "state = None"),
    ):  # fmt: skip
        (package / file).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("RAY_ADDRESS", "ray://there:1")
    node = Node(host="a", node="10.0.0.1, node 1", cpus=6.0, gpus=1.0, gpu_types=("H100",))
    assert ask_cluster() == Cluster(nodes=(node,), grows=True)
    monkeypatch.setenv("RAY_ADDRESS", "ray://gone:1")
    with pytest.raises(
        ConfigError, match=r"RAY_ADDRESS=ray://gone:1: cannot be joined \(ConnectionError: nothing is there\);"
    ):
        ask_cluster()
    (package / "__init__.py").write_text("raise ImportError('no ray here')")
    with pytest.raises(ConfigError, match="ImportError: no ray here"):
        ask_cluster()
