"""Notes of the executions whose record is not complete, so that the next command completes it. Imports no mlflow."""

import json
from collections.abc import Collection
from dataclasses import asdict, replace
from pathlib import Path

from lineage.lease import Holder

_FOLDER = "mlflow-open"


class OpenRecord:
    """The note of one execution: made when it begins, gone when MLflow has all of it."""

    def __init__(self, store: Path) -> None:
        self._me = Holder.here()
        self._path = _folder(store) / f"{self._me.host}-{self._me.pid}-{self._me.token[:8]}.json"

    def write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(asdict(self._me)))

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def open_records(store: Path) -> list[Path]:
    """All notes, also of executions that are under way."""
    return sorted(_folder(store).glob("*.json"))


def is_left(path: Path, silent: Collection[Holder]) -> bool:
    """Whether a note's process is gone: it was killed, or had no MLflow that answered.

    Args:
        silent: processes of other hosts of which nothing is heard any more.
    """
    try:
        return is_gone(Holder(**json.loads(path.read_text())), silent)
    except FileNotFoundError:
        return False
    except (ValueError, TypeError):  # cut by the kill
        return True


def is_gone(writer: Holder, silent: Collection[Holder]) -> bool:
    """Whether a process that writes to MLflow has ended; ``silent`` as above."""
    # Of a boot before, or a container's: by pid and start alone, which is what MLflow's own tags say of it.
    ended = replace(writer, machine="", booted=None).is_dead(silent_seconds=0.0)
    return ended or any(writer.is_process(each) for each in silent)


def _folder(store: Path) -> Path:
    return store / "logs" / _FOLDER
