"""What of a store is garbage, its size, and its deletion, which a kill or a run that begins does not break."""

import json
import os
import shutil
import threading
import time

import pytest

from lineage.errors import ArtifactError
from lineage.filesystem.digest import digest_files
from lineage.filesystem.lock import Lock
from lineage.filesystem.owner import Owner
from lineage.gc import AGE_SECONDS, TOKENS, delete, deleted, find, guard, size
from lineage.store import Entry, Store
from tests.unit.lineage.test_checkpoints import commit
from tests.written_store import WrittenStore, node


@pytest.fixture
def written(tmp_path) -> WrittenStore:
    return WrittenStore(tmp_path / "store")


@pytest.fixture
def made(written):
    return written.stage("sft", {"rows": written.source("rows")})


def entry_of(written, manifest) -> Entry:
    return Store(written.root).entry(manifest.stage, manifest.fingerprint)


def nothing():
    """No root came up."""
    return ()


def found(written, *roots, older_than=0.0):
    return find(written.root, {node(each) for each in roots}, older_than)


def age(path, seconds):
    for each in [*path.rglob("*"), path]:
        os.utime(each, (time.time() - seconds, time.time() - seconds))


def test_children_go_before_what_they_were_made_from_and_roots_stay(written):
    made = written.chain()
    roots = made["corpus"], made["base"], made["cpt"]
    garbage, young = found(written, *roots)
    assert [each.what for each in garbage] == [node(made["evaluate"]), node(made["dpo"]), node(made["pairs"])]
    assert ({each.why for each in garbage}, young) == ({"nothing refers to it"}, [])
    assert all(delete(written.root, each, nothing) for each in garbage)
    assert sorted(path.name for path in written.root.iterdir() if path.is_dir()) == ["base", "corpus", "cpt"]
    assert deleted(written.root) == {
        (made[name].stage, made[name].fingerprint) for name in ("evaluate", "dpo", "pairs")
    }
    assert found(written, *roots) == ([], [])


def test_what_was_used_lately_is_young(written, made):
    saved = Store(written.root).entry("dpo", "1" * 64)
    saved.begin()
    commit(saved.checkpoints, 5)
    rehearsal, cache = written.root / "rehearsals" / "dead" / "sft", written.root / "cache" / "tokens" / ("1" * 16)
    for path in (rehearsal, cache):
        path.mkdir(parents=True)
    assert found(written, older_than=AGE_SECONDS)[0] == []
    whys = {"unfinished, with a checkpoint of step 5", "nothing refers to it", "left by a rehearsal", "not used lately"}
    assert {each.why for each in found(written, older_than=AGE_SECONDS)[1]} == whys
    age(written.root, AGE_SECONDS + 60)
    os.utime(entry_of(written, made).path)
    old, [young] = found(written, older_than=AGE_SECONDS)
    assert young.what == node(made) and len(old) == 3
    assert all(delete(written.root, each, nothing) for each in old)
    assert not (saved.path.exists() or rehearsal.exists() or cache.exists())


def test_bytes_that_another_link_keeps_are_not_freed(written, made, tmp_path):
    [garbage], _ = found(written)
    whole = size([garbage])
    assert whole.num_bytes == whole.freed > 0
    content = entry_of(written, made).output / "content.txt"
    os.link(content, tmp_path / "cache")
    assert (size([garbage]).num_bytes, size([garbage]).freed) == (whole.num_bytes, whole.freed - content.stat().st_size)


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("tokens", "tokens"),
        ("reference_logps", "reference_logps"),
        ("models", "model"),
        ("compiled", "compiled"),
        ("deleted", "deleted"),
    ],
)
def test_a_cache_goes_unless_a_run_is_under_way(written, what, name):
    for entry in ("1" * 16, "3" * 16 + ".draft"):
        (written.root / "cache" / what / entry).mkdir(parents=True)
    garbage, _ = found(written)
    assert [each.what for each in garbage] == [f"{name} {'1' * 16}", f"{name} {'3' * 16}.draft"]
    assert find(written.root, {TOKENS}, 0.0) == ([], [])
    assert not delete(written.root, garbage[0], lambda: {TOKENS})
    assert all(delete(written.root, each, nothing) for each in garbage)
    assert not list((written.root / "cache" / what).glob("*/"))


def test_nothing_is_garbage_while_a_record_cannot_be_read(written):
    (entry_of(written, written.chain()["dpo"]).path / "manifest.json").write_text("{")
    with pytest.raises(ArtifactError, match=r"dpo.*is not a manifest"):
        found(written)


def test_a_rehearsal_and_a_stage_under_way_stay(written, made):
    [garbage], _ = found(written)
    for path in (entry_of(written, made).path, written.root / "rehearsals" / "living"):
        lock = Lock(path)
        assert lock.try_acquire()
        with lock.holding():
            assert path not in [each.path for each in found(written)[0]]
            assert path != garbage.path or not delete(written.root, garbage, nothing)
    assert not delete(written.root, garbage, nothing)  # it was locked since it was found
    assert all(delete(written.root, each, nothing) for each in found(written)[0])


def test_what_changed_after_it_was_found_stays(written, made):
    """A run finished it, used it, or refers to it by now."""
    entry = Store(written.root).entry("sft", "1" * 64)
    entry.begin()
    unfinished, finished = sorted(found(written)[0], key=lambda each: each.fingerprint or "")
    shutil.rmtree(entry.path)
    shutil.copytree(entry_of(written, made).path, entry.path)
    assert not delete(written.root, unfinished, nothing)
    assert not delete(written.root, finished, lambda: {node(made)})
    cache, rehearsal = written.root / "cache" / "tokens" / ("1" * 16), written.root / "rehearsals" / "dead"
    for each in (cache, rehearsal):
        each.mkdir(parents=True)
    garbage = {each.path.name: each for each in found(written)[0]}
    used = {entry_of(written, made).path.name: entry_of(written, made).output, cache.name: cache, "dead": rehearsal}
    for path in used.values():
        os.utime(path, (time.time() + 1, time.time() + 1))  # no matter how coarse the clock is
    assert not any(delete(written.root, garbage[name], nothing) for name in used)
    assert all(path.exists() for path in used.values()) and not deleted(written.root)
    assert all(delete(written.root, each, nothing) for each in found(written, older_than=-2.0)[0])


def test_a_kill_in_the_middle_leaves_what_the_next_call_takes(written, made, monkeypatch):
    [garbage], _ = found(written)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path, **_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            delete(written.root, garbage, nothing)
    assert not entry_of(written, made).path.exists() and deleted(written.root)
    [half], _ = found(written)
    assert half.what.startswith("deleted ") and list(half.path.glob("*/manifest.json"))
    assert delete(written.root, half, nothing) and not delete(written.root, half, nothing)
    assert not half.path.exists() and found(written) == ([], [])


def test_what_a_kill_left_beside_a_finished_output_goes_alone(written, made):
    entry = entry_of(written, made)
    before = digest_files(entry.path)
    for name in ("work", "checkpoints/step-3", "work.1234.gone"):
        (entry.path / name).mkdir(parents=True)
    dead = Owner(host=Owner.here().host, pid=2**30, started=0.0, token="t")
    (entry.path / "lock").write_text(json.dumps(vars(dead)))
    [garbage], _ = found(written, made)
    assert garbage.why.endswith("output: work, work.1234.gone, checkpoints")
    assert delete(written.root, garbage, lambda: {node(made)})
    assert digest_files(entry.path) == before and found(written, made) == ([], [])


def test_while_the_roots_are_unknown_nothing_is_deleted(written, made):
    def roots():
        raise ArtifactError("cannot be read")

    [garbage], _ = found(written)
    with pytest.raises(ArtifactError, match=r"cannot be read"):
        delete(written.root, garbage, roots)
    assert entry_of(written, made).is_finished() and not list(entry_of(written, made).path.glob("*.gone"))


def test_no_run_records_what_it_reads_between_the_last_check_and_the_deletion(written, made):
    entry, order, runs = entry_of(written, made), [], []
    [garbage], _ = found(written)

    def begin():
        with guard(written.root):
            order.append(("the run checks", entry.is_finished()))

    def roots():
        runs.append(threading.Thread(target=begin))
        runs[0].start()
        runs[0].join(0.3)
        order.append(("the last check", entry.is_finished()))
        return ()

    assert delete(written.root, garbage, roots)
    runs[0].join(120)
    assert order == [("the last check", True), ("the run checks", False)]


def test_the_checkpoints_that_keep_best_keeps_stay(written):
    best = {"resources": {"keep_best": {"metric": "loss", "n": 1}}}
    made = written.stage("sft", {"rows": written.source("rows")}, provenance=best)
    checkpoints = entry_of(written, made).checkpoints
    commit(checkpoints, 3)
    assert found(written, made) == ([], [])
    (checkpoints.directory / ".step-5.gone").mkdir()
    [garbage], _ = found(written, made)
    assert delete(written.root, garbage, nothing)
    assert [path.name for path in checkpoints.directory.iterdir()] == ["step-3"]


@pytest.mark.parametrize("is_last", [True, False])
def test_what_another_gc_deletes_meanwhile_is_not_found(written, made, monkeypatch, is_last):
    other, entry, read = written.stage("dpo", {"policy": made}), entry_of(written, made), Entry.manifest

    def slow(at):
        if is_last:
            shutil.rmtree(entry.path.parent, ignore_errors=True)  # before this stage is read
        elif at.path == entry.path:
            shutil.rmtree(entry.path)
        return read(at)

    monkeypatch.setattr(Entry, "manifest", slow)
    assert [each.what for each in found(written)[0]] == [node(other)]
