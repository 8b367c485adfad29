"""The start record beside each stage: what MLflow has to record of its last attempt, and where that is recorded."""

import json
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path

from lineage.filesystem.files import atomic_write
from lineage.filesystem.owner import Owner
from lineage.record.labels import user
from lineage.store import Manifest

_RUN_FILE = "mlflow.json"
_CHANGING = threading.Lock()  # a stage ends in one thread while another notes the run that it made for it


@dataclass(frozen=True, kw_only=True)
class RunNames:
    """What the user calls the record of an execution.

    Args:
        experiment: MLflow experiment; empty: named after the pipeline.
        run_name: of the execution, a template until it starts; empty: the pipeline and its start.
        tags: of its run and those of its stages and trials.
    """

    experiment: str = ""
    run_name: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)

    def filled(self, pipeline: str, start: float) -> "RunNames":
        """The names of an execution that starts at ``start``, in seconds since the epoch."""
        time = f"{datetime.fromtimestamp(start):%Y-%m-%d %H:%M:%S}"
        return replace(self, run_name=self.run_name.format(pipeline=pipeline, time=time, user=user()))


UNNAMED = RunNames()


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """The start record of the last attempt, and where it is recorded.

    Args:
        uri: of MLflow, without secrets; the run ids are those of this MLflow.
        cli_args: options and overrides of the command.
        version: of the registered model; None: it is none, or not registered yet.
        title: name of the run; empty: that of the stage.
        names: of the execution.
        resumes: whether the attempt continues the run of the attempt before.
        writer: the process that runs the stage.
        start: its manifest before it ran: no files, metrics or digest. None: written by an earlier version.
        status: RUNNING until the attempt failed or was stopped; the manifest says that it finished.
    """

    uri: str
    run_id: str
    execution_id: str
    cli_args: list[str]
    version: int | None = None
    title: str = ""
    names: RunNames = UNNAMED
    resumes: bool = False
    writer: Owner | None = None
    start: Manifest | None = None
    status: str = "RUNNING"
    cause: str = ""

    @staticmethod
    def read(directory: Path) -> "RunFile | None":
        try:
            fields = json.loads((directory / _RUN_FILE).read_text())
            fields.pop("registries", None)  # of an earlier version
            if "words" in fields:  # of an earlier version
                fields["cli_args"] = fields.pop("words")
            fields["names"] = RunNames(**fields.get("names", {}))
            if fields.get("start"):
                fields["start"] = Manifest.from_json(json.dumps(fields["start"]))
            if fields.get("writer"):
                fields["writer"] = Owner(**fields["writer"])
            return RunFile(**fields)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):  # none yet, or cut by a kill
            return None

    def write(self, directory: Path) -> None:
        atomic_write(directory / _RUN_FILE, json.dumps(asdict(self)) + "\n")

    @staticmethod
    def change(directory: Path, change: "Callable[[RunFile], RunFile]") -> None:
        """Changes the note as it is now, which may be newer than one read before; does nothing where there is none."""
        with _CHANGING:
            note = RunFile.read(directory)
            changed = change(note) if note else None
            if changed and changed != note:
                changed.write(directory)


def is_gone(writer: Owner, silent: Collection[Owner]) -> bool:
    """Whether a process that writes to MLflow has ended.

    Args:
        silent: processes of other hosts whose heartbeats timed out.
    """
    # By pid and start alone, which is what MLflow's tags say: it may be of an earlier boot, or of a container.
    ended = replace(writer, machine="", booted=None).is_dead(silent_seconds=0.0)
    return ended or any(writer.is_process(each) for each in silent)
