"""The error tree. Every message says what was found, what is accepted, what to do.

All errors pickle: they cross process boundaries (stage process -> driver).
"""


class PipelineError(Exception):
    """Base of everything that posttrain raises on purpose; shown without a traceback."""

    exit_code = 1


class ConfigError(PipelineError):
    """The user's configuration is wrong; raised before anything starts."""

    exit_code = 2


class MissingValueError(ConfigError):
    """A required value is missing in the user's configuration."""


class DataError(PipelineError):
    """The user's data is wrong; names file and line; raised before the first training step."""

    exit_code = 2


class StoppedError(PipelineError):
    """The run was stopped while this stage waited or trained; a training stage has saved a checkpoint."""

    exit_code = 130


class PrunedError(PipelineError):
    """The trial of this stage was pruned."""


class ArtifactError(PipelineError):
    """An artifact or record of the store is missing, changed or unfinished."""


class TakenOverError(ArtifactError):
    """Another process has taken over the lock of the directory that this one writes."""


class GateError(PipelineError):
    """A gate or a person refused a model; every output is kept."""

    exit_code = 3


class StageError(PipelineError):
    """A stage failed.

    Args:
        stage: its name in the pipeline.
        cause: the reason, in one line.
        log: path of the stage's log.
        exit_code: 2 if the cause is the user's input.
    """

    def __init__(self, stage: str, cause: str, log: str, exit_code: int = 1) -> None:
        super().__init__(stage, cause, log, exit_code)
        self.stage, self.cause, self.log, self.exit_code = stage, cause, log, exit_code

    def add(self, note: str) -> None:
        """Adds to the cause."""
        self.cause += note
        self.args = (self.stage, self.cause, *self.args[2:])  # as it pickles

    def __str__(self) -> str:
        return f"stage {self.stage} failed: {self.cause} (log: {self.log})"


class LostError(StageError):
    """A worker was killed, hung or preempted; the stage itself is fine and can be resumed."""


class NoMemoryError(PipelineError):
    """A training ran out of the memory of a GPU; from its last checkpoint it can resume with smaller forward passes.

    Args:
        cause: the reason, in one line.
        rows: of a forward pass of a worker, to resume with.
    """

    def __init__(self, cause: str, rows: int) -> None:
        super().__init__(cause, rows)
        self.cause, self.rows = cause, rows

    def __str__(self) -> str:
        return self.cause


class ShortError(LostError):
    """A worker ran out of memory.

    Args:
        rows: as of ``NoMemoryError``.
    """

    def __init__(self, stage: str, cause: str, log: str, rows: int) -> None:
        super().__init__(stage, cause, log)
        self.args, self.rows = (stage, cause, log, rows), rows


class AskedError(LostError):
    """The stage was asked to stop because another process needs the machine, while its run continues."""
