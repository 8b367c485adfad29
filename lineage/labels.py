"""Licence and consent: whether a model may be used for money."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from lineage.artifact import SOURCE
from lineage.errors import GateError
from lineage.graph.ancestry import Graph


def all_labels(graph: Graph, stated: Mapping[str, Iterable[str]]) -> dict[str, set[str]]:
    """Node of a source -> its labels: those that any manifest records, and those that are stated now.

    Args:
        stated: name of a source -> its labels in the configuration.
    """
    return {
        node.id: node.labels | set(stated.get(node.name.removeprefix(SOURCE), ()))
        for node in graph.nodes.values()
        if node.entry is None
    }


def require_commercial(graph: Graph, labels: Mapping[str, set[str]], patterns: Sequence[str], alias: str) -> None:
    """Refuses a model that was made from anything with a non-commercial label.

    Raises:
        GateError: names the label and the way from the source to the model; or what is missing, so that nobody knows.
    """
    for source, found in labels.items():
        for label in sorted(found):
            if any(fnmatchcase(label.lower(), pattern.lower()) for pattern in patterns):
                way = " -> ".join(graph.path(source, graph.root))
                raise GateError(
                    f"alias {alias} is commercial, and {source} has the label {label}: {way}; "
                    "give it a model that was trained without that source (posttrain impact "
                    f"label:{label} says what that costs)"
                )
    for node in graph.nodes.values():
        if node.entry and node.manifest is None:
            way = " -> ".join(graph.path(node.id, graph.root))
            raise GateError(
                f"alias {alias} is commercial, and nobody knows what {node.id} was made from: "
                f"{node.entry.path} is not in the store: {way}; restore it, or train the model anew"
            )
