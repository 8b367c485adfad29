"""Which models may run their own Python files: only those whose source pins a commit and sets trust_remote_code."""

from pathlib import Path

_TRUSTED: set[Path] = set()  # directories of models, in this process


def trust(directory: Path) -> None:
    """Lets the code in a model's directory run in this process, as its source, or that of its base, requests."""
    _TRUSTED.add(directory.resolve())


def trusts(directory: Path) -> bool:
    """Whether the code in a model's directory may run."""
    return directory.resolve() in _TRUSTED


def local_options(directory: Path) -> dict[str, bool]:
    """Arguments of ``from_pretrained`` for a directory: nothing is downloaded, no code runs unless it is trusted."""
    return {"trust_remote_code": trusts(directory), "local_files_only": True}
