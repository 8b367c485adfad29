"""Writes into the index what the scan of the store found."""

import sqlite3
import zlib
from dataclasses import asdict
from pathlib import Path

from lineage.artifact import SOURCE
from lineage.errors import ArtifactError
from lineage.fingerprint import canonical_json, short
from lineage.graph.index_scan import Changes, changes
from lineage.graph.places import artifact_at, node_key
from lineage.manifest import InputRecord, Manifest
from lineage.store import Entry

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
        record = _record(database, parent, given) if given.artifact.startswith(SOURCE) else 0
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


def _record(database: sqlite3.Connection, node: int, given: InputRecord) -> int:
    text = canonical_json(asdict(given))
    database.execute("INSERT OR IGNORE INTO record VALUES (NULL, ?, ?)", (node, text))
    (identity,) = database.execute("SELECT id FROM record WHERE node = ? AND text = ?", (node, text)).fetchone()
    return int(identity)
