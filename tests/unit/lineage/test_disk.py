"""The ways in which libraries say that the disk is full, and what a user is told."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from lineage.disk import free_bytes, full_disk_named, gigabytes
from lineage.errors import ConfigError, PipelineError
from lineage.store import Entry
from tests.saved import commit


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
    told = rf"^the disk of {tmp_path} is full \(.*it has no checkpoint; free space .*"
    with pytest.raises(PipelineError, match=told), full_disk_named(tmp_path):
        fail()
    commit(Entry(tmp_path).checkpoints, 7, {})
    with pytest.raises(PipelineError, match=r"checkpoint of step 7 is kept") as caught, full_disk_named(tmp_path):
        fail()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "Permission denied"), ValueError("x"), ConfigError("y")])
def test_other_errors_stay_what_they_are(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)) as caught, full_disk_named(tmp_path):
        raise error
    assert caught.value is error


def test_room_is_that_of_the_file_system_also_of_what_is_not_there_yet(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "a" / "b") > 0
    assert (gigabytes(3_140_000_000), gigabytes(21_000)) == ("3.1 GB", "21.0 kB")
