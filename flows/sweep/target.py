"""Builds what ``_target_`` names, such as a sampler of Optuna's, with its arguments checked."""

import importlib
import inspect
from collections.abc import Mapping

from flows.declare.pipeline import nearest
from lineage.errors import ConfigError


def build(node: Mapping[str, object], where: str, base: type) -> object:
    """An instance of the class that a node names; arguments that are such nodes are built first.

    Raises:
        ConfigError: no such class, none of ``base``, an argument that it does not take or does not accept.
    """
    target = str(node.get("_target_"))
    cls = dotted(target, f"{where}._target_")
    if not (isinstance(cls, type) and issubclass(cls, base)) or inspect.isabstract(cls):
        raise ConfigError(f"{where}._target_={target}: is no {base.__module__.split('.')[0]} {base.__name__}")
    accepted = [name for name in inspect.signature(cls).parameters if name not in ("args", "kwargs")]
    given = {name: value for name, value in node.items() if name != "_target_"}
    for name in given:
        if name not in accepted:
            raise ConfigError(
                f"{where}.{name}: unknown argument of {target}; accepted: {', '.join(accepted)}"
                f"{nearest(name, accepted)}"
            )
    arguments = {
        name: build(value, f"{where}.{name}", object) if isinstance(value, Mapping) and "_target_" in value else value
        for name, value in given.items()
    }
    try:
        return cls(**arguments)
    except Exception as error:  # whatever a class of Optuna's or of the user's raises for its arguments
        raise ConfigError(f"{where}: {target} does not take {given} ({error})") from error


def dotted(path: str, where: str) -> object:
    """What a dotted path names.

    Raises:
        ConfigError: nothing that can be imported.
    """
    module, _, name = path.rpartition(".")
    try:
        found: object = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever a module of the user's raises when it is imported
        raise ConfigError(
            f"{where}={path}: cannot be imported ({error}); give package.module.name, "
            "of a package that is installed, in this folder, or on PYTHONPATH"
        ) from error
    return found
