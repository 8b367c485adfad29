"""What the store says of a manifest's ancestors. Imports no mlflow."""

from pathlib import Path

from lineage.artifact import SOURCE
from lineage.manifest import Manifest
from lineage.mlflow.names import produces
from lineage.store import Entry, Store
from lineage.tracker import StageStart


class Shelf:
    """The store, asked for parents, labels and places."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._store = Store(root)
        self._labels: dict[tuple[str, str], set[str]] = {}

    def entry(self, manifest: Manifest) -> Entry:
        return self._store.entry(manifest.stage, manifest.fingerprint)

    def output(self, manifest: Manifest) -> Path:
        return self.entry(manifest).output.absolute()

    def parents(self, manifest: Manifest) -> dict[str, Manifest]:
        """Stage -> its record, of the stages that an output was made from and whose records are still there."""
        records = [record for record in manifest.inputs.values() if not record.artifact.startswith(SOURCE)]
        found = {record.artifact: self._store.entry(record.artifact, record.fingerprint) for record in records}
        manifests = {name: entry.manifest() for name, entry in found.items()}
        return {name: parent for name, parent in manifests.items() if parent}

    def labels(self, manifest: Manifest) -> list[str]:
        """The labels of every source that an output was made from."""
        return sorted(self._union(manifest))

    def _union(self, manifest: Manifest) -> set[str]:
        key = (manifest.stage, manifest.fingerprint)
        if key not in self._labels:
            own = {label for record in manifest.inputs.values() if record.source for label in record.source.labels}
            self._labels[key] = own.union(*(self._union(parent) for parent in self.parents(manifest).values()))
        return self._labels[key]

    def start_of(self, manifest: Manifest) -> StageStart:
        """The beginning of a stage that has long ended, as it was told then."""
        return StageStart(
            stage=manifest.stage, method=manifest.method, produces=produces(manifest),
            fingerprint=manifest.fingerprint, recipe=manifest.recipe, inputs=manifest.inputs,
            directory=self.entry(manifest).path, parents=self.parents(manifest),
        )  # fmt: skip
