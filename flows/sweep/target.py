"""Builds what ``_target_`` names, such as a sampler of Optuna's, with its arguments checked."""

import inspect
from collections.abc import Mapping

from flows.declare.config import target_class
from flows.declare.pipeline import nearest
from lineage.errors import ConfigError


def build(node: Mapping[str, object], where: str, bases: tuple[type, ...], parts: tuple[type, ...]) -> object:
    """An instance of the class that a node names; arguments that are such nodes are built first.

    Args:
        bases: it must derive from one of them.
        parts: an argument, at every depth, must derive from one of these.
    Raises:
        ConfigError: no such class, or none of these, or an argument that it does not take or does not accept.
    """
    target = str(node.get("_target_"))
    refusal = f"is no {bases[0].__module__.split('.')[0]} {' or '.join(base.__name__ for base in bases)}"
    cls = target_class(target, f"{where}._target_", bases, refusal)
    if inspect.isabstract(cls):
        raise ConfigError(f"{where}._target_={target}: {refusal}")
    accepted = [name for name in inspect.signature(cls).parameters if name not in ("args", "kwargs")]
    given = {name: value for name, value in node.items() if name != "_target_"}
    for name in given:
        if name not in accepted:
            raise ConfigError(
                f"{where}.{name}: unknown argument of {target}; accepted: {', '.join(accepted)}"
                f"{nearest(name, accepted)}"
            )
    arguments = {
        name: build(value, f"{where}.{name}", parts, parts)
        if isinstance(value, Mapping) and "_target_" in value
        else value
        for name, value in given.items()
    }
    try:
        built: object = cls(**arguments)
    except Exception as error:  # whatever a class of Optuna's or of the user's raises for its arguments
        raise ConfigError(f"{where}: {target} does not take {given} ({error})") from error
    return built
