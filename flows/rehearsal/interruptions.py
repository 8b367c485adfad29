"""A training ended on purpose and gone on with, on the path that a real loss takes."""

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import gcd
from pathlib import Path

from flows.planning.plan import PlannedStage
from flows.progress.observer import Observers
from flows.progress.report_file import ReportFile
from flows.stages.admission import require_gpus
from flows.stages.execute import execute
from flows.stages.run import Run
from lineage.errors import ConfigError, LostError, StageError
from lineage.store import Entry
from tasks.context import Launcher, Resources
from tasks.method import Training

_POLL_SECONDS = 0.005
_TRIES = 5  # a training of few quick steps may end before the kill comes


def kill_and_resume(run: Run, planned: PlannedStage, resources: Resources, after: int) -> Entry:
    """Kills a stage's process once, when a step has been reported; the stage is then gone on with.

    Args:
        resources: what it is gone on with; where they are not its own, by a second run, as after a change of the
            configuration, else by the same run, as after the loss of a worker.
        after: the step; a checkpoint is older than that.

    Raises:
        StageError: it failed, or its steps are too quick to be killed between.
    """
    same = resources == planned.stage.resources
    entry = run.plan.entry(planned)
    quiet = replace(run, observer=Observers())  # a loss on purpose is no news
    for _ in range(_TRIES):
        shutil.rmtree(entry.path, ignore_errors=True)
        with _killed(after, entry.metrics, lambda: run.processes.kill(entry.path)):
            if same:
                execute(quiet, planned)
            else:
                with contextlib.suppress(LostError):
                    execute(quiet, _with(planned, replace(planned.stage.resources, max_failures=0)))
        if not same:
            execute(quiet, _with(planned, resources))
        manifest = entry.manifest()
        if manifest and manifest.provenance.resumed_at:
            return entry
    raise StageError(
        planned.name, f"it ended before it could be killed, {_TRIES} times: nothing is known of how it resumes; "
        "certify a larger model or batch", str(entry.logs),
    )  # fmt: skip


def other_workers(planned: PlannedStage) -> Resources | str:
    """A machine to go on with that has another number of workers, or why there is none to compare with."""
    method, resources = planned.stage.method, planned.stage.resources
    assert isinstance(method, Training)
    if resources.zero_stage:
        return f"zero_stage={resources.zero_stage}: goes on with {resources.num_workers} workers only"
    if method.adapter and method.adapter.dropout:
        return f"adapter.dropout={method.adapter.dropout}: drawn by each worker, so that other workers drop others"
    if method.neftune_alpha:
        return f"neftune_alpha={method.neftune_alpha:g}: drawn by each worker, so that other workers draw other noise"
    num_workers = 2 if resources.num_workers == 1 else resources.num_workers // 2
    rows = gcd(resources.micro_batch_size, method.global_batch_size // num_workers)
    changed = replace(
        resources, num_workers=num_workers, num_nodes=1, micro_batch_size=rows,
        launcher=Launcher.AUTO if resources.launcher == Launcher.PROCESS else resources.launcher,
    )  # fmt: skip
    try:
        changed.accumulation_steps(method.global_batch_size)
        require_gpus(planned.name, num_workers * resources.gpus_per_worker)
    except ConfigError as error:
        return str(error)
    return changed


@contextlib.contextmanager
def _killed(after: int, metrics: Path, kill: Callable[[], None]) -> Iterator[None]:
    """Kills once, meanwhile, when a step is reported; or not at all."""
    ended = threading.Event()

    def watch() -> None:
        reports = ReportFile(metrics)
        while not ended.wait(_POLL_SECONDS):
            if any(report.step >= after for report in reports.read()):
                kill()
                return

    thread = threading.Thread(target=watch, daemon=True, name="kill-on-purpose")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _with(planned: PlannedStage, resources: Resources) -> PlannedStage:
    return replace(planned, stage=replace(planned.stage, resources=resources))
