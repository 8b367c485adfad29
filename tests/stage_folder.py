"""One stage's folder, in which it trains in this process, is stopped, and goes on."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lineage.checkpoints import Checkpoints
from tasks.context import Metrics, Resources, TrainContext
from tasks.method import Training
from tasks.train.loop.heartbeat import Phase
from tests import training

SAVING = Resources(micro_batch_size=4, cpus_per_worker=1, save_steps=None, save_minutes=None, keep_last=9)


class StageFolder:
    """Args: root: of the inputs; cache: of the store; resources: that differ from ``SAVING``."""

    def __init__(self, folder: Path, root: Path, *, cache: Path | None = None, **resources: object) -> None:
        self.folder, self.root, self.cache = folder, root, cache
        self.resources = replace(SAVING, **resources)
        self.reports: list[tuple[int, Metrics]] = []
        self.marks: list[tuple[int | None, Phase]] = []
        self.store = Checkpoints(folder / "checkpoints")

    def __call__(
        self, stage: Training, *, resume: int | None = None, should_stop: Callable[[], bool] = lambda: False
    ) -> Metrics:
        ctx = TrainContext(
            output_dir=self.folder / "output", work_dir=self.folder / "work", checkpoint_dir=self.store.directory,
            resources=self.resources, report=lambda step, metrics: self.reports.append((step, dict(metrics))),
            resume_from=self.store.path(resume) if resume else None, should_stop=should_stop,
            mark=lambda step, doing: self.marks.append((step, doing)), cache_dir=self.cache,
        )  # fmt: skip
        with training.one_thread():
            return stage.run(training.inputs(self.root, stage), ctx)

    @property
    def output(self) -> Path:
        return self.folder / "output"

    def held_out(self) -> dict[int, float]:
        return {step: metrics["held_out_loss"] for step, metrics in self.reports if "held_out_loss" in metrics}
