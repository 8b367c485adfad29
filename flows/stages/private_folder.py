"""A directory in a shared temporary directory that no other account can enter."""

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from lineage.errors import ConfigError


def private_folder(parent: str | None = None) -> Path:
    """``posttrain-UID`` in the temporary directory, with mode 0700: one for all processes of this account.

    Args:
        parent: another directory to put it in.

    Raises:
        ConfigError: what has this name there belongs to another account, or lets others in.
    """
    folder = Path(parent or tempfile.gettempdir()) / f"posttrain-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    mode = stat.S_IMODE(found.st_mode)
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not mode & 0o077:
        return folder
    what = "directory" if stat.S_ISDIR(found.st_mode) else "symbolic link or file"
    raise ConfigError(
        f"{folder} is a {what} of user {found.st_uid} with mode {mode:04o}; a directory of user {os.getuid()} with "
        "mode 0700 is accepted, since others who can write there could hold up every run; remove it, or set TMPDIR to "
        "a directory of yours"
    )
