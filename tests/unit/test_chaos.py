"""The judge of interrupted runs sees what is wrong with them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lineage.filesystem.lock import Lock
from lineage.record.attempts import record_attempt
from tests.chaos.record import Reached, doubled, made_again, reached, starts, untidy
from tests.chaos.rounds import SAVE_STEPS, Score
from tests.written_store import WrittenStore

GOOD = Score(kills=3, survived=3, rounds=2, identical=2, lost_steps=SAVE_STEPS)


@pytest.fixture
def entry(tmp_path: Path) -> Path:
    folder = tmp_path / "sft" / "0123456789abcdef"
    folder.mkdir(parents=True)
    return folder


def report(entry: Path, *steps: int) -> None:
    lines = [json.dumps({"step": step, "time": 0, "metrics": {}}) for step in steps]
    (entry / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 99, "ti')


@pytest.mark.parametrize(
    "flaw",
    [
        {"survived": 2}, {"identical": 1}, {"leaked": ["ray"]}, {"wrong": ["a step is told twice"]},
        {"lost_steps": SAVE_STEPS + 1},
    ],
)  # fmt: skip
def test_one_flaw_spoils_it(flaw: dict) -> None:
    assert GOOD.is_good
    assert not replace(GOOD, **flaw).is_good


def test_a_step_that_is_reported_twice_or_out_of_order_is_found(tmp_path: Path, entry: Path) -> None:
    report(entry, 1, 2, 3)
    assert doubled(tmp_path) == []
    report(entry, 1, 2, 2, 3)
    assert doubled(tmp_path) == ["sft: steps [1, 2, 2, 3]"]


def test_what_a_finished_store_should_not_hold_is_found(tmp_path: Path, entry: Path) -> None:
    (tmp_path / "cache" / "x" / "work").mkdir(parents=True)  # of no stage
    assert untidy(tmp_path) == []
    (entry / "checkpoints").mkdir()
    assert Lock(entry).try_acquire()
    assert sorted(Path(each).name for each in untidy(tmp_path)) == ["checkpoints", "lock is held"]


def test_a_finished_stage_that_is_made_again_or_is_gone_is_found(tmp_path: Path) -> None:
    written = WrittenStore(tmp_path)
    written.stage("data", {})
    written.stage("model", {})
    before = starts(tmp_path)
    assert made_again(before, tmp_path) == []
    written.stage("model", {})
    written.stage("left", {})  # meanwhile
    assert made_again(before, tmp_path) == ["model: was finished, and was made again"]
    assert made_again({"gone": 1.0}, tmp_path) == ["gone: was finished, and was made again"]


def test_lost_is_what_the_next_attempt_trained_again(tmp_path: Path, entry: Path) -> None:
    record_attempt(entry, 0, "code")
    report(entry, 1, 2, 3, 4, 5)
    assert reached(tmp_path, ["cpt"]) == []
    [hit] = reached(tmp_path, ["sft"])
    assert hit == Reached(directory=entry, attempt=1, step=5)
    assert (hit.lost(), hit.went_on_from()) == (0, 0)  # nobody went on yet
    record_attempt(entry, 3, "code")
    record_attempt(entry, 5, "code")
    assert (hit.lost(), hit.went_on_from()) == (2, 3)
