"""An observer that has each training stopped after its first step: it saves, and goes on from what it saved."""

from collections.abc import Sequence
from pathlib import Path

from flows.progress.observer import Observer, Observers
from flows.stages.job import STOP_FILE
from lineage.checkpoints import Checkpoint
from lineage.store import Entry


class OneStop(Observers):
    """Passes on what it hears; the driver takes the stop for a machine that is taken away, and starts the stage again.

    Args:
        names: of all stages, which are shown in a column.

    Attributes:
        saved: name of a stage -> bytes of the checkpoint that it goes on from.
    """

    def __init__(self, observer: Observer, names: Sequence[str]) -> None:
        super().__init__(observer)
        self.saved: dict[str, int] = {}
        self._entry: Entry | None = None  # of the training that runs; stages run one after another
        self._name = ""
        self._width = max(map(len, names), default=0)

    def running(self, title: str, metrics: Path, total: int | None) -> None:
        super().running(title, metrics, total)
        self._entry = Entry(metrics.parent) if total else None
        self._name = title
        if self._entry:
            (self._entry.work / STOP_FILE).touch()

    def announce(self, text: str) -> None:
        """In place of how the stop reads to who did not ask for it, what it was."""
        checkpoint = self._entry.checkpoints.newest() if self._entry else None
        if self._entry is None or checkpoint is None or self._name in self.saved:
            super().announce(text)
            return
        self.saved[self._name] = _size(self._entry.checkpoints.path(checkpoint.step), checkpoint)
        super().announce(f"{self._name:<{self._width}}  saved at step {checkpoint.step} and ended; goes on from there")


def _size(path: Path, checkpoint: Checkpoint) -> int:
    return sum((path / name).stat().st_size for name in checkpoint.files)
