"""A pipeline in short and a store of its own for it: nothing of it reaches a real output, a view or a person."""

import contextlib
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from filelock import FileLock

from flows.declare.operation import Operation
from flows.declare.pipeline import Pipeline, Stage
from flows.planning.plan import Plan, make_plan
from lineage.errors import ConfigError, PipelineError
from lineage.lease import Lease, living_holder
from lineage.store import REHEARSALS, create_store
from tasks.context import Launcher
from tasks.method import Training


@contextlib.contextmanager
def scratch(store: Path, *, keep: bool) -> Iterator[Path]:
    """A directory below a store, on its file system, that is gone afterwards.

    Args:
        keep: it stays until the next command that needs one; so it does where something failed, for its log.
    """
    create_store(store)
    folder = store / REHEARSALS
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / uuid.uuid4().hex[:8]
    with FileLock(folder / "guard"):
        lease = Lease(place)
        assert lease.try_acquire()  # nobody else knows its name
    kept = keep
    try:
        with lease.holding():
            yield place
    except PipelineError as error:
        kept = keep or not isinstance(error, ConfigError)  # which comes before anything is made
        raise
    finally:
        if not kept:
            shutil.rmtree(place, ignore_errors=True)


def free_left(place: Path) -> None:
    """Frees what commands before have left beside a directory: kept, after a failure, or killed.

    Called where nothing refuses a command any more: one that is refused touches nothing.
    """
    with FileLock(place.parent / "guard"):
        for other in place.parent.iterdir():
            if other.is_dir() and other != place and not living_holder(other):
                shutil.rmtree(other, ignore_errors=True)


def scratch_plan(pipeline: Pipeline, store: Path, *, num_steps: int, save_steps: int) -> Plan:
    """Every stage of a pipeline as it would be made with so few steps, all of them to be made in another store.

    What an alias names is found in the real store, and read there.

    Raises:
        ConfigError: the pipeline cannot work.
    """
    short = replace(
        pipeline,
        stages={name: _short(stage, num_steps, save_steps) for name, stage in pipeline.stages.items()},
        code_drift="warn", restart=(), operation=Operation(),
    )  # fmt: skip
    plan = make_plan(short)
    stages = [
        replace(planned, state="run", reason="in short", restart=False, rerun_drifted=False) for planned in plan.stages
    ]
    return replace(plan, pipeline=replace(plan.pipeline, store=store), stages=stages)


def _short(stage: Stage, num_steps: int, save_steps: int) -> Stage:
    """All but the number of steps is as stated, so that memory is; one that is lost is tried again, once."""
    method = stage.method
    if not isinstance(method, Training):
        return stage
    best = method.best and replace(method.best, every_steps=min(method.best.every_steps or save_steps, save_steps))
    validation = method.validation and replace(  # all of its steps: nothing of so few ends early
        method.validation, every_steps=min(method.validation.every_steps or save_steps, save_steps), every_epochs=None,
        patience=None,
    )  # fmt: skip
    # What runs in the command's own process cannot be ended apart from it.
    launcher = Launcher.AUTO if stage.resources.launcher == Launcher.FOREGROUND else stage.resources.launcher
    resources = replace(
        stage.resources, launcher=launcher, save_steps=save_steps, save_epochs=None, save_minutes=None, max_failures=1
    )  # fmt: skip
    method = replace(method, num_steps=num_steps, num_epochs=None, best=best, validation=validation)
    return replace(stage, method=method, resources=resources)
