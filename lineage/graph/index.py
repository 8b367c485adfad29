"""The index of a store: ``<store>/index.sqlite``, a disposable cache of the links between manifests.

It is updated whenever it is opened, and rebuilt if it is damaged or of another version. It uses a rollback journal,
since a write-ahead log does not work on network file systems.
"""

import json
import logging
import os
import sqlite3
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from types import TracebackType

from lineage.artifact import SOURCE
from lineage.errors import ArtifactError
from lineage.fingerprint import canonical_json, short
from lineage.graph.places import Indexed, artifact_at, node_key
from lineage.promotions import Event, read_events, stacks
from lineage.record.exports import Export, read_exports
from lineage.record.labels import recorded_labels
from lineage.secrets import redacted
from lineage.store import ENTRY_NAME, MANIFEST, RESERVED, Entry, InputRecord, Manifest, SourceRecord, Store

logger = logging.getLogger(__name__)

INDEX = "index.sqlite"
_WAIT_SECONDS = 300.0  # for another process that builds the index
# The file is not an index. All other errors are those of its location: read-only, full, locked for too long.
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_OTHER_TABLES = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CONSTRAINT)


def open_database(store: Path) -> sqlite3.Connection:
    """Opens and updates the index of a store; in memory if it cannot be written."""
    if not store.is_dir():
        return _opened(":memory:", store)
    try:
        return _opened(str(store / INDEX), store)
    except sqlite3.Error as error:
        if is_damage(error) or _code(error) in _OTHER_TABLES:
            return rebuilt(store)
        logger.info("store=%s index=memory reason=%s", store, error)
        return _opened(":memory:", store)


def rebuilt(store: Path) -> sqlite3.Connection:
    """Replaces a damaged index by a new one."""
    logger.info("store=%s index=damaged action=rebuild", store)
    try:
        for name in (INDEX, INDEX + "-journal"):
            (store / name).unlink(missing_ok=True)
        return _opened(str(store / INDEX), store)
    except (OSError, sqlite3.Error):
        return _opened(":memory:", store)


def is_damage(error: sqlite3.Error) -> bool:
    """Whether the content of the index file is damaged, so that a rebuild helps."""
    return _code(error) in _DAMAGE


def _code(error: sqlite3.Error) -> int:
    return error.sqlite_errorcode & 0xFF  # the low byte: without the extended code


def _opened(path: str, store: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=_WAIT_SECONDS, isolation_level=None)
    try:
        database.execute("PRAGMA cache_size = -65536")
        database.execute("PRAGMA temp_store = MEMORY")
        if _version(database) != VERSION:
            _create(database)
        refresh(database, store)
    except BaseException:
        with suppress(sqlite3.Error):
            database.close()
        raise
    return database


def _create(database: sqlite3.Connection) -> None:
    """Creates the tables; SQLite refuses a file with other tables."""
    database.execute("BEGIN IMMEDIATE")
    if _version(database) != VERSION:  # else another process has created them meanwhile
        for statement in SCHEMA.split(";"):
            database.execute(statement)
        database.execute(f"PRAGMA user_version = {VERSION}")
    database.execute("COMMIT")


def _version(database: sqlite3.Connection) -> int:
    return int(database.execute("PRAGMA user_version").fetchone()[0])


# A directory may change again within the tick of its mtime.
_SETTLED_NS = 2 * 10**9
# Up to this number of entries every manifest is checked each time, so that a rewritten one is noticed too.
CHECK_ALL = 10_000


@dataclass
class Changes:
    """Differences between the index and the store.

    Args:
        read: stage, directory and stamp of each manifest to read; None as stamp: there is no manifest yet.
        gone: stage and directory of each deleted entry.
        stages: name and mtime of each changed stage directory; 0: it may change again within the same tick.
    """

    read: list[tuple[str, str, str | None]] = field(default_factory=list)
    gone: list[tuple[str, str]] = field(default_factory=list)
    stages: list[tuple[str, int]] = field(default_factory=list)
    gone_stages: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.read or self.gone or self.stages or self.gone_stages)


def changes(database: sqlite3.Connection, root: Path) -> Changes:
    """What changed in the store since the index was written."""
    found = Changes()
    times: dict[str, int] = dict(database.execute("SELECT name, mtime_ns FROM stage"))
    (count,) = database.execute("SELECT count(*) FROM (SELECT 1 FROM entry LIMIT ?)", (CHECK_ALL + 1,)).fetchone()
    for name, mtime_ns in _stages(root):
        known = times.pop(name, None)
        settled = mtime_ns if time.time_ns() - mtime_ns > _SETTLED_NS else 0
        if settled != known:
            found.stages.append((name, settled))
        if not settled or settled != known or count <= CHECK_ALL:
            _check_all(database, root, name, found)
        else:
            _check_unfinished(database, root, name, found)
    for name in times:
        found.gone_stages.append(name)
        found.gone += database.execute("SELECT stage, directory FROM entry WHERE stage = ?", (name,))
    return found


def _stages(root: Path) -> Iterator[tuple[str, int]]:
    """Names and mtimes of the stage directories, read before their content is."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(root) as found:
        for each in found:
            if each.name not in RESERVED and each.is_dir():
                yield each.name, each.stat().st_mtime_ns


def _check_all(database: sqlite3.Connection, root: Path, stage: str, found: Changes) -> None:
    known: dict[str, str | None] = dict(
        database.execute("SELECT directory, stamp FROM entry WHERE stage = ?", (stage,)).fetchall()
    )
    with suppress(FileNotFoundError), os.scandir(root / stage) as directories:
        for each in directories:
            if not ENTRY_NAME.fullmatch(each.name):
                continue
            stamp = _stamp(each.path)
            if known.pop(each.name, "") != stamp:
                found.read.append((stage, each.name, stamp))
    found.gone += [(stage, directory) for directory in known]


def _check_unfinished(database: sqlite3.Connection, root: Path, stage: str, found: Changes) -> None:
    """A new manifest in a known directory does not change the mtime of the stage's directory."""
    rows = database.execute("SELECT directory, stamp FROM entry WHERE state != 'finished' AND stage = ?", (stage,))
    for directory, known in rows:
        stamp = _stamp(f"{root}/{stage}/{directory}")
        if stamp != known:
            found.read.append((stage, directory, stamp))


def _stamp(directory: str) -> str | None:
    """Identifies one version of a manifest file; None: there is none yet."""
    try:
        status = os.stat(f"{directory}/{MANIFEST}")
    except OSError:
        return None
    return f"{status.st_mtime_ns}-{status.st_size}-{status.st_ino}"


# A node is an artifact, a source, or a missing parent; an edge's record is what a manifest says about a source.
SCHEMA = """
CREATE TABLE stage (name TEXT PRIMARY KEY, mtime_ns INTEGER) WITHOUT ROWID;
CREATE TABLE entry (stage TEXT, directory TEXT, stamp TEXT, state TEXT, PRIMARY KEY (stage, directory)) WITHOUT ROWID;
CREATE TABLE node (id INTEGER PRIMARY KEY, key TEXT UNIQUE, name TEXT, digits TEXT);
CREATE TABLE place (id INTEGER PRIMARY KEY, pipeline TEXT, stage TEXT, method TEXT, kind TEXT,
    UNIQUE (pipeline, stage, method, kind));
CREATE TABLE artifact (node INTEGER PRIMARY KEY, key TEXT, fingerprint TEXT, place INTEGER, start REAL, end REAL);
CREATE TABLE record (id INTEGER PRIMARY KEY, node INTEGER, text TEXT, UNIQUE (node, text));
CREATE TABLE edge (child INTEGER, slot TEXT, parent INTEGER, record INTEGER, PRIMARY KEY (child, slot, parent, record))
    WITHOUT ROWID;
CREATE INDEX unfinished ON entry (stage, directory) WHERE state != 'finished';
CREATE INDEX node_digits ON node (digits);
CREATE INDEX node_name ON node (name);
CREATE INDEX artifact_place ON artifact (place, end);
CREATE INDEX edge_parent ON edge (parent, child);
"""
VERSION = zlib.crc32(SCHEMA.encode()) >> 1  # an index with other tables is rebuilt
# Deletes edges from a source to the artifact that it names once no manifest records them, and then nodes without
# an artifact or an edge.
_DROP_ORPHANS = """
DELETE FROM edge WHERE child NOT IN (SELECT node FROM artifact)
    AND record NOT IN (SELECT record FROM edge JOIN artifact ON node = child);
DELETE FROM record WHERE id NOT IN (SELECT record FROM edge);
DELETE FROM place WHERE id NOT IN (SELECT place FROM artifact);
DELETE FROM node WHERE id NOT IN (SELECT node FROM artifact UNION SELECT parent FROM edge UNION SELECT child FROM edge);
"""


def refresh(database: sqlite3.Connection, root: Path) -> None:
    """Updates the index in one transaction; does nothing if nothing changed."""
    if not changes(database, root):
        return
    database.execute("BEGIN IMMEDIATE")
    try:
        _apply(database, root, changes(database, root))
    except BaseException:
        database.execute("ROLLBACK")
        raise
    database.execute("COMMIT")


def _apply(database: sqlite3.Connection, root: Path, found: Changes) -> None:
    forgotten = [
        _forget(database, stage, directory)
        for stage, directory in [*found.gone, *((stage, directory) for stage, directory, _ in found.read)]
    ]
    nodes: dict[str, int] = {}
    for stage, directory, stamp in found.read:
        manifest, state = _read(Entry(root / stage / directory), stage, directory)
        database.execute("INSERT INTO entry VALUES (?, ?, ?, ?)", (stage, directory, stamp, state))
        if manifest:
            _insert(database, root, manifest, nodes)
    database.executemany("INSERT OR REPLACE INTO stage VALUES (?, ?)", found.stages)
    database.executemany("DELETE FROM stage WHERE name = ?", [(name,) for name in found.gone_stages])
    if any(forgotten):
        for statement in _DROP_ORPHANS.split(";"):
            database.execute(statement)


def _forget(database: sqlite3.Connection, stage: str, directory: str) -> bool:
    """Removes an entry; returns whether it was finished."""
    database.execute("DELETE FROM entry WHERE stage = ? AND directory = ?", (stage, directory))
    row = database.execute("SELECT id FROM node WHERE key = ?", (node_key(stage, directory),)).fetchone()
    if row is None:
        return False
    database.execute("DELETE FROM edge WHERE child = ?", row)
    return database.execute("DELETE FROM artifact WHERE node = ?", row).rowcount > 0


def _read(entry: Entry, stage: str, directory: str) -> tuple[Manifest | None, str]:
    try:
        manifest = entry.manifest()
    except ArtifactError:
        return None, "broken"
    if manifest is None:
        return None, "pending"
    belongs = manifest.stage == stage and short(manifest.fingerprint) == directory
    return (manifest, "finished") if belongs else (None, "broken")


def _insert(database: sqlite3.Connection, root: Path, manifest: Manifest, nodes: dict[str, int]) -> None:
    key = node_key(manifest.stage, manifest.fingerprint)
    node = _node(database, manifest.stage, manifest.fingerprint, nodes)
    ran = manifest.provenance
    values = (node, key, manifest.fingerprint, _place(database, manifest), ran.start, ran.end)
    database.execute("INSERT INTO artifact VALUES (?, ?, ?, ?, ?, ?)", values)
    for slot, input_record in manifest.inputs.items():
        parent = _node(database, input_record.artifact, input_record.fingerprint, nodes)
        record = _record_row(database, parent, input_record) if input_record.artifact.startswith(SOURCE) else 0
        database.execute("INSERT INTO edge VALUES (?, ?, ?, ?)", (node, slot, parent, record))
        origin = artifact_at(root, input_record.source.path) if input_record.source else None
        if origin:
            edge = (parent, "output", _node(database, *origin, nodes), record)
            database.execute("INSERT OR IGNORE INTO edge VALUES (?, ?, ?, ?)", edge)


def _node(database: sqlite3.Connection, name: str, fingerprint: str, nodes: dict[str, int]) -> int:
    key = node_key(name, fingerprint)
    if key not in nodes:
        database.execute("INSERT OR IGNORE INTO node VALUES (NULL, ?, ?, ?)", (key, name, short(fingerprint)))
        (nodes[key],) = database.execute("SELECT id FROM node WHERE key = ?", (key,)).fetchone()
    return nodes[key]


def _place(database: sqlite3.Connection, manifest: Manifest) -> int:
    values = (manifest.pipeline, manifest.stage, manifest.method, manifest.produces or "")
    database.execute("INSERT OR IGNORE INTO place VALUES (NULL, ?, ?, ?, ?)", values)
    sql = "SELECT id FROM place WHERE pipeline = ? AND stage = ? AND method = ? AND kind = ?"
    return int(database.execute(sql, values).fetchone()[0])


def _record_row(database: sqlite3.Connection, node: int, input_record: InputRecord) -> int:
    text = canonical_json(asdict(input_record))
    database.execute("INSERT OR IGNORE INTO record VALUES (NULL, ?, ?)", (node, text))
    (identity,) = database.execute("SELECT id FROM record WHERE node = ? AND text = ?", (node, text)).fetchone()
    return int(identity)


ARTIFACT = (
    "SELECT key, stage, fingerprint, pipeline, method, kind, start, end FROM artifact JOIN place ON place.id = place"
)


def newest_where(condition: str) -> str:
    """A query for the newest artifact of a pipeline's stage that satisfies a condition."""
    last = f"SELECT node FROM artifact WHERE place = each.id AND {condition} ORDER BY end DESC LIMIT 1"
    nodes = f"SELECT ({last}) FROM place AS each WHERE pipeline = ? AND stage = ?"
    return f"{ARTIFACT} WHERE node IN ({nodes}) ORDER BY end DESC, key LIMIT 1"


def reached(start: str, end: str) -> str:
    """SQL for ``reached(id)``: all nodes reached along edges from ``start`` to ``end``; takes nodes as JSON."""
    return (
        "WITH RECURSIVE reached(id) AS ("
        f"SELECT edge.{end} FROM json_each(?) JOIN node ON node.key = value JOIN edge ON edge.{start} = node.id "
        f"UNION SELECT edge.{end} FROM reached JOIN edge ON edge.{start} = reached.id)"
    )


class Index:
    """Queries on the links of a store, as of the time of opening. Nodes are named by id (``sft@0123...``)."""

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
        """Alias -> the artifact that it points to."""
        return {alias: nodes[-1] for alias, nodes in self.alias_history.items()}

    @cached_property
    def alias_history(self) -> dict[str, list[str]]:
        """Alias -> the artifacts that it has pointed to, the current one last."""
        found = stacks(read_events(self.store))
        return {alias: [self._promoted_node(event) for event in events] for alias, events in found.items() if events}

    @cached_property
    def exports(self) -> list[Export]:
        """The models that left the store, oldest first."""
        return read_exports(self.store)

    def _promoted_node(self, event: Event) -> str:
        """The promoted artifact; the event names the stage, because two stages may share a fingerprint."""
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
        """Whether a node is an artifact or an input of one."""
        return bool(self.rows("SELECT 1 FROM node WHERE key = ?", node))

    def artifact(self, node: str) -> Indexed | None:
        """A finished artifact; None: the node is a source, or missing."""
        return next(iter(self.artifacts(f"{ARTIFACT} WHERE node = (SELECT id FROM node WHERE key = ?)", node)), None)

    def with_prefix(self, digits: str) -> list[str]:
        """Artifacts and sources whose fingerprint starts with these digits."""
        rows = self.rows("SELECT key FROM node WHERE digits >= ? AND digits < ? ORDER BY key", digits, digits + "g")
        return [str(key) for (key,) in rows]

    def newest(self, pipeline: str, stage: str) -> Indexed | None:
        """The artifact of a pipeline's stage that was finished last."""
        return next(iter(self.artifacts(newest_where("TRUE"), pipeline, stage)), None)

    def newest_of_each_stage(self, pipeline: str) -> list[Indexed]:
        """The newest artifact of each stage of a pipeline, newest first."""
        stages = self.rows("SELECT DISTINCT stage FROM place WHERE pipeline = ?", pipeline)
        found = [self.newest(pipeline, stage) for (stage,) in stages]
        return sorted((each for each in found if each), key=lambda each: (-each.end, each.id))

    def places(self) -> list[tuple[str, str]]:
        """Every pipeline and stage that has a finished artifact."""
        rows = self.rows("SELECT DISTINCT pipeline, stage FROM place ORDER BY 1, 2")
        return [(pipeline, stage) for pipeline, stage in rows]

    def sources(self, name: str | None = None) -> list[str]:
        """Nodes of all sources, or of those of one name; the most recently used last."""
        sql = (
            "SELECT above.key FROM node AS above JOIN edge ON edge.parent = above.id "
            "LEFT JOIN artifact ON artifact.node = edge.child WHERE above.name {} "
            "GROUP BY above.id ORDER BY max(artifact.end), above.key"
        )
        if name is None:
            return [str(key) for (key,) in self.rows(sql.format("GLOB 'source:*'"))]
        return [str(key) for (key,) in self.rows(sql.format("= ?"), SOURCE + name)]

    def records(self, source: str) -> list[InputRecord]:
        """The distinct records of a source in manifests: the same content, perhaps with other paths or labels."""
        rows = self.rows(
            "SELECT text FROM record JOIN node ON node.id = record.node WHERE key = ? ORDER BY text", source
        )
        return [_record(text) for (text,) in rows]

    def labels(self, source: str) -> set[str]:
        """All licence and consent labels that were recorded for a source's bytes, under any name."""
        digits = source.rpartition("@")[2]
        rows = self.rows(
            "SELECT DISTINCT label.value FROM node JOIN record ON record.node = node.id, "
            "json_each(record.text, '$.source.labels') AS label WHERE node.digits = ?",
            digits,
        )
        return {label for (label,) in rows} | self._run_labels.get(digits, set())

    def sources_with_label(self, wanted: str) -> list[str]:
        """The sources with a label; case is ignored, as in the licence patterns."""
        rows = self.rows(
            "SELECT DISTINCT node.digits, label.value FROM record JOIN node ON node.id = record.node, "
            "json_each(record.text, '$.source.labels') AS label"
        )
        configured = [(digits, label) for digits, labels in self._run_labels.items() for label in labels]
        found = {digits for digits, label in [*rows, *configured] if label.lower() == wanted.lower()}
        sql = "SELECT node.key FROM json_each(?) JOIN node ON digits = value WHERE name GLOB 'source:*' ORDER BY 1"
        return [key for (key,) in self.rows(sql, json.dumps(sorted(found)))]

    @cached_property
    def _run_labels(self) -> dict[str, set[str]]:
        return recorded_labels(self.store)

    def descendants(self, nodes: Iterable[str]) -> list[Indexed]:
        """All finished descendants of nodes, in the order in which they were finished."""
        return self._reached(nodes, "parent", "child")

    def ancestors(self, nodes: Iterable[str]) -> list[Indexed]:
        """All finished ancestors of nodes, in the order in which they were finished."""
        return self._reached(nodes, "child", "parent")

    def _reached(self, nodes: Iterable[str], start: str, end: str) -> list[Indexed]:
        sql = f"{reached(start, end)} {ARTIFACT} WHERE node IN reached ORDER BY end, key"
        return self.artifacts(sql, json.dumps(list(nodes)))

    def children(self, node: str) -> list[tuple[str, str]]:
        """Nodes and slots of the direct consumers of a node."""
        return self._next(node, "parent", "child")

    def parents(self, node: str) -> list[tuple[str, str]]:
        """Nodes and slots of the direct inputs of a node."""
        return self._next(node, "child", "parent")

    def _next(self, node: str, start: str, end: str) -> list[tuple[str, str]]:
        sql = (
            f"SELECT other.key, edge.slot FROM node JOIN edge ON edge.{start} = node.id "
            f"JOIN node AS other ON other.id = edge.{end} WHERE node.key = ? ORDER BY 1, 2"
        )
        return [(other, slot) for other, slot in self.rows(sql, node)]

    def sources_recording(self, text: str) -> list[str]:
        """The sources whose record contains a text, such as a path or a digest."""
        sql = "SELECT DISTINCT key FROM record JOIN node ON node.id = record.node WHERE instr(text, ?) ORDER BY 1"
        return [key for (key,) in self.rows(sql, json.dumps(text, ensure_ascii=False)[1:-1])]

    def artifacts(self, sql: str, *values: str) -> list[Indexed]:
        """The artifacts that a query returns, which begins with ``ARTIFACT``."""
        return [Indexed._make(row) for row in self.rows(sql, *values)]

    def keep(self, table: str, *values: str) -> None:
        """Creates or fills a temporary table, and remembers the statement for a rebuilt index."""
        self.rows(table, *values)
        self._kept.append((table, values))

    def rows(self, sql: str, *values: str) -> list[tuple[str, ...]]:
        """The rows of a query."""
        try:
            return self._database.execute(sql, values).fetchall()
        except sqlite3.DatabaseError as error:  # a damaged page that was not read at opening
            if not is_damage(error):
                raise
            self._database = rebuilt(self.store)
            for table, rows in self._kept:
                self._database.execute(table, rows)
            return self._database.execute(sql, values).fetchall()


def _record(text: str) -> InputRecord:
    fields = json.loads(redacted(text))
    source = fields.pop("source")
    return InputRecord(**fields, source=SourceRecord(**source) if source else None)
