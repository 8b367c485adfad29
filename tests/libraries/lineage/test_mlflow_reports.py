"""Reading ``metrics.jsonl`` while it is written."""

import json

import pytest

from lineage.mlflow.entities import Reports


@pytest.fixture
def file(tmp_path):
    return tmp_path / "metrics.jsonl"


def append(file, *steps, **metrics):
    with file.open("a") as stream:
        for step in steps:
            stream.write(json.dumps({"step": step, "time": float(step), "metrics": metrics or {"loss": 1.0}}) + "\n")


def new(reports):
    return [(each.key, each.step, each.value, each.timestamp) for each in reports.new()]


def test_what_is_appended_is_read_once_with_its_own_time(file):
    reports = Reports(file)
    assert new(reports) == []
    append(file, 1, loss=2.0)
    assert new(reports) == [("loss", 1, 2.0, 1000)]
    append(file, 2, loss=1.0)
    assert new(reports) == [("loss", 2, 1.0, 2000)]
    assert new(reports) == []
    assert reports.last_step == 2


def test_a_line_still_being_written_waits_and_one_that_a_kill_cut_is_skipped(file):
    file.write_text('{"step": 1, "ti\n{"step": 2, "time": 2.0, "metr')
    reports = Reports(file)
    assert new(reports) == []
    with file.open("a") as stream:
        stream.write('ics": {"loss": 3.0}}\n')
    assert new(reports) == [("loss", 2, 3.0, 2000)]


def test_steps_that_are_recorded_or_come_again_are_left_out(file):
    append(file, 1, 2, 3, 2, 3, 4, loss=1.0, speed=5.0)  # a worker that was started again from step 1
    found = new(Reports(file, {"loss": 2}))
    assert [step for name, step, *_ in found if name == "loss"] == [3, 4]
    assert [step for name, step, *_ in found if name == "speed"] == [1, 2, 3, 4]


def test_a_name_that_mlflow_refuses_is_mended(file):
    append(file, 1, **{"accuracy@1 (mean)": 1.0, "rewards/margins": 2.0})
    assert [name for name, *_ in new(Reports(file))] == ["accuracy_1 _mean_", "rewards/margins"]


@pytest.mark.parametrize("in_place", [False, True], ids=["a new file", "a deleted one's number"])
def test_a_file_that_was_cut_to_a_checkpoint_is_read_again_and_no_step_twice(file, in_place):
    reports = Reports(file)
    append(file, *range(1, 8))
    assert [step for _, step, *_ in new(reports)] == list(range(1, 8))
    kept = "".join(file.read_text().splitlines(keepends=True)[:5])
    if in_place:
        file.write_text(kept)
    else:
        draft = file.with_suffix(".tmp")
        draft.write_text(kept)
        draft.replace(file)
    append(file, 6)
    assert new(reports) == []
    append(file, *range(7, 10))
    assert [step for _, step, *_ in new(reports)] == [8, 9]
