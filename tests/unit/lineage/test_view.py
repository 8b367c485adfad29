import json
import os
import shutil

import pytest

from lineage.dvc import View
from lineage.filesystem.lock import Lock
from lineage.store import Entry, Store
from tests.written_store import WrittenStore

REPORTS = [{"step": 1, "time": 1.5, "metrics": {"loss": 2.0}}, {"step": 2, "time": 2.5, "metrics": {"loss": 1.0}}]


@pytest.fixture
def view(store):
    return View(store.root, "p")


def made(store: WrittenStore, name: str = "sft", **fields) -> Entry:
    manifest = store.stage(name, {}, **fields)
    return Store(store.root).entry(name, manifest.fingerprint)


def contents(folder) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def is_one_file(view: View, entry: Entry, name: str) -> bool:
    return os.path.samefile(view.place("sft") / name, entry.path / name)


def test_the_view_is_hard_links_to_the_entry_with_every_report_at_its_step(store, view):
    entry = made(store, metrics={"loss": 0.5})
    entry.metrics.write_text("".join(json.dumps(each) + "\n" for each in REPORTS) + '{"step": 3, "ti')
    view.show({"sft": entry})
    names = ["manifest.json", "metrics.json", "output/content.txt", "plots.json"]
    assert sorted(contents(view.place("sft"))) == names
    assert [is_one_file(view, entry, name) for name in names] == [True] * 4
    assert json.loads((view.place("sft") / "metrics.json").read_text()) == {"loss": 0.5}
    assert json.loads((view.place("sft") / "plots.json").read_text()) == [
        {"step": 1, "time": 1.5, "loss": 2.0},
        {"step": 2, "time": 2.5, "loss": 1.0},
    ]


@pytest.fixture
def lost(store, view):
    """An entry that only the view has any more, as in a clone."""
    entry = made(store)
    view.show({"sft": entry})
    shutil.rmtree(entry.path)
    return entry


def test_a_kill_in_the_middle_leaves_the_old_view_and_the_next_run_mends(store, view, monkeypatch):
    old, new = made(store, recipe={"beta": 1}), made(store, recipe={"beta": 2})
    view.show({"sft": old})
    links = []

    def link_twice(source, target):
        links.append(target)
        if len(links) > 2:
            raise KeyboardInterrupt
        shutil.copyfile(source, target)

    monkeypatch.setattr(os, "link", link_twice)
    with pytest.raises(KeyboardInterrupt):
        view.show({"sft": new})
    assert view.shows("sft", old)
    monkeypatch.undo()
    view.show({"sft": new})
    assert view.shows("sft", new)
    assert (view.place("sft") / "output/content.txt").read_text() == (new.output / "content.txt").read_text()
    assert sorted(path.name for path in view.root.iterdir()) == [".lock", "sft"]


@pytest.mark.parametrize("symlinks", [True, False])
def test_a_file_system_without_hard_links_gets_symbolic_links_or_copies(store, view, monkeypatch, symlinks):
    def refuse(source, target):
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)
    if not symlinks:
        monkeypatch.setattr(os, "symlink", refuse)
    entry = made(store)
    view.show({"sft": entry})
    shown = view.place("sft") / "output/content.txt"
    assert shown.is_symlink() == symlinks
    assert view.shows("sft", entry)


def test_a_view_that_was_changed_is_made_again_but_another_inode_with_the_same_bytes_is_as_good(store, view):
    entry = made(store)
    view.show({"sft": entry})
    shown = view.place("sft") / "output/content.txt"
    size = shown.stat().st_size
    shown.unlink()
    shutil.copyfile(entry.output / "content.txt", shown)  # DVC links equal files of two stages to one
    assert view.shows("sft", entry)
    shown.write_text("x" * size)
    assert not view.shows("sft", entry)
    view.show({"sft": entry})
    assert view.shows("sft", entry)
    assert (entry.output / "content.txt").read_text() == entry.manifest().fingerprint


def test_a_clone_adopts_what_dvc_restored(store, view):
    entry = made(store, metrics={"loss": 0.5})
    entry.metrics.write_text("".join(json.dumps(each) + "\n" for each in REPORTS))
    view.show({"sft": entry})
    before = contents(entry.path)
    for path in view.place("sft").rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o444)  # as DVC links from its cache
    shutil.rmtree(entry.path)

    assert str(entry.path) in view.adopt("sft")
    after = contents(entry.path)
    assert {name: after.get(name) for name in before} == before
    assert is_one_file(view, entry, "output/content.txt") and is_one_file(view, entry, "manifest.json")
    assert view.adopt("sft") is None
    assert view.shows("sft", entry)


def test_a_damaged_view_is_named_and_not_adopted(lost, view):
    (view.place("sft") / "output/content.txt").write_text("other")
    message = view.adopt("sft")
    assert str(view.place("sft")) in message and "content.txt has SHA-256" in message
    assert not lost.path.exists()
    assert view.adopt("dpo") is None  # which has no view


def test_nothing_is_adopted_over_a_run_that_is_making_it_or_into_a_store_that_may_only_be_read(lost, view, monkeypatch):
    lock = Lock(lost.path)
    assert lock.try_acquire()
    assert view.adopt("sft") is None
    assert not lost.is_finished()

    def refuse(*given, **options):
        raise PermissionError("read-only")

    monkeypatch.setattr(Lock, "try_acquire", refuse)
    assert "is not adopted: read-only" in view.adopt("sft")


@pytest.mark.parametrize(
    ("field", "value"), [("fingerprint", "../../../../tmp/x"), ("stage", "dpo")], ids=["fingerprint", "stage"]
)
def test_a_manifest_that_names_another_place_is_not_adopted(lost, store, view, field, value):
    manifest = view.place("sft") / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), field: value}))
    before = set(store.root.parent.rglob("*"))
    assert "is not adopted" in view.adopt("sft")
    assert set(store.root.parent.rglob("*")) == before


def test_what_dvc_made_read_only_can_be_made_again(store, view):
    entry = made(store)
    view.show({"sft": entry})
    for path in entry.path.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o444)
    lock = Lock(entry.path)
    assert lock.try_acquire()
    manifest = entry.manifest()
    entry.begin()
    assert not any(entry.output.iterdir())
    (entry.output / "content.txt").write_text("again")
    entry.commit(manifest, lock)
    assert (entry.path / "metrics.json").exists()
    assert (view.place("sft") / "output/content.txt").read_text() != "again"


def test_without_hard_links_the_store_adopts_copies(lost, view, monkeypatch):
    """DVC deletes what lies in the view: a symbolic link to it would be left with nothing."""

    def refuse(source, target):
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)
    view.adopt("sft")
    shutil.rmtree(view.root)
    assert lost.require_intact().files.keys() == {"content.txt"}
