"""The environment of a stage: hardware, libraries, git; and its signature.

The signature is what beside recipe and code can change the last bits of a training's result.
"""

import contextlib
import importlib.metadata
import platform
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from lineage.fingerprint import digest_json, short
from lineage.store import Provenance

_CPUS = Path("/proc/cpuinfo")
_SECONDS = 20
# Libraries whose version can change the result of a stage.
_LIBRARIES = (
    "torch",
    "transformers",
    "trl",
    "peft",
    "datasets",
    "accelerate",
    "tokenizers",
    "safetensors",
    "bitsandbytes",
    "deepspeed",
    "numpy",
    "ray",
    "prefect",
)
# Resources that can change the order of a sum, and with it the last bits.
_RESOURCES = (
    "num_nodes", "num_workers", "cpus_per_worker", "gpus_per_worker", "micro_batch_size", "zero_stage",
    "sharding", "offload", "reduce_dtype",
)  # fmt: skip
# Settings that were added later -> the value that earlier trainings had; only other values enter the signature.
_ADDED_LATER = {
    "weights": "auto", "gradient_checkpointing": "off", "attention": "auto", "compile": False, "liger": False,
    "sharding": "none", "offload": False, "reduce_dtype": "fp32",
}  # fmt: skip


@cache
def hardware() -> dict[str, str]:
    """Names of ``cpu`` and, if any, ``gpu``; each model once."""
    gpus = ", ".join(sorted(set(list_gpus("name"))))
    return {"cpu": _cpu(), **({"gpu": gpus} if gpus else {})}


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in _CPUS.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


@cache
def list_gpus(*properties: str) -> list[str]:
    """A line per NVIDIA GPU with these properties, by the driver: importing torch takes seconds. Empty: no driver."""
    query = ("nvidia-smi", f"--query-gpu={','.join(properties)}", "--format=csv,noheader,nounits")
    try:
        listing = subprocess.run(query, capture_output=True, text=True, timeout=_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in listing.splitlines() if line.strip()]


def run_answering(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run``, for a program that writes its answer to the file descriptor that is its last argument.

    The answer takes the place of its stdout, which has what libraries print, also as they are imported and at exit.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8") as answer:
        descriptor = answer.fileno()
        done = subprocess.run(
            [*command, str(descriptor)], env=env, timeout=timeout, pass_fds=(descriptor,), capture_output=True,
            text=True, errors="replace", check=False,
        )  # fmt: skip
        answer.seek(0)
        return subprocess.CompletedProcess(done.args, done.returncode, answer.read(), done.stderr)


def provenance_here(start: float) -> Provenance:
    """Provenance of work that this host has started, with its environment."""
    commit, dirty = _git()
    return Provenance(
        start=start, hosts=[socket.gethostname()], python=platform.python_version(),
        libraries=dict(library_versions()), git_commit=commit, git_dirty=dirty,
    )  # fmt: skip


@cache
def library_versions() -> dict[str, str]:
    """Installed versions, read from package metadata: nothing is imported."""
    versions = {}
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _git() -> tuple[str | None, bool | None]:
    """Commit of the repository that holds this code, and whether its files differ from it."""
    here = Path(__file__).parent
    commands = (["git", "rev-parse", "HEAD"], ["git", "status", "--porcelain", "--untracked-files=no"])
    try:
        commit, status = (
            subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
            for command in commands
        )
    except (OSError, subprocess.SubprocessError):
        return None, None
    return commit, bool(status)


# --- the signature


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
    if resources.get("liger") == "auto" and not resources.get("gpus_per_worker"):
        resources = {**resources, "liger": False}
    changed = {name for name, default in _ADDED_LATER.items() if resources.get(name, default) != default}
    return {**found, **{name: resources[name] for name in changed}}
