"""Between: two ancestries side by side, and what sets them apart, the most likely cause first."""

from collections.abc import Iterator
from dataclasses import dataclass

from lineage.graph.ancestry import Graph, Node, ancestry
from lineage.graph.diff_causes import Cause, causes, grouped
from lineage.graph.index import Index


@dataclass(frozen=True, kw_only=True)
class Diff:
    """The answer.

    Args:
        causes: what differs, the most likely cause of other results first.
        metrics: stage -> metric -> value in each: the consequence. None: not measured there.
    """

    first: Node
    second: Node
    causes: list[Cause]
    metrics: dict[str, dict[str, tuple[float | None, float | None]]]

    @property
    def same_fingerprint(self) -> bool:
        return self.first.fingerprint == self.second.fingerprint

    @property
    def same_output(self) -> bool | None:
        """Whether the outputs are equal byte for byte; None: one is no finished artifact."""
        if not self.first.manifest or not self.second.manifest:
            return None
        return self.first.manifest.output_digest == self.second.manifest.output_digest

    def to_dict(self) -> dict[str, object]:
        """The object that ``diff --json`` prints."""
        return {
            "a": self.first.id,
            "b": self.second.id,
            "same_fingerprint": self.same_fingerprint,
            "same_output": self.same_output,
            "differences": [
                {"what": cause.what, "stages": list(cause.stages), "text": cause.text} for cause in self.causes
            ],
            "metrics": {
                stage: {name: list(pair) for name, pair in each.items()} for stage, each in self.metrics.items()
            },
        }


def diff(index: Index, first: str, second: str) -> Diff:
    """Compares the ancestries of two nodes."""
    left, right = ancestry(index, first), ancestry(index, second)
    pairs = _pairs(left, right)
    found = [cause for place, pair in enumerate(pairs) for cause in causes(index, left, right, pair, place == 0)]
    found += _unpaired(left, right, pairs)
    metrics = {}
    for a, b in pairs:
        changed = _metrics(left.nodes[a], right.nodes[b])
        if changed:
            metrics[left.nodes[a].name] = changed
    return Diff(first=left.nodes[first], second=right.nodes[second], causes=list(grouped(found)), metrics=metrics)


def _pairs(left: Graph, right: Graph) -> list[tuple[str, str]]:
    """Nodes that stand for each other, the nearest to the roots first.

    From the roots upward by slot, where the names are equal or neither occurs on the other side; what is left by name.
    """
    names = {node.name for node in left.nodes.values()}, {node.name for node in right.nodes.values()}
    pairs = [(left.root, right.root)]
    for a, b in pairs:  # grows on the way
        below = {edge.slot: edge.parent for edge in right.parents(b)}
        for edge in left.parents(a):
            other = below.get(edge.slot)
            if other and _fit(left.nodes[edge.parent].name, right.nodes[other].name, names):
                _add(pairs, edge.parent, other)
    for node in left.nodes:
        for other in right.nodes:
            if left.nodes[node].name == right.nodes[other].name:
                _add(pairs, node, other)
    return pairs


def _fit(a: str, b: str, names: tuple[set[str], set[str]]) -> bool:
    return a == b or (a not in names[1] and b not in names[0])


def _add(pairs: list[tuple[str, str]], a: str, b: str) -> None:
    if all(a != first and b != second for first, second in pairs):
        pairs.append((a, b))


def _unpaired(left: Graph, right: Graph, pairs: list[tuple[str, str]]) -> Iterator[Cause]:
    for graph, side, paired in ((left, "A", {a for a, _ in pairs}), (right, "B", {b for _, b in pairs})):
        for node in graph.nodes.values():
            if node.id not in paired:
                yield Cause(what="graph", text=f"only {side} was made with {node.id}", stages=(node.name,))


def _metrics(a: Node, b: Node) -> dict[str, tuple[float | None, float | None]]:
    """What was measured otherwise; times are not measurements of the result."""
    if not a.manifest or not b.manifest:
        return {}
    before, after = a.manifest.metrics, b.manifest.metrics
    return {
        name: (before.get(name), after.get(name))
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name) and "second" not in name
    }
