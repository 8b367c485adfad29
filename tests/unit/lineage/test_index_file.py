import multiprocessing
import sqlite3

import pytest

from lineage.graph.index import Index
from tests.written_store import WrittenStore, node


@pytest.fixture
def store(tmp_path):
    return WrittenStore(tmp_path / "store")


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


def test_a_page_that_is_damaged_while_it_is_open_is_no_end(store):
    made = store.chain()
    index = Index(store.root)
    index._database.close()
    (store.root / "index.sqlite").write_bytes(b"\xff" * 100_000)
    index._database = sqlite3.connect(store.root / "index.sqlite", isolation_level=None)
    assert len(index.descendants([node(made["base"])])) == 3


def test_where_no_file_can_be_kept_the_index_is_in_memory(store):
    made = store.chain()
    (store.root / "index.sqlite").mkdir()
    with Index(store.root) as index:
        assert index.artifact(node(made["dpo"]))


def _count(root, start, counts):
    start.wait()
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
        worker.join()
    assert not list(store.root.glob("index.sqlite-*"))
