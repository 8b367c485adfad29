"""What a watcher knows of its sources, for every kind of them."""

import os
import time
from types import SimpleNamespace

import fsspec
import pytest
from huggingface_hub import HfApi

from flows.planning.plan import make_plan
from flows.watch.digests import SourceDigests, last_taken
from tests.unit.flows.declare.test_config import toy
from tests.unit.flows.planning.test_plan import finish


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_text("one")
    return folder


def digests(tmp_path, path) -> SourceDigests:
    return SourceDigests(toy(f"sources.rows.path={path}", f"store={tmp_path}/store"))


@pytest.mark.parametrize("path", ["data/a.jsonl", "data", "data/*.jsonl"])
def test_a_file_a_directory_and_a_glob_are_followed(tmp_path, data, path):
    watched = digests(tmp_path, tmp_path / path)
    before = watched.fingerprint("rows")
    assert watched.fingerprint("rows") == before
    (data / "a.jsonl").write_text("two")
    changed = watched.fingerprint("rows")
    assert changed != before
    if not path.endswith("a.jsonl"):
        (data / "b.jsonl").write_text("more")
        assert watched.fingerprint("rows") not in {before, changed}
        (data / "b.jsonl").unlink()
    (data / "a.jsonl").write_text("one")
    assert watched.fingerprint("rows") == before


def test_a_bucket_is_followed(tmp_path):
    files = fsspec.filesystem("memory")
    files.pipe("/watched/a.jsonl", b"one")
    watched = digests(tmp_path, "memory://watched")
    before = watched.fingerprint("rows")
    files.pipe("/watched/a.jsonl", b"two")
    assert watched.fingerprint("rows") != before
    files.store.clear()


def test_a_branch_of_the_hub_is_followed(tmp_path, monkeypatch):
    commits = iter(["a" * 40, "a" * 40, "b" * 40])
    asked = []

    def repo_info(self, path, **how):
        asked.append((path, how["repo_type"], how["revision"]))
        return SimpleNamespace(sha=next(commits))

    monkeypatch.setattr(HfApi, "repo_info", repo_info)
    watched = digests(tmp_path, "owner/data")
    first, same, other = (watched.fingerprint("rows") for _ in range(3))
    assert first == same != other
    assert asked == [("owner/data", "dataset", None)] * 3


def test_files_that_rest_are_not_read_again(tmp_path, data, monkeypatch):
    old = time.time() - 60
    os.utime(data / "a.jsonl", (old, old))
    watched = digests(tmp_path, data)
    before = watched.fingerprint("rows")
    monkeypatch.setattr("flows.watch.digests.pin", None)
    assert watched.fingerprint("rows") == before


def test_a_file_that_was_written_just_now_is_read_again(tmp_path, data):
    """Two writes within one tick of the clock leave size and time as they were."""
    watched = digests(tmp_path, data)
    file = data / "a.jsonl"
    before, status = watched.fingerprint("rows"), file.stat()
    file.write_text("two")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert watched.fingerprint("rows") != before


def test_what_a_pipeline_took_last_is_in_its_newest_output(tmp_path, data):
    pipeline = toy(f"sources.rows.path={data}", f"store={tmp_path}/store")
    assert last_taken(pipeline, "rows") is None
    for content in ("one", "two"):
        (data / "a.jsonl").write_text(content)
        finish(make_plan(pipeline), "data")
        assert last_taken(pipeline, "rows") == SourceDigests(pipeline).fingerprint("rows")
    assert last_taken(toy(f"sources.rows.path={data}", f"store={tmp_path}/store", "name=other"), "rows") is None
