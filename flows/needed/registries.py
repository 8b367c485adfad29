"""Looks into the model registries of MLflow: people give aliases there by hand."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from flows.declare.operation import Tracking
from flows.needed.found import Needed
from flows.wording import counted
from lineage.errors import ConfigError, PipelineError
from lineage.graph.places import node_key
from lineage.mlflow.address import shown, sqlite_file, tracking_uri
from lineage.mlflow.registry import aliases
from lineage.run_file import RunFile
from lineage.store import Store


class Registries:
    """The one that a command states, and each in which a model of the store is registered.

    Args:
        tracking: that the command states.

    Raises:
        ArtifactError: a record cannot be read.
    """

    def __init__(self, tracking: Tracking, store: Path) -> None:
        self._stated = tracking_uri(tracking.uri) if tracking.mlflow else None
        self._models: dict[str, dict[str, str]] = {}  # address -> node -> pipeline
        self._silent: dict[str, str] = {}  # node -> why it stays, of registries that could not be asked once
        for stage, entry in Store(store).entries():
            manifest, note = entry.manifest(), RunFile.read(entry.path)
            registered = note.registered_in if note else []
            for address in self._with_stated(registered):
                if manifest:
                    self._models.setdefault(address, {})[node_key(stage, entry.path.name)] = manifest.pipeline

    def add_aliased(self, found: Needed) -> None:
        """Adds the models that an alias names; of a registry that is not the stated one and cannot be asked, all.

        Such a one is asked once, however often this is called.

        Raises:
            ConfigError, ArtifactError: the stated one cannot be asked.
        """
        for address, models in list(self._models.items()):
            try:
                for (stage, fingerprint), alias in _aliases(address, models, is_stated=address == self._stated).items():
                    found.by.setdefault(node_key(stage, fingerprint), f"alias {alias} of MLflow")
            except PipelineError as error:
                if address == self._stated:
                    raise
                del self._models[address]
                self._silent |= dict.fromkeys(models, f"registered in MLflow at {address}, which cannot be asked")
                found.lines.append(
                    f"{counted(len(models), 'model')} registered in MLflow at {address} stay, since it cannot be asked "
                    f"what it calls by an alias ({error}); if it is gone for good, delete mlflow.json beside them"
                )
        found.by.update(self._silent)

    def _with_stated(self, addresses: Sequence[str]) -> list[str]:
        """The stated one is known with its password, which no note has."""
        if self._stated is None:
            return list(addresses)
        return [self._stated, *(each for each in addresses if each != shown(self._stated))]


def _aliases(address: str, models: Mapping[str, str], *, is_stated: bool) -> dict[tuple[str, str], str]:
    file = sqlite_file(address)
    if file and not file.exists():
        if is_stated:  # nothing was recorded yet
            return {}
        raise ConfigError(f"{file} is not there")
    return aliases(address, sorted(set(models.values())))
