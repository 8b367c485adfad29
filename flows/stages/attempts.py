"""From which step a stage begins, and how often: a lost worker is replaced, an error is not tried again."""

import logging
from collections.abc import Callable
from dataclasses import asdict, replace

from flows.planning.needs import runs_elsewhere
from flows.planning.plan import PlannedStage
from flows.stages.job import Job
from lineage.attempts import attempts, last_words, note_attempt
from lineage.checkpoints import Checkpoint
from lineage.errors import AskedError, LostError, StageError
from lineage.kind import kind_here
from lineage.manifest import hardware
from lineage.metrics_file import last_step
from lineage.store import Entry
from tasks.context import Metrics

logger = logging.getLogger(__name__)


def goes_on(planned: PlannedStage, entry: Entry) -> bool:
    """Whether an attempt before was of the same code: then this one only goes on with it, also from step 0."""
    before = attempts(entry.path)
    return bool(before) and before[-1].code_digest == planned.code_digest and not planned.restart


def begin(
    planned: PlannedStage,
    entry: Entry,
    checkpoint: Checkpoint | None,
    require_lease: Callable[[], None],
    cause: str = "",
) -> None:
    """Prepares a stage's directory for an attempt; what was made after its checkpoint goes.

    Args:
        checkpoint: that it goes on from; None: from the beginning.
        require_lease: raises where the directory is another run's by now: the wait before may have been long.
        cause: what ended the attempt before, where that is known.

    Raises:
        ArtifactError: it is another run's.
    """
    require_lease()
    reached = last_step(entry.metrics)
    entry.begin(checkpoint.step if checkpoint else 0)
    kind = kind_here(asdict(planned.stage.resources), workers_hardware(planned))
    note_attempt(entry.path, checkpoint.step if checkpoint else 0, planned.code_digest, cause, kind, reached)
    words = last_words(attempts(entry.path))
    if words:
        with (entry.logs / "stage.log").open("a") as log:
            log.write(f"--- {words}\n")


def workers_hardware(planned: PlannedStage) -> dict[str, str]:
    """The processors that a stage's workers run on; empty: they are on a cluster's hosts, of which nobody knows."""
    return {} if runs_elsewhere(planned) else dict(hardware())


def run_attempts(
    planned: PlannedStage,
    entry: Entry,
    job: Job,
    checkpoint: Checkpoint | None,
    run: Callable[[Job], Metrics],
    tell: Callable[[str], None],
) -> Metrics:
    """Runs a stage, and goes on from its last checkpoint each time that a worker is lost.

    That ends when it was lost more than ``max_failures`` times since it last committed a checkpoint. The loss of one
    that saved because it was asked to end is no failure.

    Args:
        checkpoint: that the first attempt goes on from, which has begun; None: from the beginning.
        job: as it would begin at step 0.
        run: starts it, and waits for its end.
        tell: whoever looks on.

    Raises:
        LostError: once too often.
        PipelineError: it failed.
    """
    failures = 0
    while True:
        step = checkpoint.step if checkpoint else 0
        try:
            return run(replace(job, resume_from=entry.checkpoints.path(step) if checkpoint else None))
        except LostError as lost:
            job.require_lease()  # or another run is at work there now
            checkpoint = last_intact(planned, entry)
            went_on = checkpoint is not None and checkpoint.step > step
            failures = (0 if went_on else failures) + (not (went_on and isinstance(lost, AskedError)))
            if failures > job.resources.max_failures:
                raise
            begin(planned, entry, checkpoint, job.require_lease, lost.cause)
            where = f"from its checkpoint of step {checkpoint.step}" if checkpoint else "again from the beginning"
            tell(f"{lost}; it goes on {where}")


def last_intact(planned: PlannedStage, entry: Entry) -> Checkpoint | None:
    """The checkpoint that a stage can go on from, whose every byte was read; None: it has none.

    Raises:
        StageError: there are checkpoints and all are damaged: to begin again loses their steps, which must be said.
    """
    found, damaged = entry.checkpoints.newest_intact()
    if found is None and damaged:
        log = entry.logs / "stage.log"
        with log.open("a") as file:
            file.writelines(f"--- checkpoint damaged: {damage}\n" for damage in damaged)
        first, more = damaged[0].removeprefix(f"{entry.checkpoints.directory}/"), len(damaged) - 1
        raise StageError(
            planned.name,
            f"none of its checkpoints is what was committed: {first}{f', and {more} more' if more else ''}; restore "
            f"the files, or lose their steps and begin again with restart=[{planned.name}]",
            str(log),
        )
    for damage in damaged:
        logger.warning("stage=%s checkpoint damaged: %s", planned.name, damage)
    return found
