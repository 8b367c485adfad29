"""The note of a stage's run in MLflow, beside its output."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

_RUN_FILE = "mlflow.json"


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """``mlflow.json`` beside a stage: which run its last attempt was, and the words of the command.

    Args:
        uri: of MLflow, without secrets.
        version: of the registered model; None: it is none, or not registered yet.
    """

    uri: str
    run_id: str
    execution_id: str
    words: list[str]
    version: int | None = None

    @staticmethod
    def read(directory: Path) -> "RunFile | None":
        try:
            return RunFile(**json.loads((directory / _RUN_FILE).read_text()))
        except (OSError, ValueError, TypeError):  # none yet, or cut by a kill
            return None

    def write(self, directory: Path) -> None:
        draft = directory / (_RUN_FILE + ".tmp")
        draft.write_text(json.dumps(asdict(self)) + "\n")
        draft.replace(directory / _RUN_FILE)
