"""What comes before what: a stage after all that it reads, and training after all data."""

import graphlib
from collections.abc import Collection, Mapping, Sequence

from lineage.errors import ConfigError

Upstream = Mapping[str, Sequence[str]]  # stage -> the stages that it reads


def execution_order(upstream: Upstream, data: Collection[str], training: Collection[str]) -> list[str]:
    """Names of stages, each after those that come before it.

    Args:
        data, training: the stages that make rows, and those that take optimizer steps.

    Raises:
        ConfigError: the stages form a cycle.
    """
    try:
        graphlib.TopologicalSorter(upstream).prepare()
    except graphlib.CycleError as error:
        cycle = " -> ".join(reversed(error.args[1]))
        raise ConfigError(
            f"the stages form a cycle: {cycle} (each needs the next); "
            "change one of their inputs so that every chain ends at a source"
        ) from error
    needs = {name: before(name, upstream, data, training) for name in upstream}
    return list(graphlib.TopologicalSorter({name: sorted(needs[name]) for name in upstream}).static_order())


def before(name: str, upstream: Upstream, data: Collection[str], training: Collection[str]) -> set[str]:
    """All that a stage waits for: what it reads, and what reads sources alone, so that a bad row is found first.

    One that trains waits for all other data too, unless that is made with what it trains.
    """
    if not upstream[name]:
        return set()
    first = {other for other, read in upstream.items() if not read}
    rows = {other for other in data if name not in behind(other, upstream)} - {name} if name in training else set()
    return {*upstream[name], *first, *rows}


def behind(name: str, upstream: Upstream) -> set[str]:
    """Every stage that a stage was made from, however far."""
    return {other for parent in upstream[name] for other in (parent, *behind(parent, upstream))}
