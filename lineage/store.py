"""The store: ``<root>/<stage>/<fingerprint>/``, the only place of outputs."""

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lineage.checkpoints import Checkpoints
from lineage.digest import DigestCache
from lineage.errors import ArtifactError
from lineage.fingerprint import short
from lineage.manifest import Manifest

if TYPE_CHECKING:
    from lineage.lease import Lease  # of no use to who only asks the record, and slow to import

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
METRICS = "metrics.json"  # the final metrics, for `dvc metrics`
PLOTS = "plots.json"  # the reports of every step, for `dvc plots`
CACHE = "cache"  # what stages share and can make again, such as tokens
RESERVED = (CACHE, "logs", "pipelines", "runs", "sweeps", "watch")  # directories of the store that belong to no stage

ENTRY_NAME = re.compile("[0-9a-f]{16}")  # of a directory: the first digits of its fingerprint


class Entry:
    """One directory of the store: the place of one artifact, finished or not."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.output = path / "output"
        self.logs = path / "logs"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = Checkpoints(path / "checkpoints")

    def manifest(self) -> Manifest | None:
        """The record, or None while the artifact is unfinished.

        Raises:
            ArtifactError: the record is there but cannot be read.
        """
        try:
            return Manifest.from_json((self.path / MANIFEST).read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ArtifactError(
                f"{self.path / MANIFEST} is not a manifest of this version ({error}); "
                f"delete {self.path} to make it again"
            ) from error

    def is_finished(self) -> bool:
        """Whether the artifact was committed and its files are still there."""
        manifest = self.manifest()
        if manifest is None:
            return False
        missing = manifest.missing(self.output)
        if missing:
            logger.warning("output=%s state=damaged missing=%s", self.output, ",".join(missing[:3]))
        return not missing

    def require_intact(self, cache: DigestCache | None = None) -> Manifest:
        """The record of a finished output, after reading every byte of it again (all that ``cache`` does not know).

        Raises:
            ArtifactError: it is unfinished, or a file is missing, changed or new.
        """
        manifest = self.manifest()
        if manifest is None:
            raise ArtifactError(f"{self.path}: is not finished: it has no {MANIFEST}; run its pipeline again")
        damage = manifest.damage(self.output, cache)
        if damage:
            raise ArtifactError(
                f"{self.output}: is not what was committed: {'; '.join(damage[:3])}; "
                f"restore it, or delete {self.path} to make it again"
            )
        return manifest

    def begin(self, step: int = 0) -> None:
        """Clears what an unfinished attempt left, and makes the directories of a new one.

        Args:
            step: of the checkpoint that is gone on from: its reports up to there stay.
        """
        for name in (MANIFEST, METRICS, PLOTS):
            (self.path / name).unlink(missing_ok=True)
        if step:
            self._cut_reports(step)
        else:
            self.metrics.unlink(missing_ok=True)
            self.checkpoints.clear()
        for directory in (self.output, self.work):
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
        self.logs.mkdir(parents=True, exist_ok=True)

    def _cut_reports(self, step: int) -> None:
        """Takes away the reports of steps that are trained again; a new file, so that who follows it sees that."""
        if not self.metrics.exists():
            return
        draft = self.metrics.with_suffix(".tmp")
        with draft.open("w") as file:
            for line in self.metrics.read_text().splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError):  # a kill may have cut a line
                    if json.loads(line)["step"] <= step:
                        file.write(line + "\n")
        draft.replace(self.metrics)

    @property
    def work(self) -> Path:
        """Scratch space of a running stage."""
        return self.path / "work"

    def commit(self, manifest: Manifest, lease: "Lease") -> None:
        """Makes the output an artifact: the manifest is written last, and atomically.

        Raises:
            ArtifactError: the lease was lost to another process.
        """
        shutil.rmtree(self.work, ignore_errors=True)
        draft = self.path / (MANIFEST + ".tmp")
        with lease.still_mine():
            self.summarize(manifest)
            with draft.open("w") as file:
                file.write(manifest.to_json())
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self.path / MANIFEST)
        self.checkpoints.clear()  # the output is what they were for

    def summarize(self, manifest: Manifest) -> None:
        """Writes ``metrics.json`` and ``plots.json`` where they are lacking: once, since DVC links them too."""
        for name, content in ((METRICS, manifest.metrics), (PLOTS, list(self._reports()))):
            if not (self.path / name).exists():
                draft = self.path / (name + ".tmp")
                draft.write_text(json.dumps(content, indent=1) + "\n")
                draft.replace(self.path / name)

    def _reports(self) -> Iterator[dict[str, object]]:
        if not self.metrics.exists():
            return
        for line in self.metrics.read_text().splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a kill may have cut a line
                report = json.loads(line)
                yield {"step": report["step"], "time": report["time"], **report["metrics"]}


class Store:
    """All entries below one root."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def entry(self, stage: str, fingerprint: str) -> Entry:
        return Entry(self.root / stage / short(fingerprint))

    def entries(self) -> Iterator[tuple[str, Entry]]:
        """Every directory of an artifact, finished or not, with its stage's name; in order."""
        for stage in sorted(self.root.iterdir() if self.root.is_dir() else ()):
            if stage.is_dir() and stage.name not in RESERVED:
                yield from (
                    (stage.name, Entry(path)) for path in sorted(stage.iterdir()) if ENTRY_NAME.fullmatch(path.name)
                )

    def finished(self, stage: str) -> Iterator[Manifest]:
        """Records of every finished artifact of a stage, newest first."""
        paths = (self.root / stage).glob(f"*/{MANIFEST}")
        for path in sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True):
            try:
                manifest = Entry(path.parent).manifest()
            except ArtifactError as error:  # of another artifact than the one that is asked for
                logger.warning("%s", error)
                continue
            if manifest:
                yield manifest
