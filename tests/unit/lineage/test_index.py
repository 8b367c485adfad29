import multiprocessing
import os
import random
import sqlite3
import time
from pathlib import Path

import pytest

from lineage.fingerprint import short
from lineage.graph import index as index_scan
from lineage.graph.index import Index
from tests.written_store import node


def content(root: Path) -> dict[str, list]:
    """All that the index of a store says, without its own numbers."""
    Index(root).__exit__(None, None, None)
    database = sqlite3.connect(root / "index.sqlite")
    return {
        name: sorted(database.execute(sql).fetchall())
        for name, sql in {
            "entries": "SELECT stage, directory, state FROM entry",
            "nodes": "SELECT key FROM node",
            "artifacts": "SELECT key, fingerprint, pipeline, stage, method, kind, end FROM artifact "
            "JOIN place ON place.id = place",
            "places": "SELECT pipeline, stage, method, kind FROM place",
            "records": "SELECT text FROM record",
            "edges": "SELECT child.key, slot, parent.key, coalesce(text, '') FROM edge JOIN node AS child ON "
            "child.id = child JOIN node AS parent ON parent.id = parent LEFT JOIN record ON record.id = record",
        }.items()
    }


def settle(root: Path) -> None:
    """As if all this had been there for an hour."""
    for directory in [root, *root.iterdir()]:
        if directory.is_dir():
            os.utime(directory, (time.time() - 3600, time.time() - 3600))


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_made_and_deleted_the_index_kept_equals_one_made_from_scratch(store, seed, monkeypatch):
    draw = random.Random(seed)
    monkeypatch.setattr(index_scan, "CHECK_ALL", draw.choice([0, 10_000]))
    there = []
    for _ in range(12):
        if there and draw.random() < 0.4:
            store.delete(there.pop(draw.randrange(len(there))))
        else:
            inputs = {f"slot{place}": each for place, each in enumerate(draw.sample(there, min(2, len(there))))}
            inputs["rows"] = store.source("corpus", draw.choice("ab"), labels=draw.choice([[], ["nc"]]))
            made = store.stage(draw.choice(["sft", "dpo"]), inputs, recipe={"seed": draw.randrange(3)})
            there = [each for each in there if node(each) != node(made)] + [made]
        kept = content(store.root)
    (store.root / "index.sqlite").unlink()
    assert kept == content(store.root)
    assert len(kept["artifacts"]) == len(there)


def test_a_manifest_that_appears_in_a_directory_known_as_unfinished_is_seen(store, monkeypatch):
    monkeypatch.setattr(index_scan, "CHECK_ALL", 0)
    made = store.stage("dpo", {})
    manifest = store.root / "dpo" / short(made.fingerprint) / "manifest.json"
    text = manifest.read_text()
    manifest.unlink()
    settle(store.root)
    with Index(store.root) as index:
        assert index.is_empty()
    with Index(store.root) as index:
        assert index.is_empty()
    manifest.write_text(text)
    settle(store.root)  # the time of the stage's directory did not change
    with Index(store.root) as index:
        assert index.artifact(node(made))


def test_an_artifact_made_again_is_read_again(store):
    made = store.stage("dpo", {}, recipe={"beta": 1})
    Index(store.root)
    store.stage("dpo", {}, recipe={"beta": 1}, pipeline="other")
    with Index(store.root) as index:
        assert index.artifact(node(made)).pipeline == "other"
        assert index.places() == [("other", "dpo")]


def test_a_broken_manifest_is_left_out_with_a_warning_until_it_is_mended(store, caplog):
    good, bad = store.stage("dpo", {}), store.stage("sft", {})
    file = store.root / "sft" / short(bad.fingerprint) / "manifest.json"
    file.write_text("{")
    with Index(store.root) as index:
        assert index.artifact(node(good))
        assert index.artifact(node(bad)) is None
    assert f"sft/{short(bad.fingerprint)}" in caplog.text
    file.write_text(bad.to_json())
    with Index(store.root) as index:
        assert index.artifact(node(bad))


def test_no_store_is_an_empty_one_and_is_not_made(tmp_path):
    with Index(tmp_path / "none") as index:
        assert index.is_empty()
    assert not (tmp_path / "none").exists()


def test_descendants_follow_a_source_that_is_an_output_of_this_store(store):
    made = store.chain()
    output = store.root / "dpo" / short(made["dpo"].fingerprint) / "output"
    champion = store.source("champion", path=str(output), kind="checkpoint")
    judge = store.stage("judge", {"champion": champion})
    with Index(store.root) as index:
        assert node(judge) in [each.id for each in index.descendants([node(made["base"])])]
        assert node(made["base"]) in [each.id for each in index.ancestors([node(judge)])]


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(b"no database"),
        lambda file: file.write_bytes(file.read_bytes()[:5000]),
        lambda file: file.write_bytes(file.read_bytes()[:4096] + b"\xff" * 60000),
        lambda file: sqlite3.connect(file).executescript("PRAGMA user_version = 7"),
        lambda file: file.unlink(),
        lambda file: file.with_name("index.sqlite-journal").write_bytes(b"left by a kill"),
    ],
    ids=["garbage", "cut", "pages", "version", "deleted", "journal"],
)
def test_a_damaged_index_is_made_again(store, damage):
    made = store.chain()
    Index(store.root).__exit__(None, None, None)
    damage(store.root / "index.sqlite")
    with Index(store.root) as index:
        assert len(index.descendants([node(made["base"])])) == 3
    with Index(store.root) as index:
        assert len(index.descendants([node(made["base"])])) == 3


def test_where_no_file_can_be_kept_the_index_is_in_memory(store):
    made = store.chain()
    (store.root / "index.sqlite").mkdir()
    with Index(store.root) as index:
        assert index.artifact(node(made["dpo"]))


def _count(root, start, counts):
    start.wait(120)
    with Index(root) as index:
        counts.put(len(index.places()))


def test_several_processes_build_it_at_once(store):
    store.chain()
    context = multiprocessing.get_context("fork")
    start, counts = context.Event(), context.Queue()
    workers = [context.Process(target=_count, args=(store.root, start, counts)) for _ in range(4)]
    for worker in workers:
        worker.start()
    start.set()
    assert [counts.get(timeout=60) for _ in workers] == [6] * 4
    for worker in workers:
        worker.join(120)
    assert not list(store.root.glob("index.sqlite-*"))


def test_logs_and_views_are_no_stages_and_a_record_of_another_artifact_is_none(store):
    made = store.stage("dpo", {})
    for name in ("logs", "pipelines"):
        place = store.root / name / short(made.fingerprint)
        place.mkdir(parents=True)
        (place / "manifest.json").write_text(made.to_json())
    with Index(store.root) as index:
        assert index.places() == [("p", "dpo")]
    (store.root / "dpo" / short(made.fingerprint)).rename(store.root / "dpo" / ("0" * 16))
    with Index(store.root) as index:
        assert index.is_empty()
