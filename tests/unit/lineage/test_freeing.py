"""How garbage goes: alone with each thing, after a last look, and a kill in the middle leaves nothing half."""

import json
import os
import shutil
import threading
import time

import pytest

from lineage import freeing
from lineage.digest import digest_files
from lineage.errors import ArtifactError
from lineage.freeing import free, freed, guard
from lineage.lease import LOCK, Holder, Lease
from lineage.store import Entry, Store
from tests.unit.lineage.test_checkpoints import commit
from tests.unit.lineage.test_garbage import entry_of, found, nobody
from tests.written_store import WrittenStore, node


@pytest.fixture
def written(tmp_path) -> WrittenStore:
    return WrittenStore(tmp_path / "store")


@pytest.fixture
def made(written):
    return written.stage("sft", {"rows": written.source("rows")})


def test_nothing_of_a_running_stage_goes_and_it_is_not_waited_for(written):
    made = written.stage("sft", {"rows": written.source("rows")})
    entry = entry_of(written, made)
    [garbage], _ = found(written)
    lease = Lease(entry.path)
    assert lease.try_acquire()
    with lease.holding():
        assert found(written) == ([], [])
        assert not free(written.root, garbage, nobody)
    assert entry.is_finished()
    assert free(written.root, garbage, nobody)
    assert not entry.path.exists()


def test_what_is_no_longer_what_was_found_stays(written):
    entry = Store(written.root).entry("sft", "1" * 64)
    entry.begin()
    [unfinished], _ = found(written)
    made = written.stage("sft", {"rows": written.source("rows")})
    shutil.rmtree(entry.path)
    shutil.copytree(entry_of(written, made).path, entry.path)  # a run finished it meanwhile
    assert not free(written.root, unfinished, nobody)
    assert entry.is_finished()


def test_a_kill_in_the_middle_leaves_what_the_next_time_takes(written, monkeypatch):
    made = written.stage("sft", {"rows": written.source("rows")})
    [garbage], _ = found(written)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path, **_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            free(written.root, garbage, nobody)
    assert entry_of(written, made).manifest() is None
    assert freed(written.root)
    [half], _ = found(written)
    assert half.why == "unfinished, without a checkpoint"
    assert free(written.root, half, nobody)


def test_what_a_kill_left_beside_a_finished_output_goes_alone(written):
    made = written.stage("sft", {"rows": written.source("rows")})
    entry = entry_of(written, made)
    before = digest_files(entry.path)
    for name in ("work", "checkpoints/step-3", "work.1234.gone"):
        (entry.path / name).mkdir(parents=True)
    dead = Holder(host=Holder.here().host, pid=2**30, started=0.0, token="t")
    (entry.path / "lock").write_text(json.dumps(vars(dead)))
    (entry.path / "lock.of-another").write_text(json.dumps(vars(dead)))
    [garbage], _ = found(written, made)
    assert garbage.why.endswith("output: work, work.1234.gone, lock.of-another, checkpoints")
    assert free(written.root, garbage, nobody)
    assert digest_files(entry.path) == before
    assert found(written, made) == ([], [])


def test_the_checkpoints_that_keep_best_has_kept_stay(written):
    best = {"resources": {"keep_best": {"metric": "loss", "n": 1}}}
    made = written.stage("sft", {"rows": written.source("rows")}, provenance=best)
    checkpoints = entry_of(written, made).checkpoints
    commit(checkpoints, 3)
    assert found(written, made) == ([], [])
    (checkpoints.directory / ".step-5.gone").mkdir()
    [garbage], _ = found(written, made)
    assert free(written.root, garbage, nobody)
    assert [path.name for path in checkpoints.directory.iterdir()] == ["step-3"]


def test_what_came_to_be_needed_after_it_was_found_stays(written, made):
    [garbage], _ = found(written)
    assert not free(written.root, garbage, lambda: {node(made)})
    assert entry_of(written, made).is_finished() and not freed(written.root)


def test_what_was_used_after_it_was_found_stays(written, made):
    """Also where only the command that used it is over by now."""
    entry, cache, left = entry_of(written, made), written.root / "cache" / "tokens" / ("1" * 16), written.root
    for each in (cache, left / "rehearsals" / "dead"):
        each.mkdir(parents=True)
    garbage = {each.path.name: each for each in found(written, older_than=0.0)[0]}
    used = {entry.path.name: entry.output, cache.name: cache, "dead": left / "rehearsals" / "dead"}
    for path in used.values():
        os.utime(path, (time.time() + 1, time.time() + 1))  # no matter how coarse the clock is
    assert not any(free(written.root, garbage[name], nobody) for name in used)
    assert all(path.exists() for path in used.values())
    assert all(free(written.root, each, nobody) for each in found(written, older_than=-2.0)[0])


def test_while_a_record_cannot_be_read_it_says_so(written, made):
    [garbage], _ = found(written)

    def look():
        raise ArtifactError("cannot be read")

    with pytest.raises(ArtifactError, match=r"cannot be read"):
        free(written.root, garbage, look)
    assert entry_of(written, made).is_finished() and not list(entry_of(written, made).path.glob("*.gone"))


def test_between_the_last_look_and_the_end_no_run_notes_what_it_reads(written, made):
    entry, order = entry_of(written, made), []
    [garbage], _ = found(written)

    def begins():
        with guard(written.root):
            order.append(("the run looks", entry.is_finished()))

    def look():
        run = threading.Thread(target=begins)
        run.start()
        run.join(0.3)
        order.append(("the last look", entry.is_finished()))
        runs.append(run)
        return ()

    runs: list[threading.Thread] = []
    assert free(written.root, garbage, look)
    runs[0].join()
    assert order == [("the last look", True), ("the run looks", False)]


@pytest.mark.parametrize("cleared", [True, False])
def test_a_lease_that_was_lost_ends_it(written, made, monkeypatch, cleared):
    """Suspended in the middle; who took over has begun anew, or is about to."""
    entry = entry_of(written, made)
    [garbage], _ = found(written)
    heir = Holder(host=Holder.here().host, pid=1, started=0.0, token="heir")

    def suspended(*_):
        if cleared:
            entry.begin()
            (entry.output / "new.txt").write_text("of the heir")
        else:
            (entry.path / LOCK).write_text(json.dumps(vars(heir)))

    monkeypatch.setattr(freeing, "_note", suspended)
    if cleared:  # the very moment after the lease was seen to be ours
        monkeypatch.setattr(Lease, "require", lambda _: None)
    before = sorted(path.name for path in entry.output.iterdir())
    assert free(written.root, garbage, nobody) == cleared  # then there is nothing left of what was found
    assert sorted(path.name for path in entry.output.iterdir()) == (["new.txt"] if cleared else before)


def test_who_comes_second_leaves_no_empty_place(written, made):
    [garbage], _ = found(written)
    assert free(written.root, garbage, nobody)
    assert not free(written.root, garbage, nobody)
    assert not Store(written.root).entry(made.stage, made.fingerprint).path.parent.exists()


@pytest.mark.parametrize("is_last", [True, False])
def test_what_another_one_frees_during_the_search_is_not_found(written, made, monkeypatch, is_last):
    other, entry, read = written.stage("dpo", {"policy": made}), entry_of(written, made), Entry.manifest

    def slow(at):
        if is_last:
            shutil.rmtree(entry.path.parent, ignore_errors=True)  # before this stage is looked into
        elif at.path == entry.path:
            shutil.rmtree(entry.path)
        return read(at)

    monkeypatch.setattr(Entry, "manifest", slow)
    assert [each.what for each in found(written)[0]] == [node(other)]
