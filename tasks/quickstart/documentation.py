"""Reads the documentation of the running interpreter's standard library: one ``Document`` per public object.

``documents()`` runs this file in a fresh isolated interpreter: what is imported, patched or set in
the caller's process cannot change a row, and what the imports do there cannot harm the caller.
So there this file imports nothing but the standard library.
"""

import importlib
import inspect
import json
import os
import pkgutil
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from types import ModuleType

# Import prints, opens a window or a browser, or is test code; or documents another module's functions again.
_SKIPPED = frozenset(
    {
        "__main__", "antigravity", "distutils", "ensurepip", "genericpath", "idlelib", "lib2to3", "msilib", "nt",
        "ntpath", "nturl2path", "posix", "pydoc_data", "test", "this", "tkinter", "turtle", "turtledemo", "venv",
    }
)  # fmt: skip
# Implementation modules whose public name is not theirs without the underscore.
_OWNERS = {
    "posixpath": "os", "genericpath": "os", "ntpath": "os", "posix": "os", "nt": "os", "_pyio": "io",
    "_frozen_importlib": "importlib", "_frozen_importlib_external": "importlib", "_collections_abc": "collections",
    "_blake2": "hashlib", "_sha3": "hashlib", "_md5": "hashlib", "pyexpat": "xml", "_pydecimal": "decimal",
}  # fmt: skip
_PLAIN = (type(None), bool, int, float, str, bytes)


@dataclass(frozen=True, kw_only=True)
class Document:
    """What the interpreter says about one object.

    Args:
        group: the top-level module that owns the object (``topic/NAME`` for a topic of ``help()``).
        kind: ``function``, ``method``, ``class``, ``module`` or ``topic``.
        name: as one would write it, such as ``os.path.join`` or ``str.join``.
        parameters: each as in a signature, such as ``key=None``; None where there is no signature.
    """

    group: str
    kind: str
    name: str
    parameters: tuple[str, ...] | None
    text: str

    @property
    def signature(self) -> str:
        return "" if self.parameters is None else f"({', '.join(self.parameters)})"


@cache
def documents() -> tuple[Document, ...]:
    """Every document of this interpreter, sorted by name; no text occurs twice."""
    from lineage.record.environment import run_answering

    command = [sys.executable, "-I", "-S", __file__]  # no PYTHON* variables, no site-packages
    environment = os.environ | {"LC_ALL": "C.UTF-8", "TERM": "dumb", "COLUMNS": "80"}
    run = run_answering(command, env=environment)
    run.check_returncode()
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    return tuple(
        Document(**{**row, "parameters": None if row["parameters"] is None else tuple(row["parameters"])})
        for row in rows
    )


def _modules(name: str) -> Iterator[ModuleType]:
    try:
        module = importlib.import_module(name)
    except ImportError:  # of another platform, or left out of this build
        return
    yield module
    for child in pkgutil.iter_modules(getattr(module, "__path__", ())):
        if not child.name.startswith(("_", "test")):
            yield from _modules(f"{name}.{child.name}")


def _owner(value: object, module: ModuleType) -> str:
    """The top-level public module that a value belongs to, wherever it is exported."""
    top = str(getattr(value, "__module__", None) or module.__name__).partition(".")[0]
    if top in _OWNERS:
        return _OWNERS[top]
    public = top.lstrip("_")
    if public != top:
        return public if public in sys.stdlib_module_names else module.__name__.partition(".")[0]
    return top


def _shown(value: object) -> str:
    """A default as one may print it anywhere: no address, no path, no environment, no order of a set."""
    if isinstance(value, str) and any(place in value for place in (sys.prefix, sys.base_prefix, sys.executable)):
        return "..."
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, tuple) and all(isinstance(item, _PLAIN) for item in value):
        return repr(value)
    if inspect.isclass(value) or inspect.isroutine(value):
        return str(value.__name__)
    return "..."


def _parameters(value: object) -> tuple[str, ...] | None:
    try:
        found = list(inspect.signature(value).parameters.values())  # type: ignore[arg-type]
    except (ValueError, TypeError, AttributeError):  # the last for a curses that has no screen yet
        return None
    marks: dict[object, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    if found and found[0].name in ("self", "cls", "$self") and not inspect.isclass(value):
        found = found[1:]
    return tuple(
        marks.get(p.kind, "") + p.name + ("" if p.default is p.empty else f"={_shown(p.default)}") for p in found
    )


def _members(module: ModuleType) -> Iterator[tuple[str, object]]:
    """Public functions and classes of a module with their names, each class followed by its methods."""
    for name in sorted(getattr(module, "__all__", None) or [n for n in dir(module) if not n.startswith("_")]):
        value = getattr(module, name, None)
        if not (inspect.isroutine(value) or inspect.isclass(value)):
            continue
        yield name, value
        if inspect.isclass(value):
            methods = [key for key in sorted(vars(value)) if not key.startswith("_")]
            yield from ((f"{name}.{key}", m) for key in methods if inspect.isroutine(m := getattr(value, key, None)))


def _of_module(module: ModuleType) -> Iterator[Document]:
    top = module.__name__.partition(".")[0]
    group = _OWNERS.get(top, top)
    prefix = {"posixpath": "os.path.", "builtins": ""}.get(module.__name__, f"{module.__name__}.")
    if module.__doc__:
        yield Document(group=group, kind="module", name=module.__name__, parameters=None, text=module.__doc__)
    owned = False
    for name, value in _members(module):
        if "." not in name:
            owned = _owner(value, module) == group
        text = getattr(value, "__doc__", None)
        if owned and isinstance(text, str):
            kind = "class" if inspect.isclass(value) else "method" if "." in name else "function"
            yield Document(group=group, kind=kind, name=prefix + name, parameters=_parameters(value), text=text)


def _read_interpreter() -> list[Document]:
    """Documents of all modules and topics; of equal texts the one with the shortest path stays."""
    from pydoc_data.topics import topics  # type: ignore[import-not-found, unused-ignore]

    tops = sorted(n for n in sys.stdlib_module_names if not n.startswith("_") and n not in _SKIPPED)
    modules = sorted((m for top in tops for m in _modules(top)), key=lambda m: (m.__name__.count("."), m.__name__))
    found = [document for module in modules for document in _of_module(module)]
    found += [
        Document(group=f"topic/{name}", kind="topic", name=name, parameters=None, text=text)
        for name, text in sorted(topics.items())
    ]
    unique: dict[str, Document] = {}
    for document in found:
        text = inspect.cleandoc(document.text).strip()
        if text:
            unique.setdefault(text, document)
    return sorted(
        (Document(**{**asdict(document), "text": text}) for text, document in unique.items()), key=lambda d: d.name
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # deprecated modules are documented too
    with open(int(sys.argv[1]), "w", encoding="utf-8") as answer:
        answer.writelines(json.dumps(asdict(item)) + "\n" for item in _read_interpreter())
