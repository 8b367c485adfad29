"""A directory in a shared temporary directory that no other account can enter."""

import contextlib
import os
import stat
import tempfile
from pathlib import Path


def private_folder(parent: str | None = None) -> Path:
    """``posttrain-UID`` in the temporary directory, with mode 0700: one for all processes of this account.

    Where another account has taken that name, one with a random end, which its owner finds again.

    Args:
        parent: another directory to put it in.
    """
    place, name = Path(parent or tempfile.gettempdir()), f"posttrain-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        (place / name).mkdir(mode=0o700)
    own = sorted(path for path in place.glob(f"{name}*") if _is_own(path))
    return own[0] if own else Path(tempfile.mkdtemp(prefix=f"{name}-", dir=place))


def dvc_state() -> str:
    """Where DVC keeps pickles of a repository's state: it would be below ``/var/tmp``, where it lets everyone write."""
    return str(private_folder() / "dvc")


def _is_own(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):  # another account may take its own away meanwhile
        found = path.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return False
