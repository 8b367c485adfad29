"""Rows from a user's Python function, which takes no argument and yields mappings."""

import importlib
import importlib.util
import inspect
import json
import reprlib
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from itertools import count, islice

import orjson

from lineage.artifact import Source
from lineage.code import source_file
from lineage.errors import DataError
from lineage.source.source_checks import PythonFunction, python_function
from tasks.data.reading.chunk import Broken, Chunk, Row, Rows, refused

_ROWS_PER_CHUNK = 1000
_ACCEPTED = "a function that takes no argument and yields mappings of column names to values"


def read_function(source: Source) -> Iterator[Chunk]:
    """The rows of a function, in the order in which it yields them; what it prints goes to standard error.

    Raises:
        DataError: it cannot be imported or called, or raises; the message names the line that did.
    """
    rows = _yielded(python_function(source.path), source.path)
    for first in count(step=_ROWS_PER_CHUNK):
        with redirect_stdout(sys.stderr):  # standard output is the command's own, such as its JSON
            items = tuple(
                _item(fields, f"{source.path}[{first + place}]")
                for place, fields in enumerate(islice(rows, _ROWS_PER_CHUNK))
            )
        if not items:
            return
        yield Chunk(rows=partial(_rows, source.path, first, items))


def _rows(name: str, first: int, items: Sequence[bytes | Broken]) -> Rows:
    """Parses rows that were encoded as JSON, so that any yielded value can be sent to another process."""
    for index, item in enumerate(items, start=first):
        yield item if isinstance(item, Broken) else Row(fields=orjson.loads(item), where=f"{name}[{index}]")


def _item(fields: object, where: str) -> bytes | Broken:
    if not isinstance(fields, Mapping):
        found = f"the function yielded {type(fields).__name__}"
        return Broken(where=where, found=found, reason="not a mapping", raw=reprlib.repr(fields), accepted=_ACCEPTED)
    try:
        raw = orjson.dumps(dict(fields), option=orjson.OPT_SERIALIZE_NUMPY)
        if b"null" in raw:  # as orjson writes NaN too
            json.dumps(dict(fields), allow_nan=False, default=_plain)
    except Exception as error:  # a value or a key that JSON cannot represent, or an error in the user's own mapping
        return Broken(where=where, found=f"not JSON: {error}", reason="not JSON", raw=reprlib.repr(fields))
    return raw


def _plain(value: object) -> object:
    """A value that JSON has no type for, as numbers or text."""
    import numpy as np

    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


def _yielded(function: PythonFunction, path: str) -> Iterator[object]:
    try:
        call = load_function(function, path, _ACCEPTED)
        try:
            inspect.signature(call).bind()
        except TypeError as error:
            raise refused(path, f"{error} in {inspect.signature(call)}", _ACCEPTED, "give each a default") from error
        rows = call()
        if not isinstance(rows, Iterable) or isinstance(rows, str | bytes | Mapping):
            raise refused(path, f"it returned {type(rows).__name__}", _ACCEPTED, "yield the rows")
        yield from rows
    except DataError:
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        found = f"{place_of_error(error, function)}{type(error).__name__}: {error}"
        raise DataError(f"{path}: {found}; correct the function") from error


def load_function(function: PythonFunction, path: str, accepted: str) -> Callable[..., object]:
    """Imports a user's function (DataError: it cannot be called)."""
    if function.file:
        spec = importlib.util.spec_from_file_location(function.file.stem, function.file)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(str(function.module))
    found: object = vars(module).get(function.name)
    if not callable(found):
        raise refused(path, f"it is {'nothing' if found is None else type(found).__name__}", accepted, "name one")
    return found


def place_of_error(error: BaseException, function: PythonFunction) -> str:
    """``file:line: `` of the last line of the function's file that was running; empty where none was."""
    own = str(function.file or source_file(str(function.module)))
    lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename == own]
    return f"{own}:{lines[-1]}: " if lines else ""
