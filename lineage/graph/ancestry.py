"""The ancestry of an artifact as a graph, read from the manifests themselves."""

from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from lineage.artifact import SOURCE, Kind
from lineage.errors import ArtifactError
from lineage.graph.index import Index
from lineage.graph.places import artifact_at, node_key
from lineage.manifest import InputRecord, Manifest
from lineage.store import Entry


@dataclass(frozen=True, kw_only=True)
class Edge:
    """What filled a slot. From a source to the artifact of this store whose output it names, the slot is ``output``."""

    parent: str
    child: str
    slot: str


@dataclass(kw_only=True)
class Node:
    """An artifact or a source.

    Args:
        fingerprint: whole where it is known, else its first 16 digits.
        entry: of an artifact; None: it is a source.
        manifest: None: a source, or the artifact is gone.
        given: of a source: what the newest manifest here that reads it says of it.
        labels: licence and consent of itself and of all upstream.
        rows: of a source: how many a data stage found.
    """

    id: str
    fingerprint: str
    entry: Entry | None = None
    manifest: Manifest | None = None
    given: InputRecord | None = None
    labels: set[str] = field(default_factory=set)
    aliases: list[str] = field(default_factory=list)
    rows: int | None = None

    @property
    def name(self) -> str:
        return self.id.rpartition("@")[0]

    def to_dict(self) -> dict[str, object]:
        common = {
            "id": self.id, "kind": "stage" if self.entry else "source", "name": self.name,
            "fingerprint": self.fingerprint, "labels": sorted(self.labels), "aliases": self.aliases,
        }  # fmt: skip
        return {**common, **(self._stage(self.entry) if self.entry else self._source())}

    def _stage(self, entry: Entry) -> dict[str, object]:
        place = {"stage": self.name, "path": str(entry.path), "state": "present" if self.manifest else "missing"}
        if self.manifest is None:
            return {**place, "artifact_kind": None}
        shown = (
            "pipeline", "method", "recipe", "metrics", "output_digest", "files", "provenance", "mlflow_run_id",
            "certificate",
        )  # fmt: skip
        fields = asdict(self.manifest)
        return {**place, "artifact_kind": fields["produces"], **{name: fields[name] for name in shown}}

    def _source(self) -> dict[str, object]:
        source = self.given.source if self.given else None
        return {
            "artifact_kind": source.kind if source else None, "source": asdict(source) if source else None,
            "digest": self.given.digest if self.given else None, "rows": self.rows,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A node and all that it was made from.

    Args:
        nodes: by id, in order of their distance from the root.
    """

    root: str
    nodes: dict[str, Node] = field(default_factory=dict)
    edges: list[Edge] = field(default_factory=list)
    _above: dict[str, list[Edge]] = field(default_factory=dict)  # child -> edges from its parents

    @property
    def labels(self) -> set[str]:
        """Licence and consent labels of the whole ancestry."""
        return self.nodes[self.root].labels

    def parents(self, node: str) -> list[Edge]:
        """The edges that end at a node."""
        return self._above.get(node, [])

    def add(self, edge: Edge) -> None:
        self.edges.append(edge)
        self._above.setdefault(edge.child, []).append(edge)

    def path(self, start: str, end: str) -> list[str]:
        """The shortest way from a node to one that was made from it, both included; empty: there is none."""
        below = self.toward(end)
        if start not in below:
            return []
        steps = [start]
        while steps[-1] != end:
            steps.append(below[steps[-1]])
        return steps

    def toward(self, end: str) -> dict[str, str]:
        """Each node that ``end`` was made from, and itself -> the next one on the shortest way to it."""
        below = {end: end}
        waiting = deque([end])
        while waiting:
            child = waiting.popleft()
            for edge in self.parents(child):
                if edge.parent not in below:
                    below[edge.parent] = child
                    waiting.append(edge.parent)
        return below

    def to_dict(self, ref: str) -> dict[str, object]:
        """The object that ``lineage --json`` prints, and the page draws."""
        edges: list[dict[str, str]] = [
            {"from": edge.parent, "to": edge.child, "slot": edge.slot} for edge in self.edges
        ]
        return {
            "ref": ref,
            "root": self.root,
            "nodes": [each.to_dict() for each in self.nodes.values()],
            "edges": edges,
        }


def ancestry(index: Index, node: str) -> Graph:
    """Walks up from a node, from manifest to manifest: what was made again is seen as it is now."""
    graph = Graph(root=node, nodes={node: _node(index, node)})
    waiting = deque([node])
    while waiting:
        child = graph.nodes[waiting.popleft()]
        for slot, given in _inputs(index, child):
            parent = node_key(given.artifact, given.fingerprint)
            graph.add(Edge(parent=parent, child=child.id, slot=slot))
            if parent not in graph.nodes:
                graph.nodes[parent] = _node(index, parent, given)
                waiting.append(parent)
    _pass_labels_down(graph)
    return graph


def _inputs(index: Index, child: Node) -> Iterator[tuple[str, InputRecord]]:
    """Slot and record of all that a node was made from."""
    if child.manifest:
        yield from child.manifest.inputs.items()
    elif child.given and child.given.source:
        made = artifact_at(index.store, child.given.source.path)
        if made:
            yield "output", InputRecord(artifact=made[0], fingerprint=made[1], digest=None)


def _node(index: Index, node: str, given: InputRecord | None = None) -> Node:
    """A node as its own manifest has it, or else as that of a child."""
    name, _, digits = node.rpartition("@")
    if name.startswith(SOURCE):
        known = given or next(iter(index.records(node)), None)
        return Node(id=node, fingerprint=known.fingerprint if known else digits, given=known, labels=index.labels(node))
    entry = index.entry(node)
    try:
        manifest = entry.manifest()
    except ArtifactError:  # it cannot be read: as good as gone
        manifest = None
    fingerprint = manifest.fingerprint if manifest else given.fingerprint if given else digits
    aliases = sorted(alias for alias, holder in index.aliases.items() if holder == node)
    return Node(id=node, fingerprint=fingerprint, entry=entry, manifest=manifest, aliases=aliases)


def _pass_labels_down(graph: Graph) -> None:
    """Every node gets the labels of all that it was made from; a source the count of its rows."""
    own = {node.id: set(node.labels) for node in graph.nodes.values()}
    for node in graph.nodes.values():
        node.labels.update(*(own[each] for each in graph.toward(node.id)))
    for edge in graph.edges:
        reader, source = graph.nodes[edge.child].manifest, graph.nodes[edge.parent]
        if _is_rows(source) and reader and "rows" in reader.metrics:
            source.rows = int(reader.metrics["rows"])


def _is_rows(node: Node) -> bool:
    """Whether it is a source that a data stage counts the rows of: no model, and no data that other rows joined."""
    return node.given is not None and (node.given.source is None or node.given.source.kind == Kind.ROWS)
