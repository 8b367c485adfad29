"""Environment signature of a training: what beside recipe and code can change the last bits of its result."""

import platform
from collections.abc import Mapping

from lineage.fingerprint import digest_json, short
from lineage.manifest import Provenance, library_versions

# Resources that can change the order of a sum, and with it the last bits.
_RESOURCES = (
    "num_nodes", "num_workers", "cpus_per_worker", "gpus_per_worker", "micro_batch_size", "zero_stage",
)  # fmt: skip
# Settings that were added later -> the value that earlier trainings had; only other values enter the signature.
_ADDED_LATER = {
    "weights": "auto", "gradient_checkpointing": "off", "attention": "auto", "compile": False, "liger": False,
}  # fmt: skip


def environment_signature(ran: Provenance) -> dict[str, object]:
    """The signature of a finished training, as a mapping."""
    return _signature(ran.resources, ran.python, ran.libraries, ran.hardware)


def current_signature(resources: Mapping[str, object], hardware: Mapping[str, str]) -> str:
    """Digest of the signature of a training that starts in this environment.

    Args:
        hardware: of its workers; empty: unknown.
    """
    kind = _signature(resources, platform.python_version(), library_versions(), hardware)
    return short(digest_json(kind))


def _signature(
    resources: Mapping[str, object], python: str, libraries: Mapping[str, str], hardware: Mapping[str, str]
) -> dict[str, object]:
    return {
        "resources": _numeric_resources(resources),
        "python": python,
        "libraries": dict(libraries),
        "hardware": dict(hardware),
    }


def _numeric_resources(resources: Mapping[str, object]) -> dict[str, object]:
    """The resources that can change the last bits, with ``deterministic=auto`` resolved."""
    found = {name: resources[name] for name in _RESOURCES if name in resources}
    if "deterministic" in resources:
        deterministic = resources["deterministic"]
        found["deterministic"] = resources.get("gpus_per_worker") == 0 if deterministic == "auto" else deterministic
    changed = {name for name, default in _ADDED_LATER.items() if resources.get(name, default) != default}
    return {**found, **{name: resources[name] for name in changed}}
