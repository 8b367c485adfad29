"""The source files that a method is made of: their digest, which each output records, and the import of its class."""

import ast
import contextlib
import hashlib
import importlib.util
import json
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path

from lineage.errors import ConfigError
from lineage.filesystem.digest import digest_of
from lineage.filesystem.files import atomic_write, user_cache

OURS = ("tasks", "lineage")
_IMPORTS = "imports.json"  # in the user's cache

_PARSING = threading.Lock()  # Python 3.11 counts how deep it parses once for all threads, and fails where two differ


def code_digest(module: str) -> str:
    """Digest of a module and of all modules that it imports, directly or not, from its own package or ours.

    Raises:
        ConfigError: the module has no source file.
    """
    return digest_of(code_files(module))


def code_files(module: str) -> dict[str, str]:
    """The modules of ``code_digest``, each with the digest of its file."""
    packages = frozenset({module.partition(".")[0], *OURS})
    digests: dict[str, str] = {}
    waiting, seen = [module], {module}
    while waiting:
        name = waiting.pop()
        path = source_file(name)
        if path is not None:
            digests[name], imported = _digest_and_imports(name, path, packages, *_version(path))
            new = imported - seen
            seen |= new
            waiting += new
        elif name == module:
            raise ConfigError(
                f"there is no Python source of the module {module}, so that no digest says which code is executed; a "
                "module of a package that is installed, in this folder, or on PYTHONPATH is accepted; restore its file"
            )
    _PARSED.keep()
    return dict(sorted(digests.items()))


def code_digest_now(module: str) -> str:
    """``code_digest`` of the files as they are now: they may have changed since this command started."""
    source_file.cache_clear()
    return code_digest(module)


@cache
def source_file(module: str) -> Path | None:
    """The file of a module, found without importing its parents, as ``find_spec("a.b.c")`` would."""
    package, *rest = module.split(".")
    above = source_file(module.rpartition(".")[0]) if len(rest) > 1 else None
    if above is not None and above.name != "__init__.py":
        return None  # a name in a file: most of what is imported
    spec = importlib.util.find_spec(package)
    if spec is None:
        return None
    if spec.submodule_search_locations is None:  # a single file
        file = Path(str(spec.origin))  # of a module that was imported before, which may be gone
        return file if not rest and spec.has_location and file.is_file() else None
    for root in spec.submodule_search_locations:  # several, for a package without __init__.py
        place = Path(root, *rest)
        for candidate in (place.with_suffix(".py"), place / "__init__.py"):
            if candidate.is_file() and (rest or candidate.name == "__init__.py"):
                return candidate
    return None


def _version(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


@lru_cache(maxsize=4096)  # each stage asks again, and only files that changed are read again
def _digest_and_imports(
    module: str, path: Path, packages: frozenset[str], *_version: int
) -> tuple[str, frozenset[str]]:  # fmt: skip
    """Digest of a file, and the full names of all modules of the packages that it imports, inside functions too."""
    source = path.read_bytes()
    digest = hashlib.sha256(source).hexdigest()
    names = _PARSED.imports(f"{module} {path.name} {digest}", lambda: _imports(source, module, path))
    return digest, frozenset(each for each in names if each.partition(".")[0] in packages)


def _imports(source: bytes, module: str, path: Path) -> list[str]:
    names: list[str] = []
    for node in _statements(_parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = full_name(node, module, path)
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return sorted(set(names))


class _Parsed:
    """The imports of source files by digest, kept in the user's cache: a command parses a hundred files in 0.3 s."""

    _MOST = 5000  # files: then it starts anew

    def __init__(self) -> None:
        self._known: dict[str, list[str]] | None = None
        self._is_new = False

    def imports(self, key: str, parse: Callable[[], list[str]]) -> list[str]:
        if self._known is None:
            self._known = {}
            with contextlib.suppress(OSError, ValueError):
                found = json.loads(user_cache(_IMPORTS).read_text())
                self._known = found if isinstance(found, dict) and len(found) < self._MOST else {}
        if key not in self._known:
            self._known[key] = parse()
            self._is_new = True
        return self._known[key]

    def keep(self) -> None:
        """Writes what was parsed; of two processes at once the last one wins, and the other parses again."""
        if self._is_new:
            self._is_new = False
            with contextlib.suppress(OSError):  # such as a home that cannot be written
                atomic_write(user_cache(_IMPORTS), json.dumps(self._known))


_PARSED = _Parsed()


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Every statement at any depth; visits a third of the nodes of ``ast.walk``."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for node in getattr(tree, field, None) or ():
            yield node
            yield from _statements(node)


def full_name(node: ast.ImportFrom, module: str, path: Path) -> str:
    """The full name of the module of a ``from`` import, absolute or relative."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    parents = package[: len(package) - node.level + 1] if node.level else []
    return ".".join([*parents, *([node.module] if node.module else [])])


def parsed(path: Path) -> ast.Module:
    """The syntax tree of a source file."""
    return _parse(path.read_bytes())


def _parse(source: bytes) -> ast.Module:
    with _PARSING:
        return ast.parse(source)


def target_class(path: str, where: str, bases: tuple[type, ...], refusal: str) -> type:
    """Imports the class ``package.module.Class``.

    A module is imported only if its source defines or imports a class of that name that derives from one of ``bases``;
    this is checked by parsing the source files, without importing them.

    Args:
        refusal: error message for a class that derives from none of them.

    Raises:
        ConfigError: there is no such class, it derives from none of ``bases``, or its module cannot be imported.
    """
    module, _, name = path.rpartition(".")
    if module not in sys.modules:
        source_file.cache_clear()  # it may have been created since
        try:
            file = source_file(module)  # an empty name is a ValueError
            derives = _derives(module, name, bases, seen=set())
        except (ValueError, OSError, SyntaxError) as error:
            raise _not_importable(path, where, error) from error
        if file is None:
            raise _not_importable(path, where, ImportError(f"there is no Python source of a module {module}"))
        if not derives:
            raise ConfigError(f"{where}={path}: {refusal} ({file} was read, and not imported)")
    found = dotted(path, where)
    if not (isinstance(found, type) and issubclass(found, bases)):
        raise ConfigError(f"{where}={path}: {refusal}")
    return found


def dotted(path: str, where: str) -> object:
    """Imports what a dotted path names (ConfigError: it cannot be imported)."""
    module, _, name = path.rpartition(".")
    try:
        imported = import_module(module)
        if module in ("flows", *OURS) and name not in vars(imported):
            raise ImportError(f"{module} is a package of posttrain's; name a module of yours otherwise")
        found: object = getattr(imported, name)
    except Exception as error:  # importing a user's module may raise anything
        raise _not_importable(path, where, error) from error
    return found


def _not_importable(path: str, where: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"{where}={path}: cannot be imported ({error}); give package.module.Class, "
        "of a package that is installed, in this folder, or on PYTHONPATH"
    )


def _derives(module: str, name: str, bases: tuple[type, ...], seen: set[tuple[str, str]]) -> bool:
    if module in sys.modules:
        found = getattr(sys.modules[module], name, None)
        return isinstance(found, type) and issubclass(found, bases)
    file = source_file(module) if module and (module, name) not in seen else None
    if file is None or file.suffix != ".py":
        return False
    seen.add((module, name))
    origins = (origin.rpartition(".") for origin in _origins(name, module, file))
    return any(_derives(place, base, bases, seen) for place, _, base in origins)


def _origins(name: str, module: str, file: Path) -> Iterator[str]:
    """Dotted paths of the origin of an imported name, or of the bases of the class of that name."""
    nodes, imports = list(ast.walk(parsed(file))), dict[str, str]()
    for node in nodes:
        if isinstance(node, ast.Import):
            imports |= {each.asname: each.name for each in node.names if each.asname}
            imports |= {top: top for top in (each.name.partition(".")[0] for each in node.names if not each.asname)}
        elif isinstance(node, ast.ImportFrom):
            imports |= {each.asname or each.name: f"{full_name(node, module, file)}.{each.name}" for each in node.names}
    if name in imports:
        yield imports[name]
    for node in nodes:
        for base in node.bases if isinstance(node, ast.ClassDef) and node.name == name else []:
            first, dot, rest = ast.unparse(base.value if isinstance(base, ast.Subscript) else base).partition(".")
            yield imports.get(first, f"{module}.{first}") + dot + rest
