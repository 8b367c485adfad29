"""The index of a store: ``<store>/index.sqlite``, a cache of the links between manifests that can be deleted.

It is brought up to date when it is opened, and rebuilt where it is damaged or of another version. A rollback journal,
not a write-ahead log: stores are shared over network file systems, where a log cannot work.
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
from lineage.manifest import InputRecord, Manifest, SourceRecord
from lineage.promotions import Event, read_events, stacks
from lineage.secrets import redacted
from lineage.stated_labels import stated_labels
from lineage.store import ENTRY_NAME, MANIFEST, RESERVED, Entry, Store

logger = logging.getLogger(__name__)

INDEX = "index.sqlite"
_WAIT_SECONDS = 300.0  # for another process that builds it
# Of a file that is no index. All other errors are of its place: read-only, full, locked for too long.
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_OTHER_TABLES = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CONSTRAINT)


def open_database(store: Path) -> sqlite3.Connection:
    """The index as the store is now; in memory where it cannot be kept."""
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
    """A new index in place of a damaged one."""
    logger.info("store=%s index=damaged: is built again", store)
    try:
        for name in (INDEX, INDEX + "-journal"):
            (store / name).unlink(missing_ok=True)
        return _opened(str(store / INDEX), store)
    except (OSError, sqlite3.Error):
        return _opened(":memory:", store)


def is_damage(error: sqlite3.Error) -> bool:
    """Whether an error is of the file's content, so that a new file mends it."""
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
    """Makes the tables in an empty file; what holds others is refused by SQLite as damaged."""
    database.execute("BEGIN IMMEDIATE")
    if _version(database) != VERSION:  # or another process made them meanwhile
        for statement in SCHEMA.split(";"):
            database.execute(statement)
        database.execute(f"PRAGMA user_version = {VERSION}")
    database.execute("COMMIT")


def _version(database: sqlite3.Connection) -> int:
    return int(database.execute("PRAGMA user_version").fetchone()[0])


# A directory that changed this short a time ago may change again without its time telling.
_SETTLED_NS = 2 * 10**9
# Up to as many, every manifest is looked at each time, so that one that was made again is seen as well.
CHECK_ALL = 10_000


@dataclass
class Changes:
    """What is not as the index has it.

    Args:
        read: stage, directory and stamp of each manifest to read; no stamp where there is none yet.
        gone: stage and directory of each entry that is there no more.
        stages: name and time of each stage's directory that changed; 0: it may change again unseen.
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
    """The stages' directories and when they last changed, read before they are looked into."""
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
    """A manifest that appears in a known directory does not change the time of the stage's."""
    rows = database.execute("SELECT directory, stamp FROM entry WHERE state != 'finished' AND stage = ?", (stage,))
    for directory, known in rows:
        stamp = _stamp(f"{root}/{stage}/{directory}")
        if stamp != known:
            found.read.append((stage, directory, stamp))


def _stamp(directory: str) -> str | None:
    """Tells one manifest from the next in its place; None: there is none yet."""
    try:
        status = os.stat(f"{directory}/{MANIFEST}")
    except OSError:
        return None
    return f"{status.st_mtime_ns}-{status.st_size}-{status.st_ino}"


# A node is an artifact, a source, or a parent that is gone; an edge's record is what a manifest says of a source.
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
VERSION = zlib.crc32(SCHEMA.encode()) >> 1  # a file with other tables is built again
# An edge from a source to the artifact whose output it names lives as long as a manifest says so; then a node goes
# that is neither an artifact nor at an end of an edge.
_DROP_ORPHANS = """
DELETE FROM edge WHERE child NOT IN (SELECT node FROM artifact)
    AND record NOT IN (SELECT record FROM edge JOIN artifact ON node = child);
DELETE FROM record WHERE id NOT IN (SELECT record FROM edge);
DELETE FROM place WHERE id NOT IN (SELECT place FROM artifact);
DELETE FROM node WHERE id NOT IN (SELECT node FROM artifact UNION SELECT parent FROM edge UNION SELECT child FROM edge);
"""


def refresh(database: sqlite3.Connection, root: Path) -> None:
    """One transaction, and none where nothing changed; who waited for another's finds its work done."""
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
    """Takes an entry out; whether it was a finished one."""
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
    for slot, given in manifest.inputs.items():
        parent = _node(database, given.artifact, given.fingerprint, nodes)
        record = _record_row(database, parent, given) if given.artifact.startswith(SOURCE) else 0
        database.execute("INSERT INTO edge VALUES (?, ?, ?, ?)", (node, slot, parent, record))
        origin = artifact_at(root, given.source.path) if given.source else None
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


def _record_row(database: sqlite3.Connection, node: int, given: InputRecord) -> int:
    text = canonical_json(asdict(given))
    database.execute("INSERT OR IGNORE INTO record VALUES (NULL, ?, ?)", (node, text))
    (identity,) = database.execute("SELECT id FROM record WHERE node = ? AND text = ?", (node, text)).fetchone()
    return int(identity)


ARTIFACT = (
    "SELECT key, stage, fingerprint, pipeline, method, kind, start, end FROM artifact JOIN place ON place.id = place"
)


def newest_where(condition: str) -> str:
    """The query of the last artifact of a pipeline's stage, one per place at most, for which a condition holds."""
    last = f"SELECT node FROM artifact WHERE place = each.id AND {condition} ORDER BY end DESC LIMIT 1"
    nodes = f"SELECT ({last}) FROM place AS each WHERE pipeline = ? AND stage = ?"
    return f"{ARTIFACT} WHERE node IN ({nodes}) ORDER BY end DESC, key LIMIT 1"


def reached(start: str, end: str) -> str:
    """The table ``reached(id)`` of the nodes found along the edges from ``start`` to ``end``; takes nodes as JSON."""
    return (
        "WITH RECURSIVE reached(id) AS ("
        f"SELECT edge.{end} FROM json_each(?) JOIN node ON node.key = value JOIN edge ON edge.{start} = node.id "
        f"UNION SELECT edge.{end} FROM reached JOIN edge ON edge.{start} = reached.id)"
    )


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
