import pytest

from lineage.filesystem.digest import DigestCache, digest_file
from lineage.promotions import Event, append
from lineage.store import Store
from lineage.verify.store import (
    Checked,
    Fault,
    check_links,
    check_lock,
    check_outputs,
    check_promotions,
    check_sources,
    check_view,
    read_store,
)
from tests.written_store import WrittenStore


@pytest.fixture
def written(tmp_path):
    """data file -> a -> b."""
    written, rows = WrittenStore(tmp_path / "store"), tmp_path / "rows.txt"
    rows.write_text("rows")
    source = written.source("rows", path=str(rows), files={str(rows): digest_file(rows)})
    written.stage("b", {"policy": written.stage("a", {"rows": source}, output="weights")}, output="weights")
    return written


@pytest.fixture
def store(written):
    return written.root


def place(root, stage):
    [found] = (root / stage).iterdir()
    return found


def node(root, stage):
    return f"{stage}@{place(root, stage).name}"


@pytest.mark.parametrize(
    ("file", "old", "new", "fault", "why"),
    [
        ("output/content.txt", "weights", "weightz", Fault.CHANGED, "content.txt has SHA-256"),
        ("output/content.txt", "weights", None, Fault.MISSING, "content.txt"),
        ("manifest.json", '"method": "A"', '"method": "Z"', Fault.CHANGED, "manifest.json: its"),
        ("manifest.json", '"output_digest": "', '"output_digest": "0', Fault.CHANGED, "manifest.json: its"),
    ],
    ids=["flipped byte", "missing file", "edited recipe", "edited digest"],
)
def test_a_changed_or_missing_file_is_named(store, file, old, new, fault, why):
    path = place(store, "a") / file
    assert old in path.read_text()
    path.unlink() if new is None else path.write_text(path.read_text().replace(old, new))
    found = findings(store)[0]
    assert (found.fault, found.what) == (fault, node(store, "a"))
    assert why in found.why


def findings(root):
    everything, found = read_store(root)
    checked = Checked(all=everything, chosen=sorted(everything))
    cache = DigestCache(root / "digests.json")
    parts = (check_outputs(checked), check_links(checked), check_sources(checked, cache), check_view(root, checked),
             check_promotions(root, checked), check_lock(root.parent, root, cache))  # fmt: skip
    return [*found, *(each for part in parts for each in part)]


def one(root):
    [finding] = findings(root)
    return finding.fault, finding.what, finding.why


def test_an_added_file_and_a_manifest_that_cannot_be_read_are_named(store):
    (place(store, "a") / "output" / "more.txt").write_text("")
    (place(store, "b") / "manifest.json").write_text("{}")
    assert [(each.fault, each.what) for each in findings(store)] == [
        (Fault.CHANGED, node(store, "b")), (Fault.CHANGED, node(store, "a")),
    ]  # fmt: skip


def test_an_intact_store_has_no_finding(store):
    assert findings(store) == []


@pytest.mark.parametrize("is_there", [True, False])
def test_an_alias_whose_bytes_were_made_again_or_are_not_there_is_named(store, is_there):
    fingerprint = Store(store).entry("b", place(store, "b").name).manifest().fingerprint if is_there else "c" * 64
    promoted = {"alias": "champion", "stage": "b", "fingerprint": fingerprint, "digest": "0", "who": "me", "why": ""}
    append(store, Event(action="promote", **promoted))
    expected = (Fault.CHANGED, "alias champion") if is_there else (Fault.MISSING, "promote of champion")
    assert one(store)[:2] == expected


def test_a_parent_that_is_gone_is_named(store):
    (place(store, "a") / "manifest.json").unlink()
    by_fault = {finding.fault: finding for finding in findings(store)}
    assert by_fault[Fault.MISSING].what == node(store, "b") + " input policy"
    assert "never finished" in by_fault[Fault.NOTE].why


def test_a_parent_that_was_made_again_with_other_bytes_is_named(written, store):
    written.stage("a", Store(store).entry("a", place(store, "a").name).manifest().inputs, output="other weights")
    fault, what, why = one(store)
    assert (fault, what) == (Fault.CHANGED, node(store, "b") + " input policy")
    assert "which now has" in why


def test_data_that_moved_on_is_a_note(store):
    (store.parent / "rows.txt").write_text("more rows")
    assert one(store)[0] == Fault.NOTE
    (store.parent / "rows.txt").unlink()
    assert one(store)[0] == Fault.NOTE


def test_a_view_of_what_is_not_there_is_orphaned_and_one_with_other_bytes_is_changed(store, tmp_path):
    view = store / "pipelines" / "p" / "b"
    manifest = WrittenStore(tmp_path / "elsewhere").stage("b", {}, recipe={"beta": 0.2})
    (view / "output").mkdir(parents=True)
    (view / "manifest.json").write_text(manifest.to_json())
    assert one(store)[:2] == (Fault.ORPHANED, "p/b")
    (view / "manifest.json").write_text(Store(store).entry("b", place(store, "b").name).manifest().to_json())
    (view / "output" / "content.txt").write_text("weightz")
    assert one(store)[:2] == (Fault.CHANGED, "p/b")


@pytest.mark.parametrize(
    ("out", "fault"), [("store/b/view.txt", Fault.CHANGED), ("store/b/gone.txt", Fault.MISSING), ("other.txt", None)]
)
def test_what_dvc_committed_is_compared(store, out, fault):
    (store / "b" / "view.txt").write_text("x")
    lock = f"stages:\n  b:\n    outs:\n    - {{path: {out}, md5: 0}}\n"
    (store.parent / "dvc.lock").write_text(lock)
    assert [finding.fault for finding in findings(store)] == ([fault] if fault else [])
