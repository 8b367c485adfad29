"""Ancestors and descendants of an artifact, and the nearest ancestor of a given stage."""

import json
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property

from lineage.artifact import SOURCE, Kind
from lineage.graph.index import ARTIFACT, Index, newest_where, reached
from lineage.graph.places import Indexed, artifact_at, node_key
from lineage.record.exports import Export
from lineage.store import Entry, InputRecord, Manifest, Store, rows_read


def nearest_ancestor(store: Store, stage: str, fingerprint: str, wanted: str) -> str | None:
    """Fingerprint of the nearest ancestor of an artifact that the stage ``wanted`` produced; None: there is none.

    Follows sources that are outputs of this store; stops at missing manifests.
    """
    waiting = deque([(stage, fingerprint)])
    seen = set(waiting)
    while waiting:
        manifest = store.entry(*waiting.popleft()).readable_manifest()
        for record in manifest.inputs.values() if manifest else ():
            parent = _made_by_stage(store, record)
            if parent and parent[0] == wanted:
                return parent[1]
            if parent and parent not in seen:
                seen.add(parent)
                waiting.append(parent)
    return None


def _made_by_stage(store: Store, record: InputRecord) -> tuple[str, str] | None:
    if record.source is None:
        return record.artifact, record.fingerprint
    place = artifact_at(store.root, record.source.path)
    manifest = store.entry(*place).readable_manifest() if place else None
    return (manifest.stage, manifest.fingerprint) if manifest else None


@dataclass(frozen=True, kw_only=True)
class Edge:
    """An input of a node. A source that names an output of this store has that artifact as its input ``output``."""

    parent: str
    child: str
    slot: str


@dataclass(kw_only=True)
class Node:
    """An artifact or a source.

    Args:
        fingerprint: in full if known, else its first 16 digits.
        entry: directory of an artifact; None: it is a source.
        manifest: None: it is a source, or the artifact is missing.
        record: for a source: its record in the newest manifest that reads it.
        labels: licence and consent labels of the node and all its ancestors.
        rows: for a source: number of rows that a data stage counted.
        exports: forms in which it left the store.
    """

    id: str
    fingerprint: str
    entry: Entry | None = None
    manifest: Manifest | None = None
    record: InputRecord | None = None
    labels: set[str] = field(default_factory=set)
    aliases: list[str] = field(default_factory=list)
    rows: int | None = None
    exports: list[Export] = field(default_factory=list)

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
        place = {
            "stage": self.name, "path": str(entry.path), "state": "present" if self.manifest else "missing",
            "exports": [asdict(each) for each in self.exports],
        }  # fmt: skip
        if self.manifest is None:
            return {**place, "artifact_kind": None}
        shown = (
            "pipeline", "method", "recipe", "metrics", "output_digest", "files", "provenance", "mlflow_run_id",
            "certificate",
        )  # fmt: skip
        fields = asdict(self.manifest)
        return {**place, "artifact_kind": fields["produces"], **{name: fields[name] for name in shown}}

    def _source(self) -> dict[str, object]:
        source = self.record.source if self.record else None
        return {
            "artifact_kind": source.kind if source else None, "source": asdict(source) if source else None,
            "digest": self.record.digest if self.record else None, "rows": self.rows,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A node and all its ancestors.

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
        """The edges to a node from its inputs."""
        return self._above.get(node, [])

    def add(self, edge: Edge) -> None:
        self.edges.append(edge)
        self._above.setdefault(edge.child, []).append(edge)

    def path(self, start: str, end: str) -> list[str]:
        """The shortest path from a node to a descendant, both included; empty: there is none."""
        below = self.toward(end)
        if start not in below:
            return []
        steps = [start]
        while steps[-1] != end:
            steps.append(below[steps[-1]])
        return steps

    def toward(self, end: str) -> dict[str, str]:
        """Each ancestor of ``end``, and itself -> the next node on the shortest path to it."""
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
        """The object that ``lineage --json`` prints and the HTML page draws."""
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
    """The graph of a node, read from the current manifests of its ancestors."""
    graph = Graph(root=node, nodes={node: _node(index, node)})
    waiting = deque([node])
    while waiting:
        child = graph.nodes[waiting.popleft()]
        for slot, record in _inputs(index, child):
            parent = node_key(record.artifact, record.fingerprint)
            graph.add(Edge(parent=parent, child=child.id, slot=slot))
            if parent not in graph.nodes:
                graph.nodes[parent] = _node(index, parent, record)
                waiting.append(parent)
    _pass_labels_down(graph)
    return graph


def _inputs(index: Index, child: Node) -> Iterator[tuple[str, InputRecord]]:
    """Slots and records of a node's inputs."""
    if child.manifest:
        yield from child.manifest.inputs.items()
    elif child.record and child.record.source:
        made = artifact_at(index.store, child.record.source.path)
        if made:
            yield "output", InputRecord(artifact=made[0], fingerprint=made[1], digest=None)


def _node(index: Index, node: str, record: InputRecord | None = None) -> Node:
    """A node from its own manifest, or else from the input record of a child."""
    name, _, digits = node.rpartition("@")
    if name.startswith(SOURCE):
        known = record or next(iter(index.records(node)), None)
        return Node(
            id=node, fingerprint=known.fingerprint if known else digits, record=known, labels=index.labels(node)
        )
    entry = index.entry(node)
    manifest = entry.readable_manifest()
    fingerprint = manifest.fingerprint if manifest else record.fingerprint if record else digits
    aliases = sorted(alias for alias, model in index.aliases.items() if model == node)
    exports = [each for each in index.exports if each.node == node]
    return Node(id=node, fingerprint=fingerprint, entry=entry, manifest=manifest, aliases=aliases, exports=exports)


def _pass_labels_down(graph: Graph) -> None:
    """Adds the labels of all ancestors to every node, and the row count to every source."""
    own = {node.id: set(node.labels) for node in graph.nodes.values()}
    for node in graph.nodes.values():
        node.labels.update(*(own[each] for each in graph.toward(node.id)))
    for edge in graph.edges:
        reader, source = graph.nodes[edge.child], graph.nodes[edge.parent]
        if _is_rows(source) and reader.manifest and reader.entry:
            source.rows = rows_read(reader.manifest, reader.entry.output).get(edge.slot, source.rows)


def _is_rows(node: Node) -> bool:
    """Whether it is a source of raw rows, whose count the metrics of its data stage hold."""
    return node.record is not None and (node.record.source is None or node.record.source.kind == Kind.ROWS)


MODELS = ("checkpoint", "reward_model")  # kinds that are registered as versions of their pipeline's model


class Descendants:
    """The finished descendants of ``nodes``, and the nodes ``within`` themselves."""

    _count = 0

    def __init__(self, index: Index, nodes: Iterable[str], within: Iterable[str] = ()) -> None:
        Descendants._count += 1
        self._index = index
        self._table = f"below_{Descendants._count}"
        index.keep(f"CREATE TEMP TABLE {self._table} (id INTEGER PRIMARY KEY, place INTEGER, end)")
        index.keep(
            f"INSERT INTO {self._table} {reached('parent', 'child')} "
            "SELECT node, place, end FROM artifact WHERE node IN (SELECT id FROM reached UNION "
            "SELECT node.id FROM json_each(?) JOIN node ON node.key = value)",
            json.dumps(list(nodes)),
            json.dumps(list(within)),
        )

    def newest(self, limit: int = -1) -> list[Indexed]:
        """The newest artifacts, newest first; -1: all."""
        ids = f"SELECT id FROM {self._table} ORDER BY end DESC LIMIT {limit}"
        return self._index.artifacts(f"{ARTIFACT} WHERE node IN ({ids}) ORDER BY end DESC, key")

    @cached_property
    def counts(self) -> list[tuple[str, str, str, int]]:
        """Pipeline, stage, kind and number of artifacts, stages ordered by their first artifact."""
        sql = (
            "SELECT pipeline, stage, kind, sum(count) FROM place JOIN "
            f"(SELECT place, count(*) AS count, min(end) AS first FROM {self._table} GROUP BY 1) ON place.id = place "
            "GROUP BY 1, 2, 3 ORDER BY 1, min(first), 2"
        )
        return [(pipeline, stage, kind, int(count)) for pipeline, stage, kind, count in self._index.rows(sql)]

    @cached_property
    def num_models(self) -> int:
        """Number of checkpoints and reward models."""
        return sum(count for _, _, kind, count in self.counts if kind in MODELS)

    def holds(self, node: str) -> bool:
        sql = f"SELECT 1 FROM {self._table} WHERE id = (SELECT id FROM node WHERE key = ?)"
        return bool(self._index.rows(sql, node))

    def newest_outside(self, pipeline: str, stage: str) -> Indexed | None:
        """The newest artifact of a pipeline's stage that is not among them."""
        sql = newest_where(f"node NOT IN (SELECT id FROM {self._table})")
        return next(iter(self._index.artifacts(sql, pipeline, stage)), None)
