"""What the verdicts of a certificate depend on: the same of another training, and they hold for that too."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from lineage.artifact import MODELS
from lineage.fingerprint import canonical_json
from lineage.kind import kind_of
from lineage.manifest import InputRecord, Manifest
from lineage.store import Store

_STEPS = ("num_steps", "num_epochs", "validation", "best")  # of a recipe what counts steps: in short there are few
_ADAPTER = "adapter_config.json"  # an output that is one has it, in which its base is named with its weights


def basis(manifest: Manifest, parents: Mapping[str, Manifest], *stores: Path) -> dict[str, object]:
    """What the verdicts depend on: recipe, kind of models, workers, code, libraries and hardware; no data, no steps.

    Args:
        parents: name -> record of what it was made from; of models their architecture counts, not their weights.
        stores: of what those were made from.
    """
    models = {
        slot: _architecture(given, parents.get(given.artifact), stores) for slot, given in manifest.inputs.items()
    }
    ran = manifest.provenance
    return {
        "recipe": {name: value for name, value in manifest.recipe.items() if name not in _STEPS},
        "models": {slot: found for slot, found in models.items() if found is not None},
        "code_digest": ran.code_digest,
        **kind_of(ran),
    }


def key_of(basis: Mapping[str, object]) -> str:
    """SHA-256 of what the verdicts depend on."""
    return hashlib.sha256(canonical_json(basis).encode()).hexdigest()


def _architecture(given: InputRecord, parent: Manifest | None, stores: Sequence[Path]) -> object:
    """Of a stage's model what configures it, of any other model its fingerprint; None: it is data."""
    if parent is None:
        return given.fingerprint if given.source is None or given.source.kind in MODELS else None
    if parent.produces not in MODELS:
        return None
    if _ADAPTER not in parent.files:
        return parent.files.get("config.json", "")
    bases = {name: _architecture(each, _made(each, stores), stores) for name, each in parent.inputs.items()}
    return {"adapter": parent.recipe.get("adapter"), **{name: base for name, base in bases.items() if base is not None}}


def _made(given: InputRecord, stores: Sequence[Path]) -> Manifest | None:
    """The record of what a stage made, from the first store that has it."""
    found = (Store(store).entry(given.artifact, given.fingerprint).manifest() for store in stores)
    return next(filter(None, found), None)
