"""A training without a model whose output follows from every step, and that the file ``trouble`` interrupts.

It lies in the store and says ``<what>:<step>:<rank>``: what happens to that rank in that step, once. A file ``hold``
beside it says in which step every rank waits until it is gone, or until the stage is asked to stop.
"""

import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

from lineage import checkpoints
from lineage.artifact import Kind
from lineage.checkpoints import Checkpoints
from lineage.errors import DataError
from lineage.filesystem.digest import digest_files, digest_of
from tasks.context import Metrics, TrainContext
from tasks.method import Input, Inputs, Training
from tests.toy_loop import loop

TROUBLE_FILE = "trouble"
HOLD_FILE = "hold"


@dataclass(frozen=True, kw_only=True)
class ToyInterrupted(Training):
    """Several workers meet in every step."""

    consumes: ClassVar[Mapping[str, Kind]] = {"rows": Kind.TEXT}
    produces: ClassVar[Kind] = Kind.CHECKPOINT
    preload: ClassVar[tuple[str, ...]] = ()

    learning_rate: float = 0.1
    num_steps: int = 8
    global_batch_size: int = 8
    max_length: int = 16
    step_seconds: float = 0.0

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        def take(step: int) -> None:
            time.sleep(self.step_seconds)
            store = ctx.work_dir.parents[2]
            while _holds(store / HOLD_FILE, step) and not ctx.should_stop():
                time.sleep(0.02)
            _trouble(store / TROUBLE_FILE, step, ctx.rank)
            meet(ctx)
            ctx.report(step, {"loss": 1.0 / step, "tokens_per_second": 100.0})

        state = loop(ctx, self.num_steps, "", take)
        if ctx.rank == 0:
            (ctx.output_dir / "model.txt").write_text(state)
        return {"loss": 1.0 / self.num_steps, "train_seconds": 0.0}


def unbroken(method: Training) -> str:
    """The digest of the output of a toy training that nothing interrupts, on the model of the toy pipeline."""
    with TemporaryDirectory() as folder:
        model, output = Path(folder) / "model", Path(folder) / "output"
        model.mkdir()
        output.mkdir()
        (model / "model.txt").write_text("0")
        policy = Input(name="model", kind=Kind.CHECKPOINT, fingerprint="f" * 64, path=model)
        method.run({"policy": policy}, TrainContext(output_dir=output, work_dir=Path(folder) / "work"))
        return digest_of(digest_files(output))


def meet(ctx: TrainContext) -> None:
    """Waits for the other workers, as a step of a real training does."""
    if ctx.world_size > 1:
        import torch

        torch.distributed.all_reduce(torch.ones(1))


def _holds(file: Path, step: int) -> bool:
    try:
        return file.read_text() == str(step)
    except FileNotFoundError:
        return False


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


def _die(*_: object, **__: object) -> dict[str, str]:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


_replace = Path.replace


def _die_at_rename(path: Path, target: Path) -> Path:
    if target.name.startswith("step-"):
        _die()
    return _replace(path, target)
