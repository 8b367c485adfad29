"""Checkpoints: whole or absent, and what is damaged later is found by its digests."""

import math
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from lineage.checkpoints import RECORD, Checkpoints
from lineage.errors import ArtifactError
from tests import saved


def commit(store: Checkpoints, step: int, metrics: Mapping[str, float] = {"loss": 3.0}) -> Path:
    files = {"model.safetensors": f"weights {step}", "part/rank-0": f"state {step}"}
    return saved.commit(store, step, files, train_seconds=2.0, metrics=metrics)


def rewrite(path: Path, old: str, new: str) -> None:
    text = (path / RECORD).read_text()
    assert text.count(old) == 1
    (path / RECORD).write_text(text.replace(old, new))


@pytest.fixture
def store(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints")


def test_a_committed_checkpoint_is_read_back_with_the_digests_of_its_files(store, tmp_path):
    path = commit(store, 5)
    assert path == store.directory / "step-5"
    assert not (store.directory.parent / "draft").exists()
    found = store.read(5)
    assert (found.step, found.train_seconds, found.metrics) == (5, 2.0, {"loss": 3.0})
    assert sorted(found.files) == ["model.safetensors", "part/rank-0"]
    assert Checkpoints.at(path) == found
    with pytest.raises(ArtifactError, match="its name is not step-N"):
        Checkpoints.at(tmp_path)
    commit(store, 6, metrics={"loss": 1.0, "reward": math.nan, "pace": math.inf})  # which JSON cannot hold
    assert store.damage(6) == []
    assert store.read(6).metrics == {"loss": 1.0}


def test_the_newest_is_by_number_not_by_name_and_what_was_never_committed_is_not_seen(store):
    draft = store.directory / "draft-700"
    draft.mkdir(parents=True)
    (draft / "model.safetensors").write_text("half")
    assert (store.steps(), store.newest(), store.newest_intact()) == ([], None, (None, []))
    for step in (9, 10, 100, 20):
        commit(store, step)
    assert store.steps() == [9, 10, 20, 100]
    assert store.newest().step == store.newest_intact()[0].step == 100


@pytest.mark.parametrize(
    ("harm", "found"),
    [
        (lambda path: (path / "model.safetensors").write_text("weights 6"), "model.safetensors has SHA-256"),
        (lambda path: (path / "part" / "rank-0").unlink(), "part/rank-0 is missing"),
        (lambda path: (path / "other").write_text("x"), "other was added"),
        (lambda path: (path / RECORD).unlink(), f"{RECORD} is missing"),
        (lambda path: (path / RECORD).write_text("{"), f"{RECORD} cannot be read"),
        (lambda path: (path / RECORD).write_text("null"), f"{RECORD} cannot be read"),
        (lambda path: rewrite(path, '"num_workers": 1', '"num_workers": 3'), f"{RECORD} has SHA-256"),
        (lambda path: rewrite(path, '"step": 10', '"step": 11'), f"{RECORD} has SHA-256"),
        (lambda path: rewrite(path, '"loss": 3.0', '"loss": 3.1'), f"{RECORD} has SHA-256"),
        (lambda path: rewrite(path, '"files": {', '"files": null, "other": {'), f"{RECORD} cannot be read"),
        (lambda path: rewrite(path, '"digest"', '"digits"'), f"{RECORD} cannot be read"),
    ],
)
def test_a_damaged_one_is_named_and_the_one_before_is_used(store: Checkpoints, harm, found: str) -> None:
    commit(store, 5)
    harm(commit(store, 10))
    intact, damaged = store.newest_intact()
    assert intact and intact.step == 5
    [phrase] = damaged
    assert "step-10" in phrase
    assert found in phrase


def test_a_checkpoint_under_the_name_of_another_step_is_damaged(store: Checkpoints) -> None:
    commit(store, 5)
    commit(store, 10).rename(store.path(12))
    intact, damaged = store.newest_intact()
    assert intact and intact.step == 5
    assert damaged == [f"{store.path(12) / RECORD} is the record of step 10"]
    newest = store.newest()
    assert newest and newest.step == 5


def test_what_is_cleared_or_discarded_is_gone_at_once_or_not_at_all(store: Checkpoints, monkeypatch) -> None:
    def killed(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    for step in (2, 4):
        commit(store, step)
    draft = store.directory / ".step-5.0123"
    draft.mkdir()
    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        store.discard_drafts()
    assert not draft.exists() and store.steps() == [2, 4]
    with pytest.raises(KeyboardInterrupt):
        store.clear()
    assert store.steps() == []


def test_only_what_is_kept_stays(store: Checkpoints) -> None:
    for step in (1, 2, 3, 4):
        commit(store, step)
    store.keep([2, 4])
    assert sorted(path.name for path in store.directory.iterdir()) == ["step-2", "step-4"]
    store.clear()
    assert not store.directory.exists()


def test_who_lost_the_lease_replaces_and_removes_nothing(store: Checkpoints) -> None:
    def require() -> None:
        raise ArtifactError("the lock was lost")

    theirs = (commit(store, 5) / RECORD).read_bytes()
    mine = Checkpoints(store.directory, require)
    with pytest.raises(ArtifactError, match="was lost"):
        commit(mine, 5, metrics={"loss": 9.0})
    with pytest.raises(ArtifactError, match="was lost"):
        mine.keep([])
    assert (store.path(5) / RECORD).read_bytes() == theirs
    assert store.damage(5) == []


def test_none_is_put_where_another_is(store: Checkpoints) -> None:
    commit(store, 5)
    with pytest.raises(OSError, match="not empty"):
        commit(store, 5, metrics={"loss": 9.0})
    assert store.read(5).metrics == {"loss": 3.0}
