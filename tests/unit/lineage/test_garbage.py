"""What of a store may go, how much room it takes, and that a kill in the middle leaves nothing half."""

import json
import os
import shutil
import time

import pytest

from lineage import garbage as garbage_module
from lineage.digest import digest_files
from lineage.errors import ArtifactError
from lineage.garbage import RESUMABLE_SECONDS, find, free, freed, size
from lineage.lease import Holder, Lease
from lineage.store import Entry, Store
from tests.unit.lineage.test_checkpoints import commit
from tests.written_store import WrittenStore, node


@pytest.fixture
def written(tmp_path) -> WrittenStore:
    return WrittenStore(tmp_path / "store")


def entry_of(written, manifest) -> Entry:
    return Store(written.root).entry(manifest.stage, manifest.fingerprint)


def found(written, *needed, older_than=None):
    return find(written.root, {node(each): "a test" for each in needed}, older_than)


def age(path, seconds):
    for each in [*path.rglob("*"), path]:
        os.utime(each, (time.time() - seconds, time.time() - seconds))


def test_children_go_before_what_they_were_made_from_and_the_needed_stay(written):
    made = written.chain()
    garbage, young = found(written, made["corpus"], made["base"], made["cpt"])
    assert [each.what for each in garbage] == [node(made["evaluate"]), node(made["dpo"]), node(made["pairs"])]
    assert {each.why for each in garbage} == {"nothing refers to it"}
    assert young == []
    assert all(free(written.root, each) for each in garbage)
    assert sorted(path.name for path in written.root.iterdir()) == ["base", "corpus", "cpt", "freed.jsonl"]
    assert freed(written.root) == {(made[name].stage, made[name].fingerprint) for name in ("evaluate", "dpo", "pairs")}
    assert found(written, made["corpus"], made["base"], made["cpt"]) == ([], [])


def test_what_can_be_gone_on_from_stays_for_a_week_and_other_attempts_go(written):
    saved, bare = Store(written.root).entry("dpo", "1" * 64), Store(written.root).entry("dpo", "2" * 64)
    for entry in (saved, bare):
        entry.begin()
    commit(saved.checkpoints, 5)
    garbage, young = found(written)
    assert [each.why for each in garbage] == ["unfinished, without a checkpoint"]
    assert [each.why for each in young] == ["unfinished, with a checkpoint of step 5"]
    assert {each.entry for each in found(written, older_than=0.0)[0]} == {saved.path, bare.path}
    assert found(written, older_than=3600.0)[0] == []
    age(saved.path, RESUMABLE_SECONDS + 60)
    assert {each.entry for each in found(written)[0]} == {saved.path, bare.path}


def test_nothing_of_a_running_stage_goes_and_it_is_not_waited_for(written):
    made = written.stage("sft", {"rows": written.source("rows")})
    entry = entry_of(written, made)
    [garbage], _ = found(written)
    lease = Lease(entry.path)
    assert lease.try_acquire()
    with lease.holding():
        assert found(written) == ([], [])
        assert not free(written.root, garbage)
    assert entry.is_finished()
    assert free(written.root, garbage)
    assert not entry.path.exists()


def test_what_is_no_longer_what_was_found_stays(written):
    entry = Store(written.root).entry("sft", "1" * 64)
    entry.begin()
    [unfinished], _ = found(written)
    made = written.stage("sft", {"rows": written.source("rows")})
    shutil.rmtree(entry.path)
    shutil.copytree(entry_of(written, made).path, entry.path)  # a run finished it meanwhile
    assert not free(written.root, unfinished)
    assert entry.is_finished()


def test_a_kill_in_the_middle_leaves_what_the_next_time_takes(written, monkeypatch):
    made = written.stage("sft", {"rows": written.source("rows")})
    [garbage], _ = found(written)
    with monkeypatch.context() as patch:
        patch.setattr(garbage_module, "_delete", lambda paths: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            free(written.root, garbage)
    assert entry_of(written, made).manifest() is None
    assert freed(written.root)
    [half], _ = found(written)
    assert half.why == "unfinished, without a checkpoint"
    assert free(written.root, half)


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
    assert garbage.why.endswith("output: work, work.1234.gone, checkpoints, lock.of-another")
    assert free(written.root, garbage)
    assert digest_files(entry.path) == before
    assert found(written, made) == ([], [])


def test_bytes_that_another_link_keeps_are_not_freed(written, tmp_path):
    made = written.stage("sft", {"rows": written.source("rows")}, output="x" * 1000)
    [garbage], _ = found(written)
    whole = size([garbage])
    assert whole.num_bytes == whole.freed > 1000
    os.link(entry_of(written, made).output / "content.txt", tmp_path / "cache")
    assert (size([garbage]).num_bytes, size([garbage]).freed) == (whole.num_bytes, whole.freed - 1000)


def test_tokens_that_nobody_has_read_for_long_go(written):
    cache = written.root / "cache" / "tokens"
    for name in ("1" * 16, "2" * 16, "3" * 16 + ".draft"):
        (cache / name).mkdir(parents=True)
        (cache / name / "tokens.arrow").write_text("tokens")
    for name in ("1" * 16, "3" * 16 + ".draft"):
        age(cache / name, RESUMABLE_SECONDS + 60)
    garbage, young = found(written)
    assert [each.paths[0].name for each in garbage] == ["1" * 16, "3" * 16 + ".draft"]
    assert [each.paths[0].name for each in young] == ["2" * 16]
    assert all(free(written.root, each) for each in garbage)
    assert sorted(path.name for path in cache.iterdir() if path.is_dir()) == ["2" * 16]


def test_nothing_goes_while_a_record_cannot_be_read(written):
    made = written.chain()
    (entry_of(written, made["dpo"]).path / "manifest.json").write_text("{")
    with pytest.raises(ArtifactError, match=r"dpo.*is not a manifest"):
        found(written)
