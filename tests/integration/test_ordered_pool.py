"""Order, errors, laziness and the end of the processes."""

import multiprocessing
import os
import time
from types import SimpleNamespace

import pytest

from lineage.errors import DataError, PipelineError
from tasks.data import kinds as ordered_pool
from tasks.data.kinds import ordered_map


@pytest.fixture(autouse=True)
def no_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered_pool, "INLINE_SECONDS", 0.0)


class Loud:
    def __del__(self, write=os.write) -> None:
        write(2, b"the interpreter cleans up\n")


LEFT: list[Loud] = []


def slow_first(item: int) -> tuple[int, int]:
    """The first items take longest, so that results come out of order."""
    if multiprocessing.parent_process():
        LEFT.append(Loud())
    time.sleep(0.02 * max(0, 3 - item))
    return item, os.getpid()


def refuse_three(item: int) -> int:
    if item == 3:
        raise DataError("row 3 is wrong")
    return item


def die(item: int) -> int:
    os._exit(item)


def test_results_come_in_the_order_of_the_items_from_other_processes(capfd: pytest.CaptureFixture[str]) -> None:
    results = list(ordered_map(slow_first, range(12), 2))
    assert [item for item, _ in results] == list(range(12))
    assert os.getpid() not in {process for _, process in results}
    assert capfd.readouterr() == ("", "")  # DuckDB's bindings report what they did not free then


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_comes_out_as_itself_after_the_results_before_it(workers: int) -> None:
    results = ordered_map(refuse_three, range(9), workers)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(DataError, match="row 3 is wrong"):
        next(results)


def test_a_process_that_dies_is_an_error_that_says_so() -> None:
    with pytest.raises(PipelineError, match=r"a process that works on rows died.*out of memory"):
        list(ordered_map(die, range(1, 5), 2))


def test_few_items_are_processed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered_pool, "INLINE_SECONDS", 60.0)
    assert {process for _, process in ordered_map(slow_first, range(4), 2)} == {os.getpid()}


def test_items_after_the_first_seconds_go_to_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(ordered_pool, "INLINE_SECONDS", 3.0)
    monkeypatch.setattr(ordered_pool, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    results = list(ordered_map(slow_first, range(6), 2))
    assert [item for item, _ in results] == list(range(6))
    assert [process == os.getpid() for _, process in results] == [True, True, False, False, False, False]


@pytest.mark.parametrize("workers", [1, 2])
def test_what_is_set_maps_the_items_after_the_first_seconds(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    clock, mapped = iter(range(100)), list[int]()

    def elsewhere(function, items):
        for item in items:
            mapped.append(item)
            yield function(item)

    monkeypatch.setattr(ordered_pool, "INLINE_SECONDS", 3.0)
    monkeypatch.setattr(ordered_pool, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    token = ordered_pool.ELSEWHERE.set(elsewhere)
    try:
        assert [item for item, _ in ordered_map(slow_first, range(6), workers)] == list(range(6))
    finally:
        ordered_pool.ELSEWHERE.reset(token)
    assert mapped == [2, 3, 4, 5]
