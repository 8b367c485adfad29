"""The loop of a training without a model: it saves, stops, goes on, and its result follows from every step.

A method of one's own with a loop of its own does the same.
"""

import hashlib
import time
from collections.abc import Callable

from lineage.errors import StoppedError
from tasks.context import TrainContext
from tasks.train.best import kept_steps
from tests.saved import commit

STATE_FILE = "state.txt"


def loop(ctx: TrainContext, num_steps: int, begin: str, take: Callable[[int], None]) -> str:
    """The state after the last step, each of which is a digest of the one before.

    Args:
        begin: the state before the first step.
        take: takes one step, and reports it.
    """
    done, state = _restored(ctx) or (0, begin)
    for step in range(done + 1, num_steps + 1):
        take(step)
        state = hashlib.sha256(f"{state} {step}".encode()).hexdigest()
        stops = ctx.should_stop() and step < num_steps
        if ctx.rank == 0 and (stops or (ctx.resources.save_steps and step % ctx.resources.save_steps == 0)):
            _save(step, state, ctx)
        if stops:
            raise StoppedError(f"stopped at step {step} of {num_steps}")
    return state


def _restored(ctx: TrainContext) -> tuple[int, str] | None:
    if ctx.resume_from is None:
        return None
    step, state = (ctx.resume_from / STATE_FILE).read_text().split()
    return int(step), state


def _save(step: int, state: str, ctx: TrainContext) -> None:
    store = ctx.checkpoints
    assert store
    commit(
        store, step, {STATE_FILE: f"{step} {state}"}, work=ctx.work_dir, time=time.time(), num_workers=ctx.world_size,
        metrics={"loss": 1.0 / step},
    )  # fmt: skip
    store.keep(kept_steps(store.records(), ctx.resources.keep_last, ctx.resources.keep_best, None))
