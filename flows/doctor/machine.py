"""Checks of what there is to run on."""

from collections.abc import Iterator

from flows.doctor.facts import Facts, Finding

_GIB = 2**30
_LEAST_STORE = _GIB
_LEAST_TMP = _GIB
_LEAST_SHM = _GIB
_LEAST_OPEN_FILES = 4096


def check_store(facts: Facts) -> Iterator[Finding]:
    """The store can be written, and has room for one more run."""
    store = facts.machine.store
    free = f"{_size(store.free_bytes)} free at {store.path}"
    if store.refusal:
        yield Finding(
            check="store", level="error", found=f"{store.path} cannot be written: {store.refusal}",
            remedy="give a directory that you may write: store=DIRECTORY",
        )  # fmt: skip
    elif store.free_bytes < _LEAST_STORE:
        yield Finding(
            check="store", level="error", found=free, remedy="make room, or give another disk: store=DIRECTORY"
        )
    elif store.free_bytes < store.last_bytes:
        yield Finding(
            check="store", level="warn",
            found=f"{free}, and the last outputs of this pipeline take {_size(store.last_bytes)}",
            remedy="make room before a run that makes all of them again, or give another disk: store=DIRECTORY",
        )  # fmt: skip
    else:
        yield Finding(check="store", level="ok", found=free)
    if not store.refusal and not store.links:
        yield Finding(
            check="store", level="warn", found=f"the file system of {store.path} knows no hard links",
            remedy="its view and DVC's cache will be copies, which take room: a local disk would not",
        )  # fmt: skip


def check_tmp(facts: Facts) -> Iterator[Finding]:
    """Ray and torch write there too."""
    machine = facts.machine
    found = f"{_size(machine.tmp_free_bytes)} free at {machine.tmp}"
    if machine.tmp_free_bytes < _LEAST_TMP:
        yield Finding(check="tmp", level="warn", found=found, remedy="make room, or set TMPDIR to another disk")
    else:
        yield Finding(check="tmp", level="ok", found=found)


def check_shared_memory(facts: Facts) -> Iterator[Finding]:
    """Ray's object store, NCCL and data loaders share memory between processes; containers are given little."""
    size = facts.machine.shm_bytes
    if size is None:
        yield Finding(check="shared memory", level="ok", found="this system has no /dev/shm")
    elif size < _LEAST_SHM:
        yield Finding(
            check="shared memory", level="warn", found=f"/dev/shm holds {_size(size)}",
            remedy="start the container with --shm-size=8g, or --ipc=host",
        )  # fmt: skip
    else:
        yield Finding(check="shared memory", level="ok", found=f"/dev/shm holds {_size(size)}")


def check_open_files(facts: Facts) -> Iterator[Finding]:
    """Ray raises the limit as far as it is let, and needs thousands."""
    limit = facts.machine.open_files
    if limit < _LEAST_OPEN_FILES:
        yield Finding(
            check="open files", level="warn", found=f"a process may open {limit} files at the most",
            remedy="raise the hard limit to 65536: ulimit -Hn, or nofile in /etc/security/limits.conf",
        )  # fmt: skip
    else:
        yield Finding(check="open files", level="ok", found=f"a process may open {limit}")


def check_gpus(facts: Facts) -> Iterator[Finding]:
    """What the driver shows torch can use; several need NCCL to work together."""
    gpus = facts.machine.gpus
    if gpus is None:
        yield Finding(check="gpu", level="ok", found="no NVIDIA GPU: stages run on the CPU")
        return
    if gpus.driver_trouble:
        yield Finding(
            check="gpu", level="error", found=f"the NVIDIA driver cannot be asked: {gpus.driver_trouble}",
            remedy="make `nvidia-smi` list the GPUs: install the driver anew, restart the machine after an update, "
            "start a container with --gpus all; where there is no GPU, take nvidia-smi off PATH",
        )  # fmt: skip
        return
    names = ", ".join(f"{gpus.names.count(name)}x {name}" for name in dict.fromkeys(gpus.names))
    if gpus.trouble:
        yield Finding(
            check="gpu", level="error", found=f"{names}, and torch cannot be asked: {gpus.trouble}",
            remedy="pip install --requirement requirements.lock",
        )  # fmt: skip
    elif gpus.cuda is None:
        yield Finding(
            check="gpu", level="error", found=f"{names}, and a torch that was built without CUDA",
            remedy="pip install torch from an index that has CUDA builds: see pytorch.org/get-started",
        )  # fmt: skip
    elif gpus.seen < len(gpus.names):
        yield Finding(
            check="gpu", level="error",
            found=f"{names}, driver {gpus.driver}; torch (CUDA {gpus.cuda}) can use {gpus.seen} of {len(gpus.names)}",
            remedy=f"install a driver that serves CUDA {gpus.cuda}, or look at CUDA_VISIBLE_DEVICES",
        )  # fmt: skip
    elif gpus.nccl is None and len(gpus.names) > 1:
        yield Finding(
            check="gpu", level="error", found=f"{names}, driver {gpus.driver}, and a torch without NCCL",
            remedy="pip install torch's own build for CUDA, which brings NCCL; till then num_workers=1",
        )  # fmt: skip
    else:
        yield Finding(
            check="gpu", level="ok", found=f"{names}, driver {gpus.driver}, CUDA {gpus.cuda}, NCCL {gpus.nccl}"
        )


def _size(count: int) -> str:
    return f"{count / _GIB:,.1f} GiB"
