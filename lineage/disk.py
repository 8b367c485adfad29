"""Room on a store's file system, and the many ways in which libraries say that there is none."""

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

from lineage.errors import PipelineError
from lineage.store import Entry

# Of safetensors, which is written in Rust, and of torch.save, which does not say why a write failed.
_SIGNS = (
    f"os error {errno.ENOSPC}", f"os error {errno.EDQUOT}", "PytorchStreamWriter failed writing", "iostream error",
)  # fmt: skip


def free_bytes(path: Path) -> int:
    """What may still be written where a directory is, or will be."""
    there = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    return shutil.disk_usage(there).free


def gigabytes(count: int) -> str:
    """In units of 10^9 bytes, or of a thousandth or a millionth of that where it is less than one."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1e3:.1f} kB"


@contextlib.contextmanager
def full_disk_named(directory: Path) -> Iterator[None]:
    """Turns every error that says that the disk is full into one that says what to do.

    Args:
        directory: of a stage, in the store.

    Raises:
        PipelineError: of such an error; others are raised as they are.
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
    """The first line that says so, of an error or of one that it came from."""
    seen: BaseException | None = error
    while seen is not None:
        full = isinstance(seen, OSError) and seen.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or any(sign in str(seen) for sign in _SIGNS):
            return f"{type(seen).__name__}: {seen}".partition("\n")[0]
        seen = seen.__cause__ or seen.__context__
    return None


def _kept(directory: Path) -> str:
    """What a run that comes later goes on from."""
    last = Entry(directory).checkpoints.newest()
    kept = f"its checkpoint of step {last.step} is kept" if last else "it has no checkpoint"
    return f"{kept}; free space (posttrain gc shows what may go) and run again"
