"""The error tree. Every message says what was found, what is accepted, what to do.

All errors pickle: they cross process borders (a stage's process -> the driver).
"""


class PipelineError(Exception):
    """Base of everything that posttrain raises on purpose; shown without a traceback."""

    exit_code = 1


class ConfigError(PipelineError):
    """The user's configuration is wrong; raised before anything starts."""

    exit_code = 2


class MissingValueError(ConfigError):
    """The user's configuration leaves open a value that must be stated."""


class DataError(PipelineError):
    """The user's data is wrong; names file and line; raised before the first training step."""

    exit_code = 2


class StoppedError(PipelineError):
    """The run was stopped while this stage waited, or trained: then it has saved."""

    exit_code = 130


class PrunedError(PipelineError):
    """This stage's trial was ended early, because others do better."""


class ArtifactError(PipelineError):
    """Something in the store is missing, changed or unfinished."""


class TakenOverError(ArtifactError):
    """Another process owns the lock of the directory that this one writes: its files are the other's now."""


class GateError(PipelineError):
    """A gate refused a model, or a person did; every output is kept."""

    exit_code = 3


class StageError(PipelineError):
    """A stage failed.

    Args:
        stage: its name in the pipeline.
        cause: one line that says why.
        log: path of the log that holds the whole story.
        exit_code: 2 where the cause is the user's input.
    """

    def __init__(self, stage: str, cause: str, log: str, exit_code: int = 1) -> None:
        super().__init__(stage, cause, log, exit_code)
        self.stage, self.cause, self.log, self.exit_code = stage, cause, log, exit_code

    def __str__(self) -> str:
        return f"stage {self.stage} failed: {self.cause} (log: {self.log})"


class LostError(StageError):
    """A worker was lost: killed, hung or preempted. Nothing is wrong with the stage, which can go on."""


class AskedError(LostError):
    """The stage was asked to end, while its run continues: another process needs the machine."""
