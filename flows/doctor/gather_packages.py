"""Reads what is installed: names and versions alone, nothing is imported."""

import platform
import re
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from flows.doctor.facts import Packages

_CHECKOUT = Path(__file__).parents[2]
_LOCKED = re.compile(r"^[A-Za-z0-9][^\s=]*==[^#\n]+", re.MULTILINE)


def gather_packages() -> Packages:
    """Of this environment, beside what the code asks for."""
    found: dict[str, metadata.Distribution] = {}
    for each in metadata.distributions():
        found.setdefault(canonicalize_name(each.metadata["Name"]), each)  # import takes the first on the path too
    python_wanted, wanted = _wanted()
    lock = _CHECKOUT / "requirements.lock"
    return Packages(
        python=platform.python_version(),
        python_wanted=python_wanted,
        installed={name: each.version for name, each in found.items()},
        wanted=wanted,
        locked=locked(lock.read_text()) if lock.exists() else {},
        required={name: each.requires or [] for name, each in found.items()},
    )


def locked(text: str) -> dict[str, str]:
    """Name -> version, of a file as ``uv pip compile`` writes it; without what is for other systems."""
    stated = [Requirement(line) for line in _LOCKED.findall(text)]
    here = [each for each in stated if each.marker is None or each.marker.evaluate()]
    return {canonicalize_name(each.name): next(iter(each.specifier)).version for each in here}


def _wanted() -> tuple[str, list[str]]:
    """Python and packages: of the checkout, which may be newer than what was installed from it; else as installed."""
    project = _CHECKOUT / "pyproject.toml"
    if project.exists():
        stated = tomllib.loads(project.read_text())["project"]
        return stated["requires-python"], stated["dependencies"]
    installed = metadata.distribution("posttrain")
    return installed.metadata["Requires-Python"], [each for each in installed.requires or [] if "extra ==" not in each]
