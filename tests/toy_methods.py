"""Methods that take no time and no torch, for tests of what is around a method."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from lineage.artifact import Kind
from tasks.context import Metrics, TrainContext
from tasks.evaluate.report import TABLE_FILE
from tasks.evaluate.row_scores import RowScores, write_scores
from tasks.method import Inputs, Method, Training
from tasks.reward_functions import Rewards
from tests.toy_loop import loop


@dataclass(frozen=True, kw_only=True)
class ToyRows(Method):
    """Copies the bytes of its source."""

    consumes: ClassVar[Mapping[str, Kind]] = {"rows": Kind.ROWS}
    produces: ClassVar[Kind] = Kind.TEXT
    preload: ClassVar[tuple[str, ...]] = ()

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
    rewards: Rewards | None = None

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        (ctx.output_dir / "model.txt").write_text("0" * self.size)
        return {}


@dataclass(frozen=True, kw_only=True)
class ToyTraining(Training):
    """Steps without a model; fails or dawdles when told to."""

    consumes: ClassVar[Mapping[str, Kind]] = {"policy": Kind.CHECKPOINT, "rows": Kind.TEXT}
    produces: ClassVar[Kind] = Kind.CHECKPOINT
    preload: ClassVar[tuple[str, ...]] = ()

    learning_rate: float = 0.1
    num_steps: int | None = 3
    global_batch_size: int = 8
    max_length: int = 16
    step_seconds: float = 0.0
    fail: bool = False
    level: float | None = None  # added to every loss

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        given = (inputs["policy"].path / "model.txt").read_text()
        level = self.level or 0.0

        def take(step: int) -> None:
            time.sleep(self.step_seconds)
            ctx.report(step, {"loss": level + 1.0 / step, "tokens_per_second": 100.0})
            if self.fail:
                raise ValueError("set to fail")

        state = loop(ctx, self.num_steps or 1, given, take)
        (ctx.output_dir / "model.txt").write_text(f"{state} -> {self.learning_rate}")
        return {"loss": level + 1.0 / self.num_steps, "train_seconds": 0.0}


@dataclass(frozen=True, kw_only=True)
class ToyTuned(Training):
    """Its loss falls by a share in each step, which is the learning rate; the held-out loss likewise, to a floor."""

    consumes: ClassVar[Mapping[str, Kind]] = {"policy": Kind.CHECKPOINT, "rows": Kind.TEXT}
    produces: ClassVar[Kind] = Kind.CHECKPOINT
    preload: ClassVar[tuple[str, ...]] = ()

    learning_rate: float = 1e-3
    num_steps: int = 60
    global_batch_size: int = 8
    max_length: int = 16
    highest: float = 1.0  # learning rate that does not diverge

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        if self.learning_rate > self.highest:
            raise ValueError("the loss diverged")
        metrics = {}
        for step in range(1, self.num_steps + 1):
            loss = 3.0 * math.exp(-self.learning_rate * step)
            metrics = {"loss": loss, **({"held_out_loss": max(loss, 2.0)} if step % 6 == 0 else {})}
            ctx.report(step, metrics)
        (ctx.output_dir / "model.txt").write_text(str(metrics))
        return {**metrics, "train_seconds": 0.0}


@dataclass(frozen=True, kw_only=True)
class ToyEvaluate(Method):
    """A report out of nothing: each policy wins the stated number of first rows."""

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


def with_its_node(item: int) -> tuple[int, str]:
    """An item, and the node of the Ray cluster that it was mapped on."""
    from ray import get_runtime_context

    time.sleep(0.1)
    return item, str(get_runtime_context().get_node_id())
