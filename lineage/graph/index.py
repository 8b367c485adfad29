"""The index of a store: ``<store>/index.sqlite``, a cache of the links between manifests that can be deleted."""

import json
import logging
import sqlite3
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from types import TracebackType

from lineage.artifact import SOURCE
from lineage.fingerprint import short
from lineage.graph.index_file import is_damage, open_database, rebuilt
from lineage.graph.index_queries import ARTIFACT, Indexed, newest_where, reached
from lineage.graph.places import node_key
from lineage.manifest import InputRecord, SourceRecord
from lineage.promotions import Event, read_events, stacks
from lineage.secrets import redacted
from lineage.stated_labels import stated_labels
from lineage.store import Entry, Store

logger = logging.getLogger(__name__)


class Index:
    """Questions about the links of a store, as it was when this was opened. Nodes go by their id (``sft@0123...``)."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self._database = open_database(store)
        self._kept: list[tuple[str, tuple[str, ...]]] = []  # temporary tables
        broken = self.rows("SELECT stage, directory FROM entry WHERE state = 'broken' LIMIT 1")
        if broken:
            (count,) = self.rows("SELECT count(*) FROM entry WHERE state = 'broken'")[0]
            logger.warning("store=%s broken_manifests=%s first=%s: left out", store, count, "/".join(broken[0]))

    def __enter__(self) -> "Index":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._database.close()

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Alias -> the artifact that holds it now."""
        return {alias: nodes[-1] for alias, nodes in self.alias_holders.items()}

    @cached_property
    def alias_holders(self) -> dict[str, list[str]]:
        """Alias -> the artifacts that held it, the present one last."""
        found = stacks(read_events(self.store))
        return {alias: [self._holder(event) for event in events] for alias, events in found.items() if events}

    def _holder(self, event: Event) -> str:
        """The promotion names the stage, because two stages may share a fingerprint."""
        digits = short(event.fingerprint or "")
        artifacts = [node for node in self.with_prefix(digits) if self.artifact(node)]
        return node_key(event.stage or "", digits) if event.stage else next(iter(artifacts), node_key("", digits))

    def entry(self, node: str) -> Entry:
        """The directory of an artifact."""
        stage, _, digits = node.rpartition("@")
        return Store(self.store).entry(stage, digits)

    def is_empty(self) -> bool:
        return not self.rows("SELECT 1 FROM artifact LIMIT 1")

    def knows(self, node: str) -> bool:
        """Whether a manifest names it: as its own, or as what it was made from."""
        return bool(self.rows("SELECT 1 FROM node WHERE key = ?", node))

    def artifact(self, node: str) -> Indexed | None:
        """A finished artifact; None: it is a source, or gone."""
        return next(iter(self.artifacts(f"{ARTIFACT} WHERE node = (SELECT id FROM node WHERE key = ?)", node)), None)

    def with_prefix(self, digits: str) -> list[str]:
        """Artifacts and sources whose fingerprint starts so."""
        rows = self.rows("SELECT key FROM node WHERE digits >= ? AND digits < ? ORDER BY key", digits, digits + "g")
        return [str(key) for (key,) in rows]

    def newest(self, pipeline: str, stage: str) -> Indexed | None:
        """The artifact of a pipeline's stage that was finished last."""
        return next(iter(self.artifacts(newest_where("TRUE"), pipeline, stage)), None)

    def newest_of_each_stage(self, pipeline: str) -> list[Indexed]:
        """Per stage of a pipeline the artifact that was finished last, the last of them first."""
        stages = self.rows("SELECT DISTINCT stage FROM place WHERE pipeline = ?", pipeline)
        found = [self.newest(pipeline, stage) for (stage,) in stages]
        return sorted((each for each in found if each), key=lambda each: (-each.end, each.id))

    def places(self) -> list[tuple[str, str]]:
        """Every pipeline and stage that has a finished artifact."""
        rows = self.rows("SELECT DISTINCT pipeline, stage FROM place ORDER BY 1, 2")
        return [(pipeline, stage) for pipeline, stage in rows]

    def sources(self, name: str | None = None) -> list[str]:
        """Nodes of the sources, or of those of one name, the newest recorded last."""
        sql = (
            "SELECT above.key FROM node AS above JOIN edge ON edge.parent = above.id "
            "LEFT JOIN artifact ON artifact.node = edge.child WHERE above.name {} "
            "GROUP BY above.id ORDER BY max(artifact.end), above.key"
        )
        if name is None:
            return [str(key) for (key,) in self.rows(sql.format("GLOB 'source:*'"))]
        return [str(key) for (key,) in self.rows(sql.format("= ?"), SOURCE + name)]

    def records(self, source: str) -> list[InputRecord]:
        """What the manifests say of a source, each variant once: paths and labels may have changed, content not."""
        rows = self.rows(
            "SELECT text FROM record JOIN node ON node.id = record.node WHERE key = ? ORDER BY text", source
        )
        return [_record(text) for (text,) in rows]

    def labels(self, source: str) -> set[str]:
        """All that was ever said of the licence and consent of a source's bytes, under whatever name they were read."""
        digits = source.rpartition("@")[2]
        rows = self.rows(
            "SELECT DISTINCT label.value FROM node JOIN record ON record.node = node.id, "
            "json_each(record.text, '$.source.labels') AS label WHERE node.digits = ?",
            digits,
        )
        return {label for (label,) in rows} | self._stated.get(digits, set())

    def sources_with_label(self, wanted: str) -> list[str]:
        """The sources that have a label, its case ignored as in the patterns of licences."""
        rows = self.rows(
            "SELECT DISTINCT node.digits, label.value FROM record JOIN node ON node.id = record.node, "
            "json_each(record.text, '$.source.labels') AS label"
        )
        stated = [(digits, label) for digits, labels in self._stated.items() for label in labels]
        found = {digits for digits, label in [*rows, *stated] if label.lower() == wanted.lower()}
        sql = "SELECT node.key FROM json_each(?) JOIN node ON digits = value WHERE name GLOB 'source:*' ORDER BY 1"
        return [key for (key,) in self.rows(sql, json.dumps(sorted(found)))]

    @cached_property
    def _stated(self) -> dict[str, set[str]]:
        return stated_labels(self.store)

    def descendants(self, nodes: Iterable[str]) -> list[Indexed]:
        """The finished artifacts that nodes went into, at any distance, in the order in which they were finished."""
        return self._reached(nodes, "parent", "child")

    def ancestors(self, nodes: Iterable[str]) -> list[Indexed]:
        """The finished artifacts that nodes were made from, in the order in which they were finished."""
        return self._reached(nodes, "child", "parent")

    def _reached(self, nodes: Iterable[str], start: str, end: str) -> list[Indexed]:
        sql = f"{reached(start, end)} {ARTIFACT} WHERE node IN reached ORDER BY end, key"
        return self.artifacts(sql, json.dumps(list(nodes)))

    def children(self, node: str) -> list[tuple[str, str]]:
        """Node and slot of all that was made from a node directly."""
        return self._next(node, "parent", "child")

    def parents(self, node: str) -> list[tuple[str, str]]:
        """Node and slot of all that a node was made from directly."""
        return self._next(node, "child", "parent")

    def _next(self, node: str, start: str, end: str) -> list[tuple[str, str]]:
        sql = (
            f"SELECT other.key, edge.slot FROM node JOIN edge ON edge.{start} = node.id "
            f"JOIN node AS other ON other.id = edge.{end} WHERE node.key = ? ORDER BY 1, 2"
        )
        return [(other, slot) for other, slot in self.rows(sql, node)]

    def sources_that_say(self, text: str) -> list[str]:
        """The sources of which a manifest records this text: a path, a digest."""
        sql = "SELECT DISTINCT key FROM record JOIN node ON node.id = record.node WHERE instr(text, ?) ORDER BY 1"
        return [key for (key,) in self.rows(sql, json.dumps(text, ensure_ascii=False)[1:-1])]

    def artifacts(self, sql: str, *values: str) -> list[Indexed]:
        """Artifacts by a query that begins with ``ARTIFACT``."""
        return [Indexed._make(row) for row in self.rows(sql, *values)]

    def keep(self, table: str, *values: str) -> None:
        """Makes a temporary table, to ask of it more than once."""
        self.rows(table, *values)
        self._kept.append((table, values))

    def rows(self, sql: str, *values: str) -> list[tuple[str, ...]]:
        """The rows of a query."""
        try:
            return self._database.execute(sql, values).fetchall()
        except sqlite3.DatabaseError as error:  # a page that the opening did not read is damaged
            if not is_damage(error):
                raise
            self._database = rebuilt(self.store)
            for table, given in self._kept:
                self._database.execute(table, given)
            return self._database.execute(sql, values).fetchall()


def _record(text: str) -> InputRecord:
    fields = json.loads(redacted(text))
    source = fields.pop("source")
    return InputRecord(**fields, source=SourceRecord(**source) if source else None)
