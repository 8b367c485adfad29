"""The attempts at an artifact, and whose code trained its steps."""

from pathlib import Path

import pytest

from lineage.record.attempts import FILE, Attempt, attempts, changed_at, other_code_digests, record_attempt


def test_a_line_that_a_kill_has_cut_costs_no_other(tmp_path: Path) -> None:
    record_attempt(tmp_path, 0, "a")
    with (tmp_path / FILE).open("a") as file:
        file.write('{"time": 1.0, "ho')
    record_attempt(tmp_path, 4, "b")
    record_attempt(tmp_path, 6, "c")
    assert [(each.step, each.code_digest) for each in attempts(tmp_path)] == [(0, "a"), (4, "b"), (6, "c")]


@pytest.mark.parametrize(
    ("made", "step", "found"),
    [
        ("a0 b4", None, ["a", "b"]),
        ("a0 b4", 4, ["a"]),  # b saved nothing yet
        ("a0 b4 c4", 6, ["a"]),  # nor did it before c went on from the same step
        ("a0 b4 c6", None, ["a", "b"]),
        ("a0 b4 a6 c8", 10, ["a", "b"]),
        ("a0 b4 c0", 4, []),  # begun again
        ("a0 b4 b0 c2", 4, ["b"]),
        ("c0 c4", 6, []),
        ("a0 b2 c1", None, ["a"]),  # what b went on from was damaged
        ("", 4, []),
    ],
)
def test_whose_code_trained_the_steps(made: str, step: int | None, found: list[str]) -> None:
    tried = [
        Attempt(time=0.0, host="here", pid=1, step=int(each[1:]), code_digest=each[0]) for each in made.split()
    ]  # fmt: skip
    assert other_code_digests(tried, step, "c") == found


@pytest.mark.parametrize(
    ("made", "found"),
    [
        ("a0", []),
        ("a0 a4 a6", []),
        ("a0 b4 b6 a8", [4, 8]),
        ("a0 b4 a4", []),  # b saved nothing
        ("b0 a0 a4", []),  # begun again
        ("-0 a4", [4]),  # of an earlier version: not known
    ],
)
def test_from_which_step_on_it_ran_elsewhere(made: str, found: list[int]) -> None:
    tried = [
        Attempt(time=0.0, host="here", pid=1, step=int(each[1:]), code_digest="c", kind=each[0].strip("-"))
        for each in made.split()
    ]
    assert changed_at(tried) == found
