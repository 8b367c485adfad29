"""What of a store may go, and how much room it takes."""

import os
import time

import pytest

from lineage.errors import ArtifactError
from lineage.freeing import free, freed
from lineage.garbage import RESUMABLE_SECONDS, TOKENS, find, size
from lineage.lease import Lease
from lineage.store import Entry, Store
from tests.unit.lineage.test_checkpoints import commit
from tests.written_store import WrittenStore, node


@pytest.fixture
def written(tmp_path) -> WrittenStore:
    return WrittenStore(tmp_path / "store")


def entry_of(written, manifest) -> Entry:
    return Store(written.root).entry(manifest.stage, manifest.fingerprint)


def nobody():
    """Needs anything by now."""
    return ()


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
    assert all(free(written.root, each, nobody) for each in garbage)
    assert sorted(path.name for path in written.root.iterdir() if path.is_dir()) == ["base", "corpus", "cpt"]
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
    assert {each.path for each in found(written, older_than=0.0)[0]} == {saved.path, bare.path}
    assert found(written, older_than=3600.0)[0] == []
    age(saved.path, RESUMABLE_SECONDS + 60)
    assert {each.path for each in found(written)[0]} == {saved.path, bare.path}


def test_bytes_that_another_link_keeps_are_not_freed(written, tmp_path):
    made = written.stage("sft", {"rows": written.source("rows")}, output="x" * 1000)
    [garbage], _ = found(written)
    whole = size([garbage])
    assert whole.num_bytes == whole.freed > 1000
    os.link(entry_of(written, made).output / "content.txt", tmp_path / "cache")
    assert (size([garbage]).num_bytes, size([garbage]).freed) == (whole.num_bytes, whole.freed - 1000)


@pytest.mark.parametrize("what", ["tokens", "reference_logps"])
def test_what_is_cached_and_was_not_read_for_long_goes(written, what):
    cache = written.root / "cache" / what
    for name in ("1" * 16, "2" * 16, "3" * 16 + ".draft"):
        (cache / name).mkdir(parents=True)
        (cache / name / "tokens.arrow").write_text("tokens")
    for name in ("1" * 16, "3" * 16 + ".draft"):
        age(cache / name, RESUMABLE_SECONDS + 60)
    garbage, young = found(written)
    assert [each.paths[0].name for each in garbage] == ["1" * 16, "3" * 16 + ".draft"]
    assert find(written.root, {TOKENS: "run x"}, 0.0) == ([], [])  # any run under way may read them
    assert not free(written.root, garbage[0], lambda: {TOKENS})
    assert [each.paths[0].name for each in young] == ["2" * 16]
    assert all(free(written.root, each, nobody) for each in garbage)
    assert sorted(path.name for path in cache.iterdir() if path.is_dir()) == ["2" * 16]


def test_a_model_from_a_wheel_that_was_not_used_for_long_goes(written):
    cache = written.root / "cache" / "models"
    for name in ("1" * 16, "2" * 16):
        (cache / name).mkdir(parents=True)
        (cache / name / "model.safetensors").write_text("weights")
    age(cache / ("1" * 16), RESUMABLE_SECONDS + 60)
    [garbage], [young] = found(written)
    assert (garbage.what, young.what) == (f"model {'1' * 16}", f"model {'2' * 16}")
    assert find(written.root, {TOKENS: "run x"}, 0.0) == ([], [])  # any run under way may read it
    assert free(written.root, garbage, nobody)
    assert sorted(path.name for path in cache.glob("*/")) == ["2" * 16]


def test_nothing_goes_while_a_record_cannot_be_read(written):
    made = written.chain()
    (entry_of(written, made["dpo"]).path / "manifest.json").write_text("{")
    with pytest.raises(ArtifactError, match=r"dpo.*is not a manifest"):
        found(written)


def test_what_a_rehearsal_left_goes_after_a_week_and_one_under_way_does_not(written):
    dead, living = written.root / "rehearsals" / "dead", written.root / "rehearsals" / "living"
    (dead / "sft").mkdir(parents=True)
    lease = Lease(living)
    assert lease.try_acquire()
    with lease.holding():
        garbage, young = found(written)
        assert (garbage, [each.what for each in young]) == ([], ["rehearsals/dead"])
        age(dead, RESUMABLE_SECONDS + 60)
        [garbage], _ = found(written)
        assert free(written.root, garbage, nobody)
    assert sorted(path.name for path in dead.parent.iterdir() if path.is_dir()) == ["living"]


def test_an_output_that_a_run_took_up_lately_is_young(written):
    made = written.stage("sft", {"rows": written.source("rows")})
    age(entry_of(written, made).path, 60)
    assert found(written, older_than=30.0)[1] == []
    os.utime(entry_of(written, made).path)
    assert found(written, older_than=30.0)[0] == []
