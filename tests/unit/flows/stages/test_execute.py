"""One stage, with processes that do as they are told."""

import pytest

from flows.declare.config import load_pipeline
from flows.planning.plan import make_plan
from flows.stages.execute import execute
from flows.stages.run import Run
from lineage.errors import PipelineError, PrunedError, StageError
from lineage.tracker import NoTracker
from tests.command import CONF


class Heard:
    """What an observer was told."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *told: self.calls.append((name, *told))


class Ending:
    """Processes that all end so."""

    def __init__(self, error):
        self.error = error

    def raise_if_stopped(self):
        pass

    def run(self, job):
        raise self.error


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "rows.txt").write_text("rows")
    words = ["pipeline=toy", "model=none", f"sources.rows.path={tmp_path}/rows.txt", f"store={tmp_path}/store"]
    return make_plan(load_pipeline(words, CONF))


@pytest.mark.parametrize(
    ("error", "heard"),
    [(PrunedError("pruned at step 3"), ("pruned", "data#1", "pruned at step 3")),
     (StageError("data", "no memory", "x"), ("failed", "data#1", "stage data failed: no memory (log: x)"))],
)  # fmt: skip
def test_a_stage_that_is_pruned_is_not_told_as_failed(plan, error, heard):
    observer = Heard()
    run = Run(plan=plan, processes=Ending(error), observer=observer, tracker=NoTracker(), titles={"data": "data#1"})
    with pytest.raises(PipelineError):
        execute(run, plan.stage("data"))
    assert observer.calls[-1] == heard
    assert [call[0] for call in observer.calls if call[0] in ("pruned", "failed")] == [heard[0]]
