"""A training without a model whose output follows from every step, and that the file ``trouble`` interrupts.

It lies in the store and says ``<what>:<step>:<rank>``: what happens to that rank in that step, once.
"""

import hashlib
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lineage import checkpoints
from lineage.artifact import Kind
from lineage.checkpoints import Checkpoint, Checkpoints
from lineage.errors import DataError, StoppedError
from tasks.context import Metrics, TrainContext
from tasks.method import Inputs, Training

TROUBLE_FILE = "trouble"
STATE_FILE = "state.txt"


@dataclass(frozen=True, kw_only=True)
class ToyInterrupted(Training):
    """Each step's state is a digest of the one before; several workers meet in every step."""

    consumes: ClassVar[Mapping[str, Kind]] = {"rows": Kind.TEXT}
    produces: ClassVar[Kind] = Kind.CHECKPOINT
    preload: ClassVar[tuple[str, ...]] = ()

    learning_rate: float = 0.1
    num_steps: int = 8
    global_batch_size: int = 8
    max_length: int = 16
    step_seconds: float = 0.0

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        done, state = _begin(ctx)
        for step in range(done + 1, self.num_steps + 1):
            time.sleep(self.step_seconds)
            _trouble(ctx.work_dir.parents[2] / TROUBLE_FILE, step, ctx.rank)
            meet(ctx)
            state = next_state(state, step)
            ctx.report(step, {"loss": 1.0 / step, "tokens_per_second": 100.0})
            stops = ctx.should_stop() and step < self.num_steps
            if ctx.rank == 0 and (stops or step % (ctx.resources.save_steps or self.num_steps) == 0):
                _save(step, state, ctx)
            if stops:
                raise StoppedError(f"stopped at step {step} of {self.num_steps}")
        if ctx.rank == 0:
            (ctx.output_dir / "model.txt").write_text(state)
        return {"loss": 1.0 / self.num_steps, "train_seconds": 0.0}


def _begin(ctx: TrainContext) -> tuple[int, str]:
    if ctx.resume_from is None:
        return 0, ""
    step, state = (ctx.resume_from / STATE_FILE).read_text().split()
    return int(step), state


def meet(ctx: TrainContext) -> None:
    """Waits for the other workers, as a step of a real training does."""
    if ctx.world_size > 1:
        import torch

        torch.distributed.all_reduce(torch.ones(1))


def _save(step: int, state: str, ctx: TrainContext) -> None:
    draft = ctx.work_dir / f"checkpoint-{step}"
    draft.mkdir()
    (draft / STATE_FILE).write_text(f"{step} {state}")
    checkpoint = Checkpoint(
        step=step, time=time.time(), train_seconds=0.0, num_workers=ctx.world_size, zero_stage=0, metrics={}
    )  # fmt: skip
    store = ctx.checkpoints
    assert store
    store.commit(draft, checkpoint)
    store.keep(store.steps()[-ctx.resources.keep_last :])


def _trouble(file: Path, step: int, rank: int) -> None:
    what, _, where = file.read_text().partition(":") if file.exists() else ("", "", "")
    if where != f"{step}:{rank}":
        return
    file.unlink()
    match what:
        case "hang":
            threading.Event().wait()
        case "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "die":
            _die()
        case "row":
            raise DataError("rows.txt line 7: the answer is empty; delete the row")
        case "before-digest":
            checkpoints.digest_files = _die
        case "before-rename":
            Path.replace = _die_at_rename  # type: ignore[assignment]
        case "after-rename":
            Checkpoints.keep = _die  # type: ignore[assignment]


def _die(*_: object) -> dict[str, str]:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


_replace = Path.replace


def _die_at_rename(path: Path, target: Path) -> Path:
    if target.name.startswith("step-"):
        _die()
    return _replace(path, target)


def state_after(num_steps: int) -> str:
    """The output of a run that nothing interrupted."""
    state = ""
    for step in range(1, num_steps + 1):
        state = next_state(state, step)
    return state


def next_state(state: str, step: int) -> str:
    return hashlib.sha256(f"{state} {step}".encode()).hexdigest()
