"""The source files that a method is made of, and their digest: recorded with each output, never identity."""

import ast
import importlib.util
from functools import cache
from pathlib import Path

from lineage.digest import digest_file, digest_of

OURS = ("tasks", "lineage")


def code_digest(module: str) -> str:
    """Digest of a module's file and of every module that it imports, at any depth, from its own package or ours."""
    files: dict[str, Path] = {}
    _collect(module, files, packages={module.partition(".")[0], *OURS})
    return digest_of({name: digest_file(path) for name, path in sorted(files.items())})


def _collect(module: str, files: dict[str, Path], packages: set[str]) -> None:
    path = _source_file(module)
    if path is None or module in files:
        return
    files[module] = path
    for name in _imports(path):
        if name.partition(".")[0] in packages:
            _collect(name, files, packages)


@cache
def _source_file(module: str) -> Path | None:
    """Where a module's source lies, found by its path: asking for the spec of ``a.b.c`` would import ``a.b``."""
    package, *rest = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    if not rest:
        return Path(spec.origin)
    place = Path(spec.origin).parent.joinpath(*rest)
    candidates = (place.with_suffix(".py"), place / "__init__.py")
    return next((path for path in candidates if path.is_file()), None)


@cache
def _imports(path: Path) -> tuple[str, ...]:
    """Every module that a file names in an import, inside functions too."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return tuple(names)
