"""Methods that take no time and no torch, for tests of what is around a method."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from lineage.artifact import Kind
from lineage.checkpoints import Checkpoint
from lineage.errors import StoppedError
from tasks.checkpoints.best import kept_steps
from tasks.context import Metrics, TrainContext
from tasks.evaluation_report import TABLE_FILE
from tasks.method import Inputs, Method, Training
from tasks.row_scores import RowScores, write_scores

STATE_FILE = "state.txt"


@dataclass(frozen=True, kw_only=True)
class ToyRows(Method):
    """Copies the bytes of its source."""

    consumes: ClassVar[Mapping[str, Kind]] = {"rows": Kind.ROWS}
    produces: ClassVar[Kind] = Kind.TEXT

    prefix: str = ""
    seconds: float = 0.0  # between the reading and the end

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        (ctx.output_dir / "rows.txt").write_text(self.prefix + inputs["rows"].path.read_text())
        time.sleep(self.seconds)
        return {"rows": 1.0}


@dataclass(frozen=True, kw_only=True)
class ToyModel(Method):
    """A model out of nothing."""

    consumes: ClassVar[Mapping[str, Kind]] = {"rows": Kind.TEXT}
    produces: ClassVar[Kind] = Kind.CHECKPOINT
    preload: ClassVar[tuple[str, ...]] = ()

    size: int = 1

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        (ctx.output_dir / "model.txt").write_text("0" * self.size)
        return {}


@dataclass(frozen=True, kw_only=True)
class ToyTraining(Training):
    """Steps without a model; fails, dies or dawdles when told to."""

    consumes: ClassVar[Mapping[str, Kind]] = {"policy": Kind.CHECKPOINT, "rows": Kind.TEXT}
    produces: ClassVar[Kind] = Kind.CHECKPOINT
    preload: ClassVar[tuple[str, ...]] = ()

    learning_rate: float = 0.1
    num_steps: int = 3
    global_batch_size: int = 8
    max_length: int = 16
    step_seconds: float = 0.0
    fail: bool = False
    level: float | None = None  # added to every loss

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        level = self.level or 0.0
        done = int((ctx.resume_from / STATE_FILE).read_text()) if ctx.resume_from else 0
        for step in range(done + 1, self.num_steps + 1):
            time.sleep(self.step_seconds)
            ctx.report(step, {"loss": level + 1.0 / step, "tokens_per_second": 100.0})
            if self.fail:
                raise ValueError("told to fail")
            stops = ctx.should_stop() and step < self.num_steps
            if stops or (ctx.resources.save_steps and step % ctx.resources.save_steps == 0):
                _save(step, ctx)
            if stops:
                raise StoppedError(f"stopped at step {step} of {self.num_steps}")
        given = inputs["policy"].path / "model.txt"
        (ctx.output_dir / "model.txt").write_text(f"{given.read_text()} -> {self.learning_rate}")
        return {"loss": level + 1.0 / self.num_steps, "train_seconds": 0.0}


def _save(step: int, ctx: TrainContext) -> None:
    draft = ctx.work_dir / f"draft-{step}"
    draft.mkdir()
    (draft / STATE_FILE).write_text(str(step))
    checkpoint = Checkpoint(
        step=step, time=time.time(), train_seconds=0.0, num_workers=ctx.world_size, zero_stage=0,
        metrics={"loss": 1.0 / step},
    )  # fmt: skip
    store = ctx.checkpoints
    assert store
    store.commit(draft, checkpoint)
    store.keep(kept_steps(store.records(), ctx.resources.keep_last, ctx.resources.keep_best, None))


@dataclass(frozen=True, kw_only=True)
class ToyEvaluate(Method):
    """A report out of nothing: each policy wins the first rows, as many as it is told to."""

    consumes: ClassVar[Mapping[str, Kind]] = {"*": Kind.CHECKPOINT}
    produces: ClassVar[Kind] = Kind.REPORT
    preload: ClassVar[tuple[str, ...]] = ()

    num_rows: int = 40
    wins: dict[str, int]

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        rows = [str(index) for index in range(self.num_rows)]
        wins = {name: [float(index < self.wins[name]) for index in range(self.num_rows)] for name in inputs}
        scores = RowScores(metric="accuracy", row_ids=rows, groups=rows, weights=[1] * self.num_rows, scores=wins)
        write_scores(ctx.output_dir, [scores], {name: given.fingerprint for name, given in inputs.items()})
        rows = [f"| {name} | {self.wins[name]} of {self.num_rows} |\n" for name in inputs]
        (ctx.output_dir / TABLE_FILE).write_text("".join(["| policy | wins |\n| --- | --- |\n", *rows]))
        return scores.metrics()
