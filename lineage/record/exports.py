"""Models that left the store: the append-only ``<store>/exports.jsonl``."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path

from filelock import FileLock

from lineage.filesystem.files import append_jsonl, read_jsonl
from lineage.graph.places import node_key
from lineage.record.labels import who

EXPORTS = "exports.jsonl"


@dataclass(frozen=True, kw_only=True)
class Export:
    """One line.

    Args:
        form: merged, gguf, hub or ollama.
        stage, fingerprint, digest: of the model, and of its bytes.
        place: the file or directory that was written, as an absolute path.
        files: path below ``place`` -> SHA-256; of a file its name.
        settings: of the form, such as its dtype.
        golden: mean log-probabilities of fixed texts before and after, and the largest difference of one, in nats.
        address: where it was pushed to, with its revision; None: nowhere.
    """

    form: str
    stage: str
    fingerprint: str
    digest: str
    place: str
    files: Mapping[str, str]
    settings: Mapping[str, object]
    golden: Mapping[str, float]
    address: str | None = None
    who: str = field(default_factory=who)
    time: float = field(default_factory=time.time)

    @property
    def node(self) -> str:
        return node_key(self.stage, self.fingerprint)

    @property
    def folder(self) -> Path:
        """The directory of ``files``."""
        place = Path(self.place)
        return place.parent if list(self.files) == [place.name] else place

    def summary(self) -> str:
        """One line about it."""
        settings = " ".join(str(value) for value in self.settings.values())
        day = datetime.fromtimestamp(self.time).strftime("%Y-%m-%d")
        moved = f"{self.golden['difference']:.2g} nats" if self.golden else "not compared"
        to = f", pushed to {self.address}" if self.address else ""
        return f"exported {self.form} {settings} to {self.place}{to}, {day}: golden texts moved by {moved}"


def read_exports(store: Path) -> list[Export]:
    """Every export, oldest first (ArtifactError: a line is damaged)."""
    return read_jsonl(store / EXPORTS, Export, "is not an export")


def record_export(store: Path, export: Export) -> None:
    """Appends one export atomically."""
    with FileLock(store / (EXPORTS + ".lock")):
        append_jsonl(store / EXPORTS, asdict(export))
