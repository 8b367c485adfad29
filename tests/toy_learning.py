"""A model that is as good as the rows it has learnt from, in no time: for tests of retraining."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from lineage.artifact import Kind
from tasks.context import Metrics, TrainContext
from tasks.data.kinds import TRAIN
from tasks.evaluate.row_scores import RowScores, write_scores
from tasks.method import Inputs, Method, Training

_FILE = "skill.json"
_ROWS = 400
_NO_WEIGHTS = "\x02" + 7 * "\0" + "{}"  # a file of safetensors without any


@dataclass(frozen=True, kw_only=True)
class ToyBlank(Method):
    """A model that knows nothing."""

    consumes: ClassVar[Mapping[str, Kind]] = {"rows": Kind.TEXT}
    produces: ClassVar[Kind] = Kind.CHECKPOINT
    preload: ClassVar[tuple[str, ...]] = ()

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        (ctx.output_dir / _FILE).write_text("0")
        return {}


@dataclass(frozen=True, kw_only=True)
class ToyLearner(Method):
    """Learns a point from every new row, unlearns ten from one that says ``bad``, and fails at ``broken``."""

    consumes: ClassVar[Mapping[str, Kind]] = {"policy": Kind.CHECKPOINT, "rows": Kind.TEXT}
    produces: ClassVar[Kind] = Kind.CHECKPOINT
    preload: ClassVar[tuple[str, ...]] = ()

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        import pyarrow.parquet as pq

        texts = pq.read_table(inputs["rows"].path / TRAIN)["text"].to_pylist()
        if any("broken" in text for text in texts):
            raise ValueError("told to fail")
        points = sum(-10 if "bad" in text else 1 for text in texts)
        skill = json.loads((inputs["policy"].path / _FILE).read_text()) + points
        (ctx.output_dir / _FILE).write_text(json.dumps(skill))
        return {"skill": float(skill)}


@dataclass(frozen=True, kw_only=True)
class ToyTaught(Training):
    """Learns the stated number of points."""

    consumes: ClassVar[Mapping[str, Kind]] = {"policy": Kind.CHECKPOINT}
    produces: ClassVar[Kind] = Kind.CHECKPOINT
    preload: ClassVar[tuple[str, ...]] = ()

    points: int
    learning_rate: float = 0.1
    num_steps: int = 1
    global_batch_size: int = 8
    max_length: int = 16

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        skill = json.loads((inputs["policy"].path / _FILE).read_text()) + self.points
        files = {_FILE: json.dumps(skill), "config.json": "{}", "model.safetensors": _NO_WEIGHTS}
        for name, text in files.items():
            (ctx.output_dir / name).write_text(text)
        return {"skill": float(skill)}


@dataclass(frozen=True, kw_only=True)
class ToyExam(Method):
    """A report: each policy answers as many of the rows as it has skill."""

    consumes: ClassVar[Mapping[str, Kind]] = {"*": Kind.CHECKPOINT}
    produces: ClassVar[Kind] = Kind.REPORT
    preload: ClassVar[tuple[str, ...]] = ()

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        skills = {name: json.loads((given.path / _FILE).read_text()) for name, given in inputs.items()}
        ctx.loaded()
        rows = [str(index) for index in range(_ROWS)]
        wins = {name: [float(index < skill) for index in range(_ROWS)] for name, skill in skills.items()}
        scores = RowScores(metric="accuracy", row_ids=rows, groups=rows, weights=[1] * _ROWS, scores=wins)
        write_scores(ctx.output_dir, [scores], {name: given.fingerprint for name, given in inputs.items()})
        return scores.metrics()
