"""The environment that a stage's process must have before its Python starts."""

import os
import secrets
from functools import cache
from pathlib import Path

from lineage.filesystem.remote_files import private_folder

# glibc gives freed memory back to the kernel and faults it in again at every step of a training loop.
# Keeping it costs memory, saves time, and changes no bit of the weights.
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TRIM_THRESHOLD_": "8000000000",
    "MALLOC_TOP_PAD_": "268435456",
}

# OpenMP's threads spin at every barrier for milliseconds by default. When anything else wants a core, the spinning
# thread keeps the working one off it, and a step can take ten times as long. Here they spin for about as long as a
# sleeping thread takes to wake up, and sleep then. GOMP_SPINCOUNT is of libgomp, torch's own; others sleep at once.
# A policy that the user has set applies as it is.
POLICY, SPINS = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"
THREADS = {POLICY: "PASSIVE", SPINS: "4000"}

LIBRARIES = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_worker_niceness": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_VERBOSITY": "warning",
}

# torch asks whether there is a GPU while the fork server imports it. It must ask the driver's library, because a CUDA
# that was initialized there cannot be used by the stages' processes. GPUs have the numbers that `nvidia-smi` shows.
# Where segments grow, batches of many sizes leave few gaps in a GPU's memory (docs/hardware.md has the figures).
GPUS = {
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}

# Without it cuBLAS adds in an order of its own each time (torch.use_deterministic_algorithms).
CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def set_environment() -> None:
    """Sets the variables of this process, for those that it starts; those that the user has set take precedence."""
    for name, value in stage_environment().items():
        os.environ.setdefault(name, value)


def worker_environment() -> dict[str, str]:
    """Variables for a process about to train, on another node too."""
    found = {**MALLOC, **THREADS, **CUBLAS, **GPUS}
    if POLICY in os.environ and SPINS not in os.environ:  # a number of spins would outrank it
        del found[SPINS]
    return {name: os.environ.get(name, value) for name, value in found.items()}


def stage_environment() -> dict[str, str]:
    """Variables for a process about to start."""
    return {
        **worker_environment(), **LIBRARIES, **_ray_authentication(), **_own_cluster(),
        # What torch compiles it keeps as pickles; it would be in a directory that another account can create.
        "TORCHINDUCTOR_CACHE_DIR": str(private_folder() / "torchinductor"),
    }  # fmt: skip


def _own_cluster() -> dict[str, str]:
    """Variables for a cluster that we start only on this machine."""
    if os.environ.get("RAY_ADDRESS"):
        return {}
    return {
        "RAY_gcs_rpc_server_reconnect_timeout_s": "10",  # its head never starts again: no need to wait a minute for it
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # as Ray has it on those: all, metrics too, on loopback only
    }


def _ray_authentication() -> dict[str, str]:
    """Ray by default accepts every connection, from other accounts of this machine too: a token is required here.

    Of a cluster that is joined the token is the user's: `ray start` demands one, and a driver sends none by default.
    """
    if not os.environ.get("RAY_ADDRESS"):
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _token()}
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")).expanduser()
    return {"RAY_AUTH_MODE": "token"} if os.environ.get("RAY_AUTH_TOKEN") or file.exists() else {}


@cache
def _token() -> str:
    """Variables for the clusters that this process starts."""
    return secrets.token_hex(32)
