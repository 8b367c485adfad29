"""What watched sources are now, and what the pipeline's last output took them for."""

import time
from collections.abc import Sequence
from pathlib import Path

from flows.declare.pipeline import Pipeline
from lineage.artifact import SOURCE
from lineage.digest import DigestCache, file_names
from lineage.manifest import Manifest
from lineage.sources import local_parts, pin
from lineage.store import Store

_TICK_SECONDS = 2.0  # a file that was written this lately may change again within one tick of its file system's clock

Glance = tuple[tuple[str, int, int, int], ...]


class SourceDigests:
    """Fingerprints of the sources of a pipeline, as a plan would pin them.

    Files are read again only where a path, a size, a time or an inode is not as before: looking costs little.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._cache = DigestCache(pipeline.store / "digests.json")
        self._known: dict[str, tuple[Glance, str]] = {}

    def fingerprint(self, name: str) -> str:
        """Of one source.

        Raises:
            ConfigError: it is not there, or does not answer.
            OSError: a file of it went away while it was read.
        """
        source = self._pipeline.sources[name]
        glance = _glance(local_parts(source))
        known = self._known.pop(name, None)
        if not (known and glance and known[0] == glance):
            known = glance, pin(name, source, self._cache).fingerprint
        if time.time_ns() - max((changed for _, _, changed, _ in glance), default=0) > _TICK_SECONDS * 1e9:
            self._known[name] = known
        return known[1]


def _glance(paths: Sequence[Path]) -> Glance:
    """All that can be told of files without reading them; empty for what lies elsewhere."""
    files = [
        file for path in paths for file in ([path / name for name in file_names(path)] if path.is_dir() else [path])
    ]
    statuses = [(str(file), file.stat()) for file in files]
    return tuple((file, each.st_size, each.st_mtime_ns, each.st_ino) for file, each in statuses)


def last_taken(pipeline: Pipeline, name: str) -> str | None:
    """The fingerprint of a source as the newest output has it that this pipeline made from it; None: there is none."""
    found: list[tuple[Manifest, str]] = []
    for stage_name, stage in pipeline.stages.items():
        slots = [slot for slot, reference in stage.inputs.items() if pipeline.key(reference) == SOURCE + name]
        for manifest in Store(pipeline.store).finished(stage_name) if slots else ():
            given = manifest.inputs.get(slots[0])
            if manifest.pipeline == pipeline.name and given and given.artifact == SOURCE + name:
                found.append((manifest, given.fingerprint))
                break
    newest = max(found, key=lambda each: each[0].provenance.end, default=None)
    return newest[1] if newest else None
