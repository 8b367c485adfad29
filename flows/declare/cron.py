"""Cron expressions, read by the parser that Prefect reads them with."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_MODULE = "posttrain_croniter"
_FIELDS = 5
_RANDOM = {"r", "h"}  # croniter's own extensions, which Prefect refuses


def is_cron(expression: str) -> bool:
    """Whether it is of five fields, or a name such as ``@daily``; Prefect takes it; and its time ever comes."""
    croniter = _croniter()
    if len(expression.split()) != (1 if expression.startswith("@") else _FIELDS):
        return False  # croniter takes seconds and years too
    if not croniter.croniter.is_valid(expression) or _RANDOM & {part.casefold() for part in expression.split()}:
        return False
    try:
        croniter.croniter(expression).get_next()
    except croniter.CroniterError:  # such as of 30 February
        return False
    return True


def _croniter() -> ModuleType:
    """Prefect's copy of croniter, without the second that the import of prefect takes: a plan is made without it."""
    if _MODULE not in sys.modules:
        prefect = importlib.util.find_spec("prefect")
        assert prefect is not None and prefect.submodule_search_locations
        file = Path(prefect.submodule_search_locations[0], "_vendor", "croniter", "croniter.py")
        spec = importlib.util.spec_from_file_location(_MODULE, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[_MODULE] = module
        spec.loader.exec_module(module)
    return sys.modules[_MODULE]
