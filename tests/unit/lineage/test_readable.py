"""What is committed may be read by whom the umask lets read, whatever library wrote it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lineage.checkpoints import Checkpoint
from lineage.lock import Lock
from lineage.store import Store
from tests.unit.lineage.test_store import manifest

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


def test_every_file_of_an_output_is_as_readable_as_its_manifest(tmp_path: Path, mode: int) -> None:
    entry = Store(tmp_path).entry("dpo", "f" * 64)
    entry.begin()
    write_for_the_writer_alone(entry.output)
    lock = Lock(entry.path)
    assert lock.try_acquire()
    entry.commit(manifest(), lock)
    assert modes(entry.output) == {mode}


def test_every_file_of_a_checkpoint_is(tmp_path: Path, mode: int) -> None:
    entry = Store(tmp_path).entry("dpo", "f" * 64)
    write_for_the_writer_alone(tmp_path / "draft")
    record = Checkpoint(step=5, time=1.0, train_seconds=1.0, num_workers=1, zero_stage=0, metrics={})
    assert modes(entry.checkpoints.commit(tmp_path / "draft", record)) == {mode}


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
