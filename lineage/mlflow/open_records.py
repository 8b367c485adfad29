"""Notes of the executions whose record is not complete, so that the next command completes it. Imports no mlflow."""

import json
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


def left_open(store: Path) -> list[Path]:
    """The notes of processes of this host that are gone: killed, or without an MLflow that answered."""
    return [path for path in sorted(_folder(store).glob("*.json")) if _is_left(path)]


def _is_left(path: Path) -> bool:
    try:
        holder = Holder(**json.loads(path.read_text()))
        # Of a boot before, or a container's: by pid and start alone, as MLflow's own tags tell the runs of the dead.
        return replace(holder, machine="", booted=None).is_dead(silent_seconds=0.0)
    except FileNotFoundError:
        return False
    except (ValueError, TypeError):  # cut by the kill
        return True


def _folder(store: Path) -> Path:
    return store / "logs" / _FOLDER
