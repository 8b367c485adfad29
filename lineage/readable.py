"""Who may read what was written: some libraries, as safetensors, let nobody but the writer, whatever the umask says."""

import contextlib
from pathlib import Path

_READ = 0o444


def readable_as(directory: Path, like: Path) -> None:
    """Lets every file below be read by those who may read another one, that was just written in the plain way.

    A file of another owner, or on a file system without permissions, stays as it is.
    """
    wanted = like.stat().st_mode & _READ
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file() and not path.is_symlink() and wanted & ~path.stat().st_mode:
                path.chmod(path.stat().st_mode | wanted)
