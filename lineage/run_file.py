"""The note of a stage's run in MLflow, beside its output."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

_RUN_FILE = "mlflow.json"


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """``mlflow.json`` beside a stage: which run its last attempt was, and the words of the command.

    Args:
        uri: of MLflow, without secrets.
        version: of the registered model; None: it is none, or not registered yet.
        registries: addresses of every MLflow in which it is registered, without secrets.
    """

    uri: str
    run_id: str
    execution_id: str
    words: list[str]
    version: int | None = None
    registries: list[str] = field(default_factory=list)

    @property
    def registered_in(self) -> list[str]:
        """The same, also of a note that was written before all of them were noted."""
        return self.registries or ([self.uri] if self.uri and self.version is not None else [])

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
