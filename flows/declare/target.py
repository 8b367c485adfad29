"""What a dotted path of the configuration names: its source is read first, and only what fits is imported."""

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

from lineage.code import full_name, parsed, source_file
from lineage.errors import ConfigError


def target_class(path: str, where: str, bases: tuple[type, ...], refusal: str) -> type:
    """The class that ``package.module.Class`` names.

    A module that is not loaded is imported only where its source has a class statement of that name, or imports it, and
    the class derives from one of ``bases``; modules on the way to them are read, not imported.

    Args:
        refusal: what a message says of a class that derives from none of them.
    Raises:
        ConfigError: there is none, it derives from none of ``bases``, or its module cannot be imported.
    """
    module, _, name = path.rpartition(".")
    if module not in sys.modules:
        source_file.cache_clear()  # it may have been written since
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
    """What a dotted path names; its module is imported.

    Raises:
        ConfigError: nothing that can be imported.
    """
    module, _, name = path.rpartition(".")
    try:
        found: object = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever a module of the user's raises when it is imported
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
    """Where a module imports a name from, or the bases of its class of that name."""
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
