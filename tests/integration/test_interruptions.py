"""What interrupts a training from within: it goes on from its last checkpoint, and who ended how is one line."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.declare.config import load_pipeline
from flows.planning.plan import Plan, make_plan
from flows.stages.execute import Result, execute
from flows.stages.launch import StageProcesses
from flows.stages.run import Run
from lineage.errors import LostError, StageError
from lineage.record.tracker import Event, Tracker
from tests.command import CONF
from tests.toy_interrupted import TROUBLE_FILE

HERE = socket.gethostname()


class Toy:
    """Runs the interrupted toy in this process's own stage processes."""

    def __init__(self, folder: Path, processes: StageProcesses) -> None:
        (folder / "rows.txt").write_text("rows")
        self.folder, self.processes = folder, processes
        self.announced: list[str] = []

    def plan(self, *overrides: str) -> Plan:
        reported = [
            "pipeline=toy-interrupted",
            "model=none",
            "tracking=none",
            f"sources.rows.path={self.folder}/rows.txt",
        ]
        return make_plan(load_pipeline([*reported, f"store={self.folder}/store", *overrides], CONF))

    def __call__(self, trouble: str, *overrides: str) -> Result:
        plan = self.plan(*overrides)
        plan.pipeline.store.mkdir(exist_ok=True)
        (plan.pipeline.store / TROUBLE_FILE).write_text(trouble)
        run = Run(plan=plan, processes=self.processes, emit=self.hear, tracker=Tracker())
        for name in ("data", "train"):
            result = execute(run, plan.stage(name))
        return result

    def hear(self, event: Event) -> None:
        if event.state == "message":
            self.announced.append(event.text)

    @property
    def directory(self) -> Path:
        [found] = (self.folder / "store" / "train").iterdir()
        return found


@pytest.fixture(scope="module")
def processes() -> Iterator[StageProcesses]:
    found = StageProcesses()
    found.warm_up(["flows.stages.launch", "ray.train.torch"])
    yield found
    found.end_all()


@pytest.fixture
def toy(tmp_path: Path, processes: StageProcesses) -> Toy:
    return Toy(tmp_path, processes)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, processes: StageProcesses) -> str:
    """The digest of the output of a run that nothing interrupts."""
    return Toy(tmp_path_factory.mktemp("unbroken"), processes)("").manifest.output_digest


@pytest.mark.parametrize(
    ("trouble", "step", "message"),
    [
        ("die:6:0", 4, f"rank 0 on {HERE} was killed by SIGKILL at step 5; out of memory?"),
        # Between the files and the digests, the digests and the rename, the rename and what follows.
        ("before-digest:6:0", 4, "was killed by SIGKILL at step 6"),
        ("before-rename:6:0", 4, "was killed by SIGKILL at step 6"),
        ("after-rename:6:0", 6, "was killed by SIGKILL at step 6"),
        ("before-digest:1:0", 0, "was killed by SIGKILL at step 2"),
    ],
)
def test_killed_at_any_moment_it_ends_as_if_it_had_not_been(toy, unbroken, trouble, step, message):
    result = toy(trouble)
    assert result.manifest.output_digest == unbroken
    [lost] = toy.announced
    assert lost.startswith("stage train failed: ") and message in lost
    assert f"it resumes from its checkpoint of step {step}" in lost or not step
    assert step or lost.endswith("it starts again from step 0")
    assert result.manifest.provenance.resumed_at == ([step] if step else [])
    steps = [json.loads(line)["step"] for line in (toy.directory / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 9))
    assert not (toy.directory / "work").exists() and not (toy.directory / "checkpoints").exists()


@pytest.mark.parametrize(
    ("trouble", "where"), [("hang:6:0", "at step 5, between steps"), ("hang:1:0", "before its first step, loading")]
)
def test_a_worker_that_hangs_is_named_and_replaced_within_twice_the_set_time(toy, unbroken, trouble, where):
    assert toy(trouble, "resources.hang_minutes=0.03").manifest.output_digest == unbroken
    [lost] = toy.announced
    assert f"stage train failed: rank 0 on {HERE} hangs {where}: no progress for " in lost
    assert float(lost.partition("no progress for ")[2].partition(" s")[0]) < 2 * 0.03 * 60
    log = (toy.directory / "logs" / "stage.log").read_text()
    assert "rank=0 state=hung" in log and "toy_interrupted.py" in log


def test_a_worker_that_is_frozen_is_found_too_and_is_not_replaced_for_ever(toy):
    with pytest.raises(LostError, match="hangs at step 5, between steps: no progress for"):
        toy("freeze:6:0", "resources.hang_minutes=0.02", "resources.max_failures=0")
    assert toy.plan().stage("train").state == "resume"


def test_a_wrong_row_is_reported_with_its_worker_and_tried_no_second_time(toy):
    with pytest.raises(StageError) as failed:
        toy("row:5:0")
    assert not isinstance(failed.value, LostError)
    assert failed.value.cause == f"rank 0 on {HERE} at step 4: rows.txt line 7: the answer is empty; delete the row"
    assert failed.value.exit_code == 2
    assert toy.announced == []
