"""Free space on a store's file system, and one error for the many ways in which libraries report a full disk."""

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

from lineage.errors import PipelineError
from lineage.store import Entry

# Messages of safetensors, which is written in Rust, and of torch.save, which does not say why a write failed.
_SIGNS = (
    f"os error {errno.ENOSPC}", f"os error {errno.EDQUOT}", "PytorchStreamWriter failed writing", "iostream error",
)  # fmt: skip


def free_bytes(path: Path) -> int:
    """Free space where a directory is or will be created."""
    there = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    return shutil.disk_usage(there).free


def gigabytes(count: int) -> str:
    """A size in GB (10^9 bytes), or in MB or kB below one GB or MB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1e3:.1f} kB"


@contextlib.contextmanager
def explain_full_disk(directory: Path) -> Iterator[None]:
    """Replaces every error of a full disk by one that says what to do.

    Args:
        directory: of a stage, in the store.

    Raises:
        PipelineError: the disk is full; other errors are raised unchanged.
    """
    try:
        yield
    except PipelineError:
        raise
    except Exception as error:
        sign = _sign(error)
        if sign is None:
            raise
        raise PipelineError(f"the disk of {directory} is full ({sign}); {_kept(directory)}") from error


def _sign(error: BaseException) -> str | None:
    """The first line of the error in a chain that reports a full disk; None: there is none."""
    seen: BaseException | None = error
    while seen is not None:
        full = isinstance(seen, OSError) and seen.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or any(sign in str(seen) for sign in _SIGNS):
            return f"{type(seen).__name__}: {seen}".partition("\n")[0]
        seen = seen.__cause__ or seen.__context__
    return None


def _kept(directory: Path) -> str:
    """What a later run resumes from, and how to free space."""
    last = Entry(directory).checkpoints.newest()
    kept = f"its checkpoint of step {last.step} is kept" if last else "it has no checkpoint"
    return f"{kept}; free space (posttrain gc shows what may be deleted) and run again"
