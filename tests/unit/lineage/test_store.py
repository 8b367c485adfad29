"""An output is committed whole, on the disk and readable, or it is unfinished."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lineage.checkpoints import Checkpoint
from lineage.errors import ArtifactError, PipelineError, StageError
from lineage.filesystem.lock import Lock
from lineage.store import Manifest, Store
from tests.finished import save
from tests.written_store import ran_at


def manifest(**changes) -> Manifest:
    fields = {
        "pipeline": "p", "stage": "dpo", "method": "m", "recipe": {"beta": 0.1}, "fingerprint": "f" * 64, "inputs": {},
        "files": {"model.txt": "d"}, "output_digest": "o", "metrics": {"loss": 1.0}, "provenance": ran_at(),
    }  # fmt: skip
    return Manifest(**{**fields, **changes})


@pytest.fixture
def entry(tmp_path):
    entry = Store(tmp_path).entry("dpo", "f" * 64)
    entry.begin()
    (entry.output / "model.txt").write_text("weights")
    return entry


def test_an_output_is_unfinished_until_it_is_committed_and_where_a_file_is_missing(tmp_path, entry):
    assert entry.path == tmp_path / "dpo" / ("f" * 16)
    assert not entry.is_finished()
    lock = Lock(entry.path)
    assert lock.try_acquire()
    entry.commit(manifest(), lock)
    assert entry.is_finished() and not entry.work.exists()
    assert Manifest.from_json(manifest().to_json()) == manifest()
    (entry.output / "model.txt").unlink()
    assert not entry.is_finished()


def test_a_kill_between_output_and_manifest_leaves_it_unfinished(entry, monkeypatch):
    lock = Lock(entry.path)
    lock.try_acquire()
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        entry.commit(manifest(), lock)
    assert not entry.is_finished()


def test_an_output_is_on_the_disk_before_it_has_its_manifest_and_that_before_its_checkpoints_go(entry, monkeypatch):
    save(entry, 2)
    (entry.output / "adapter").mkdir()
    (entry.output / "adapter" / "weights").write_text("more")
    entry.metrics.write_text("")
    done, flush, move = [], os.fsync, Path.replace

    def told_flush(descriptor):
        done.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        flush(descriptor)

    def told_move(path, target):
        done.append(("moved", path))
        return move(path, target)

    monkeypatch.setattr(os, "fsync", told_flush)
    monkeypatch.setattr(Path, "replace", told_move)
    lock = Lock(entry.path)
    assert lock.try_acquire()
    entry.commit(manifest(), lock)
    at = done.index(("moved", entry.work / "manifest.json"))
    names = ("output", "output/model.txt", "output/adapter", "output/adapter/weights")
    names += ("work/manifest.json", "metrics.json", "plots.json", "metrics.jsonl")
    assert {entry.path / name for name in names} <= set(done[:at])
    assert at < done.index(entry.path) < done.index(("moved", entry.checkpoints.directory))


def test_a_manifest_that_cannot_be_read_says_what_to_do_and_is_none_of_the_finished(entry):
    for damaged in ("{}", "{"):
        (entry.path / "manifest.json").write_text(damaged)
        with pytest.raises(ArtifactError, match=r"delete .* to produce it again"):
            entry.manifest()
        assert list(Store(entry.path.parents[1]).finished("dpo")) == []


def test_errors_cross_process_borders():
    import pickle

    error = pickle.loads(pickle.dumps(StageError("dpo", "out of memory", "stage.log")))
    assert str(error) == "stage dpo failed: out of memory (log: stage.log)"
    assert isinstance(error, PipelineError)


def test_who_lost_the_lock_does_not_commit(entry):
    lost, winner = Lock(entry.path), Lock(entry.path)
    lost.try_acquire()
    (entry.path / "lock").unlink()
    winner.try_acquire()
    with pytest.raises(ArtifactError, match="was lost"):
        entry.commit(manifest(), lost)
    assert not entry.is_finished()


def test_a_new_attempt_leaves_nothing_after_the_step_that_it_resumes_from(entry):
    for step in (2, 4, 6):
        save(entry, step)
    entry.begin(4)
    assert entry.checkpoints.steps() == [2, 4]
    entry.begin()
    assert entry.checkpoints.steps() == []


WRITTEN = {0o022: 0o644, 0o027: 0o640, 0o077: 0o600}


@pytest.fixture(params=WRITTEN)
def mode(request: pytest.FixtureRequest) -> Iterator[int]:
    """What the umask makes of a file that was mode 600."""
    before = os.umask(request.param)
    yield WRITTEN[request.param]
    os.umask(before)


def write_for_the_writer_alone(directory: Path) -> Path:
    path = directory / "adapter" / "adapter_model.safetensors"
    path.parent.mkdir(parents=True)
    path.write_text("weights")
    path.chmod(0o600)
    return path


def modes(directory: Path) -> set[int]:
    return {path.stat().st_mode & 0o777 for path in directory.rglob("*") if path.is_file()}


def test_every_file_of_an_output_and_of_a_checkpoint_is_as_readable_as_its_manifest(tmp_path: Path, mode: int) -> None:
    entry = Store(tmp_path).entry("dpo", "f" * 64)
    write_for_the_writer_alone(tmp_path / "draft")
    record = Checkpoint(step=5, time=1.0, train_seconds=1.0, num_workers=1, zero_stage=0, metrics={})
    assert modes(entry.checkpoints.commit(tmp_path / "draft", record)) == {mode}
    entry.begin()
    write_for_the_writer_alone(entry.output)
    lock = Lock(entry.path)
    assert lock.try_acquire()
    entry.commit(manifest(), lock)
    assert modes(entry.output) == {mode}


def test_what_lies_elsewhere_and_what_may_be_read_by_more_stays_as_it_is(tmp_path: Path) -> None:
    entry = Store(tmp_path).entry("dpo", "f" * 64)
    entry.begin()
    elsewhere = write_for_the_writer_alone(tmp_path / "hub")
    (entry.output / "link").symlink_to(elsewhere)
    (entry.output / "gone").symlink_to(tmp_path / "gone")
    (entry.output / "script").write_text("")
    (entry.output / "script").chmod(0o755)
    lock = Lock(entry.path)
    assert lock.try_acquire()
    entry.commit(manifest(), lock)
    assert elsewhere.stat().st_mode & 0o777 == 0o600
    assert (entry.output / "script").stat().st_mode & 0o777 == 0o755


def test_who_comes_next_removes_what_a_kill_left(entry):
    save(entry, 2)
    for name in ("checkpoints.12345678.gone", "work.12345678.gone", "checkpoints/.step-4.12345678"):
        (entry.path / name).mkdir()
    entry.fence()
    assert sorted(path.name for path in entry.path.iterdir()) == ["checkpoints", "logs", "output"]
    assert [path.name for path in (entry.path / "checkpoints").iterdir()] == ["step-2"]
