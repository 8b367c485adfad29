"""Files of the record survive a kill in the middle of a write, and a full disk."""

import errno
import hashlib
import os
import random
from collections.abc import Callable
from fcntl import F_GETFL, fcntl
from mmap import PAGESIZE, mmap
from pathlib import Path

import pytest

from lineage.errors import ArtifactError, ConfigError, PipelineError
from lineage.filesystem import digest
from lineage.filesystem.disk import explain_full_disk, free_bytes, gigabytes
from lineage.filesystem.files import append_jsonl, atomic_write, local_path, read_jsonl, replace_jsonl
from lineage.record.metrics_file import ReportFile, cut_reports, last_step, read_reports
from lineage.store import Entry, store_path
from tests.saved import commit


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    file = tmp_path / "folder" / "note.json"
    atomic_write(file, "old \u00e9 \udc80")
    before = file.read_bytes()

    def full(path, content):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="No space left"):
            atomic_write(file, "new")
    assert file.read_bytes() == before
    monkeypatch.setattr(os, "replace", full)
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        atomic_write(file, "new")
    assert file.read_bytes() == before and list(file.parent.iterdir()) == [file]


def test_half_a_line_is_not_read_and_goes_with_the_next(tmp_path):
    file = tmp_path / "events.jsonl"
    assert read_jsonl(file, dict) == []
    append_jsonl(file, {"who": "\u00e9\u2028\udc80"}, {"who": "b"})
    with file.open("a") as half:
        half.write('{"who": "c"')
    assert read_jsonl(file, dict, "is not an event") == [{"who": "\u00e9\u2028\udc80"}, {"who": "b"}]
    append_jsonl(file, {"who": "d"}, flush=False)
    assert [each["who"] for each in read_jsonl(file, dict, "is not an event")] == ["\u00e9\u2028\udc80", "b", "d"]
    file.write_text('{"wh')
    append_jsonl(file, {"who": "e"})
    assert file.read_text() == '{"who": "e"}\n'


@pytest.mark.parametrize("damaged", ["{", "[1]", "null", '{"other": 1}'])
def test_a_damaged_line_is_skipped_or_named(tmp_path, damaged):
    file = tmp_path / "events.jsonl"
    file.write_text(f'{{"who": "a"}}\n{damaged}\n{{"who": "b"}}\n')

    def parse(who):
        return who

    assert read_jsonl(file, parse) == ["a", "b"]
    with pytest.raises(ArtifactError, match=rf"{file}:2: is not an event \(.*\); correct or delete that line"):
        read_jsonl(file, parse, "is not an event")


def test_reports_are_read_at_once_as_they_come_and_cut_before_a_resume(tmp_path):
    file = tmp_path / "metrics.jsonl"
    following = ReportFile(file)
    assert (read_reports(file), last_step(file), following.read()) == ([], 0, [])
    cut_reports(file, 3)
    assert not file.exists()
    replace_jsonl(file, [{"step": step, "time": 0.5, "metrics": {"loss": float("nan")}} for step in (1, 2)])
    assert [report.step for report in following.read()] == [1, 2]
    append_jsonl(file, {"step": 3, "time": 1.5, "metrics": {"loss": 1.0}}, flush=False)
    with file.open("ab") as half:
        half.write(b'{}\n\xff\n[]\n{"step": "x", "time": 0, "metrics": {}}\n{"step": 4, "ti')
    assert [report.metrics for report in following.read()] == [{"loss": 1.0}]
    assert (last_step(file), following.read(), following.num_restarts) == (3, [], 0)
    cut_reports(file, 2)
    assert [report.step for report in read_reports(file)] == [1, 2] == [report.step for report in following.read()]
    assert following.num_restarts == 1


def torch_save(cause: str) -> Callable[[], None]:
    """As torch 2 raises it: what failed is in the context only."""

    def fail() -> None:
        try:
            raise RuntimeError(cause)
        except RuntimeError:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534")  # noqa: B904

    return fail


IN_A_FILE = torch_save("PytorchStreamWriter failed writing file data/0: file write failed")
AT_ITS_END = torch_save("basic_ios::clear: iostream error")


def safetensors() -> None:
    raise Exception("Error while serializing: I/O error: No space left on device (os error 28)")


def plain() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def quota() -> None:
    raise OSError(errno.EDQUOT, "Disk quota exceeded")


@pytest.mark.parametrize("fail", [IN_A_FILE, AT_ITS_END, safetensors, plain, quota])
def test_each_is_one_line_that_names_the_disk_and_what_is_kept(tmp_path: Path, fail: Callable[[], None]) -> None:
    reported = rf"^the disk of {tmp_path} is full \(.*it has no checkpoint; free space .*"
    with pytest.raises(PipelineError, match=reported), explain_full_disk(tmp_path):
        fail()
    commit(Entry(tmp_path).checkpoints, 7, {})
    with pytest.raises(PipelineError, match=r"checkpoint of step 7 is kept") as caught, explain_full_disk(tmp_path):
        fail()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "Permission denied"), ValueError("x"), ConfigError("y")])
def test_other_errors_stay_what_they_are(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)) as caught, explain_full_disk(tmp_path):
        raise error
    assert caught.value is error


def test_room_is_that_of_the_file_system_also_of_what_is_not_there_yet(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "a" / "b") > 0
    assert (gigabytes(3_140_000_000), gigabytes(21_000)) == ("3.1 GB", "21.0 kB")


PIECE = 2**16


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, 3 * PIECE + 4096])
def test_what_is_digested_while_it_is_written_is_whole(tmp_path, monkeypatch, size, direct):
    monkeypatch.setattr(digest, "_PIECE_BYTES", PIECE)
    if not direct:  # a file system that takes the flag, and no write with it
        write = digest._write_whole
        monkeypatch.setattr(digest, "_write_whole", lambda file, piece: write(Refusing(file), piece))
    content = random.Random(size).randbytes(size)
    parts = [content[:100], memoryview(content)[100 : size // 2], b"", content[max(100, size // 2) :]]
    assert digest.write_digested(tmp_path / "file", parts) == hashlib.sha256(content).hexdigest()
    assert (tmp_path / "file").read_bytes() == content


def test_what_begins_at_a_page_is_written_without_a_copy(tmp_path):
    memory = mmap(-1, 3 * digest._PIECE_BYTES // 2 + 5)
    memory[:] = random.Random(0).randbytes(len(memory))
    head = b" " * PAGESIZE
    pieces = list(digest._pieces([head, memoryview(memory)]))
    assert [piece.obj is memory for piece in pieces] == [False, True, True, False]
    assert (len(pieces[0]), len(pieces[-1])) == (PAGESIZE, 5)
    expected = hashlib.sha256(head + memory[:]).hexdigest()
    assert digest.write_digested(tmp_path / "file", [head, memoryview(memory)]) == expected
    assert (tmp_path / "file").read_bytes() == head + memory[:]


class Refusing:
    """A file that accepts no direct write."""

    def __init__(self, file):
        self._file = file

    def fileno(self):
        return self._file.fileno()

    def write(self, piece):
        if fcntl(self._file, F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return self._file.write(piece)


def test_a_home_directory_is_filled_in_and_an_unknown_one_is_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert local_path("~/plan.json") == Path("/home/me/plan.json") and store_path("~/store") == Path("/home/me/store")
    for find in (local_path, store_path):
        with pytest.raises(ConfigError, match="~no-such-account/x: this machine has no account of that name"):
            find("~no-such-account/x")
    (tmp_path / "~rows.jsonl").touch()  # what editors leave
    assert local_path("~rows.jsonl") == Path("~rows.jsonl")
