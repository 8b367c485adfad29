"""A training of a few numbers with a state that can be saved wrong, for tests of what finds that out."""

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from lineage.artifact import Kind
from lineage.checkpoints import Checkpoint
from lineage.errors import StoppedError
from tasks.context import Metrics, TrainContext
from tasks.method import Inputs, Training

STATE, WEIGHTS = "state.npz", "model.safetensors"
TOKENS_PER_STEP = 64
STEP_SECONDS = 0.05
LOST_AT = 3


@dataclass(frozen=True, kw_only=True)
class Survivor(Training):
    """Walks on at random from where its policy ended, by a generator that each checkpoint holds too."""

    consumes: ClassVar[Mapping[str, Kind]] = {"policy": Kind.CHECKPOINT, "rows": Kind.TEXT}
    produces: ClassVar[Kind] = Kind.CHECKPOINT
    preload: ClassVar[tuple[str, ...]] = ()

    learning_rate: float = 0.1
    num_steps: int = 40
    global_batch_size: int = 16
    max_length: int = 16
    forgets: Literal["nothing", "generator", "weights"] = "nothing"
    per_worker: float = 0.0  # what each worker adds to a weight: as another order of a sum would
    fail_at: int | None = None
    lost_mark: str | None = None  # a file: the first that trains makes it, and is killed

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        generator = np.random.default_rng(self.seed)
        weights, done = _start(inputs["policy"].path), 0
        if ctx.resume_from:
            saved, done = self._restore(ctx.resume_from, generator)
            weights = weights if self.forgets == "weights" else saved
        for step in range(done + 1, self.num_steps + 1):
            time.sleep(STEP_SECONDS)
            weights = weights + self.learning_rate * generator.normal(size=4) + self.per_worker * ctx.world_size
            loss = float(np.square(weights).mean())
            pace = {"num_tokens": float(step * TOKENS_PER_STEP), "tokens_per_second": TOKENS_PER_STEP / STEP_SECONDS}
            ctx.report(step, {"loss": loss, **pace, "memory_gib": float(step)})
            if step == self.fail_at:
                raise ValueError("set to fail")
            if step == LOST_AT and self.lost_mark and not Path(self.lost_mark).exists():
                Path(self.lost_mark).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            stops = ctx.should_stop() and step < self.num_steps
            if ctx.rank == 0 and (stops or (ctx.resources.save_steps and step % ctx.resources.save_steps == 0)):
                self._save(step, weights, generator, ctx)
            if stops:
                raise StoppedError(f"stopped at step {step} of {self.num_steps}")
        if ctx.rank == 0:
            from safetensors.numpy import save_file

            save_file({"bias": np.zeros(2), "walk": weights}, ctx.output_dir / WEIGHTS)
        return {"loss": loss, "num_tokens": float(self.num_steps * TOKENS_PER_STEP)}

    def _save(self, step: int, weights: np.ndarray, generator: np.random.Generator, ctx: TrainContext) -> None:
        assert ctx.checkpoints
        draft = ctx.work_dir / f"draft-{step}"
        draft.mkdir()
        state = np.frombuffer(repr(generator.bit_generator.state).encode(), dtype=np.uint8)
        np.savez(draft / STATE, step=step, weights=weights, generator=state)
        checkpoint = Checkpoint(
            step=step, time=time.time(), train_seconds=0.0, num_workers=ctx.world_size, zero_stage=0, metrics={}
        )  # fmt: skip
        ctx.checkpoints.commit(draft, checkpoint)

    def _restore(self, path: Path, generator: np.random.Generator) -> tuple[np.ndarray, int]:
        import ast

        saved = np.load(path / STATE)
        if self.forgets != "generator":
            generator.bit_generator.state = ast.literal_eval(saved["generator"].tobytes().decode())
        return saved["weights"], int(saved["step"])


def _start(policy: Path) -> np.ndarray:
    from safetensors.numpy import load_file

    given = policy / WEIGHTS
    return load_file(given)["walk"] if given.exists() else np.ones(4)
