"""The kind of machine and workers that a training runs on: of its last bits all that its recipe and code leave open."""

import hashlib
import platform
from collections.abc import Mapping

from lineage.fingerprint import canonical_json, short
from lineage.manifest import Provenance, library_versions

# Of a stage's resources what may change the order of a sum, and so its last bits.
_RESOURCES = (
    "num_nodes", "num_workers", "cpus_per_worker", "gpus_per_worker", "micro_batch_size", "zero_stage",
)  # fmt: skip
# Of settings that were added later, those that differ from what trainings before did.
_ADDED_LATER = {
    "weights": "auto", "gradient_checkpointing": "off", "attention": "auto", "compile": False, "liger": False,
}  # fmt: skip


def kind_of(ran: Provenance) -> dict[str, object]:
    """Of what has run."""
    return _kind(ran.resources, ran.python, ran.libraries, ran.hardware)


def kind_here(resources: Mapping[str, object], hardware: Mapping[str, str]) -> str:
    """Of what is about to run with this environment, as one word.

    Args:
        hardware: of its workers; empty: not known.
    """
    kind = _kind(resources, platform.python_version(), library_versions(), hardware)
    return short(hashlib.sha256(canonical_json(kind).encode()).hexdigest())


def _kind(
    resources: Mapping[str, object], python: str, libraries: Mapping[str, str], hardware: Mapping[str, str]
) -> dict[str, object]:
    return {
        "resources": _deciding(resources),
        "python": python,
        "libraries": dict(libraries),
        "hardware": dict(hardware),
    }


def _deciding(resources: Mapping[str, object]) -> dict[str, object]:
    """The resources that decide the last bits; ``deterministic=auto`` is what it selects."""
    found = {name: resources[name] for name in _RESOURCES if name in resources}
    if "deterministic" in resources:
        deterministic = resources["deterministic"]
        found["deterministic"] = resources.get("gpus_per_worker") == 0 if deterministic == "auto" else deterministic
    changed = {name for name, default in _ADDED_LATER.items() if resources.get(name, default) != default}
    return {**found, **{name: resources[name] for name in changed}}
