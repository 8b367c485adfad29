"""Keeps our packages apart from a user's own of the same names: ``tasks``, ``flows``, ``lineage``, ``conf``.

A wheel has ours inside this folder, so that no other package overwrites them, and a .pth file that puts the folder last
on the path of its environment, where whatever a user has of these names wins. In our own processes ours win (``first``,
``hold``). What a user's code imports there and ours lack is looked up in the user's module of that name.
"""

import importlib
import os
import sys
from collections.abc import Iterator
from functools import partial
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType

_HERE = Path(__file__).absolute().parent
ROOT = str(_HERE if (_HERE / "flows").is_dir() else _HERE.parent)  # of the packages: in a wheel, else in a checkout
PACKAGES = ("lineage", "tasks", "flows")
_USERS: dict[str, ModuleType] = {}  # file -> the user's module


def first() -> None:
    """Puts our packages first on the path of this process and of those that it starts, and the current folder last."""
    if sys.path[:1] != [ROOT]:
        sys.path[:] = [ROOT, *(each for each in sys.path if each != ROOT)]
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([ROOT, *(each for each in inherited if each and each != ROOT)])
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # for the user's own code
    hold()


def hold() -> None:
    """Imports our packages, so that no folder that comes before them on the path later, as in Ray's workers, counts."""
    for name in PACKAGES:
        module = importlib.import_module(name)
        if not isinstance(module.__path__, _Folders):
            module.__path__ = _Folders(module.__path__)
            vars(module)["__getattr__"] = partial(_from_users, name, module.__path__[0])


class _Folders(list[str]):
    """The folders of a package: ours, then the user's of that name."""

    def __iter__(self) -> Iterator[str]:
        yield from super().__iter__()
        yield from (each for folder in _elsewhere() if os.path.isdir(each := f"{folder}/{Path(self[0]).name}"))


def _elsewhere() -> list[str]:
    return [each for each in sys.path if os.path.abspath(each) != ROOT]


def _from_users(name: str, ours: str, attribute: str) -> object:
    """An attribute that our package lacks, from the user's module of its name."""
    if not attribute.startswith("__") and PathFinder.find_spec(f"{name}.{attribute}", [ours]) is None:
        spec = PathFinder.find_spec(name, _elsewhere())
        if spec and spec.loader and spec.origin:
            if spec.origin not in _USERS:
                _USERS[spec.origin] = module_from_spec(spec)
                spec.loader.exec_module(_USERS[spec.origin])
            if hasattr(_USERS[spec.origin], attribute):
                return getattr(_USERS[spec.origin], attribute)
    raise AttributeError(f"module {name!r} of posttrain has no attribute {attribute!r}")
