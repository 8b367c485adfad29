"""Licence and consent: whether a model may be used for money."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from lineage.artifact import SOURCE
from lineage.errors import GateError
from lineage.fingerprint import short
from lineage.graph.ancestry import Graph


def all_labels(graph: Graph, stated: Mapping[str, Iterable[str]]) -> dict[str, set[str]]:
    """Node of a source -> its labels: those that any manifest records, and those that are stated now.

    What is stated of a source is so of the same bytes under another name.


    Args:
        stated: name of a source -> its labels in the configuration.
    """
    sources = [node for node in graph.nodes.values() if node.entry is None]
    now: dict[str, set[str]] = {}
    for node in sources:
        now.setdefault(short(node.fingerprint), set()).update(stated.get(node.name.removeprefix(SOURCE), ()))
    return {node.id: node.labels | now[short(node.fingerprint)] for node in sources}


def require_commercial(graph: Graph, labels: Mapping[str, set[str]], patterns: Sequence[str], alias: str) -> None:
    """Refuses a model that was made from anything with a non-commercial label.

    Raises:
        GateError: names the label and the way from the source to the model; or what is missing, so that nobody knows.
    """
    # A champion has the labels of all that it was made from: name where they come from before it.
    for source, found in sorted(labels.items(), key=lambda item: bool(graph.parents(item[0]))):
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
