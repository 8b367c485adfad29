"""Which models may run Python files of their own: those whose source pins a commit and asks for it, and no others."""

from pathlib import Path

_TRUSTED: set[Path] = set()  # by this process, for what it was given


def trust(directory: Path) -> None:
    """Lets the code in a model's directory run in this process: its source, or that of its base, asks for it."""
    _TRUSTED.add(directory.resolve())


def trusts(directory: Path) -> bool:
    """Whether the code in a model's directory may run."""
    return directory.resolve() in _TRUSTED


def local_options(directory: Path) -> dict[str, bool]:
    """Arguments of ``from_pretrained`` for a directory: nothing is downloaded, no code runs unless it is trusted."""
    return {"trust_remote_code": trusts(directory), "local_files_only": True}
