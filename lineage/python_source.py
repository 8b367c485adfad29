"""A Python function of the user's: where its code lies and what it is now. Its code is read here, never run."""

import os
import symtable
from dataclasses import dataclass
from pathlib import Path
from platform import python_version

from lineage.code import code_digest_now, source_file
from lineage.digest import digest_file
from lineage.errors import ConfigError

PYTHON = "python:"  # before the name of a function
_ACCEPTED = "accepted: python:PACKAGE.MODULE.FUNCTION, and python:FILE.py:FUNCTION with allow_code: true"


@dataclass(frozen=True, kw_only=True)
class PythonFunction:
    """A function that yields rows, or scores answers.

    Args:
        module: its dotted name; None where ``file`` is stated.
        file: that holds it, on its own: it is imported as no part of a package.
    """

    name: str
    module: str | None = None
    file: Path | None = None

    def absolute(self) -> str:
        """The path of a source that means the same for a process that was started elsewhere."""
        if self.file:
            return f"{PYTHON}{os.path.abspath(self.file)}:{self.name}"
        return f"{PYTHON}{self.module}.{self.name}"


def python_function(path: str) -> PythonFunction:
    """The function that a path names.

    Raises:
        ConfigError: it is of no form that is accepted.
    """
    stated = path.removeprefix(PYTHON)
    file, _, name = stated.rpartition(":")
    if file:
        found = PythonFunction(name=name, file=Path(os.path.expanduser(os.path.expandvars(file))))
        is_well_formed = file.endswith(".py")
    else:
        module, _, name = stated.rpartition(".")
        found = PythonFunction(name=name, module=module)
        is_well_formed = all(part.isidentifier() for part in module.split("."))
    if not (is_well_formed and name.isidentifier()):
        raise ConfigError(f"path={path} names no function; {_ACCEPTED}")
    return found


def code_of(function: PythonFunction, takes: str = "takes no argument and yields mappings") -> str:
    """Digest of a function's code: of its file, or of its module and of what that imports of its own package.

    Args:
        takes: what a function of this use does, for the message that refuses a name.

    Raises:
        ConfigError: there is no such module or file, it is not written in Python, or defines no such function.
    """
    source_file.cache_clear()  # the module may have been written since a plan looked for it
    file = function.file or source_file(str(function.module))
    if file is None or file.suffix != ".py":
        raise ConfigError(
            f"there is no Python source of a module {function.module}; accepted: a module that is written in Python, "
            "of a package that is installed, in this folder, or on PYTHONPATH; check the name"
        )
    if not file.is_file():
        raise ConfigError(f"{file}: no such file; {_ACCEPTED}")
    try:
        _require_defined(function.name, file, takes)
        return digest_file(file) if function.module is None else code_digest_now(function.module)
    except SyntaxError as error:
        raise ConfigError(
            f"{error.filename or file}:{error.lineno}: not Python: {error.msg}; Python {python_version()} is accepted; "
            "mend the line"
        ) from error


def _require_defined(name: str, file: Path, takes: str) -> None:
    code = symtable.symtable(file.read_bytes(), str(file), "exec")  # type: ignore[arg-type]  # it takes bytes
    defined = {each.get_name() for each in code.get_symbols() if each.is_assigned() or each.is_imported()}
    if name not in defined:
        functions = sorted(each.get_name() for each in code.get_children() if each.get_type() == "function")
        raise ConfigError(
            f"{file} defines no {name}; functions in it: {', '.join(functions) or 'none'}; name one that {takes}"
        )
