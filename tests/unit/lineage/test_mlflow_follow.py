"""Reading ``metrics.jsonl`` while it is written."""

import json

import pytest

from lineage.mlflow.follow import Follower


@pytest.fixture
def file(tmp_path):
    return tmp_path / "metrics.jsonl"


def append(file, step, **metrics):
    with file.open("a") as stream:
        stream.write(json.dumps({"step": step, "time": float(step), "metrics": metrics}) + "\n")


def told(follower):
    reading = follower.read()
    follower.keep(reading)
    return [(point.name, point.step, point.value, point.time) for point in reading.points]


def test_what_is_appended_is_told_once_with_its_own_time(file):
    follower = Follower(file)
    assert told(follower) == []
    append(file, 1, loss=2.0)
    assert told(follower) == [("loss", 1, 2.0, 1000)]
    append(file, 2, loss=1.0)
    assert told(follower) == [("loss", 2, 1.0, 2000)]
    assert told(follower) == []
    assert (follower.names, follower.last_step) == ({"loss"}, 2)


def test_a_reading_that_was_not_recorded_is_told_again(file):
    append(file, 1, loss=2.0)
    follower = Follower(file)
    assert follower.read().points == follower.read().points != []


def test_a_line_still_being_written_waits(file):
    file.write_text('{"step": 1, "time": 1.0, "metr')
    follower = Follower(file)
    assert told(follower) == []
    with file.open("a") as stream:
        stream.write('ics": {"loss": 3.0}}\n')
    assert told(follower) == [("loss", 1, 3.0, 1000)]


def test_a_line_that_a_kill_cut_is_passed_over(file):
    file.write_text('{"step": 1, "ti\n')
    append(file, 2, loss=1.0)
    assert told(Follower(file)) == [("loss", 2, 1.0, 2000)]


def test_steps_that_are_recorded_or_come_again_are_not_told(file):
    for step in (1, 2, 3, 2, 3, 4):  # a worker that was started again from step 1
        append(file, step, loss=1.0, speed=5.0)
    points = told(Follower(file, {"loss": 2}))
    assert [step for name, step, *_ in points if name == "loss"] == [3, 4]
    assert [step for name, step, *_ in points if name == "speed"] == [1, 2, 3, 4]


def test_a_name_that_mlflow_refuses_is_mended(file):
    append(file, 1, **{"accuracy@1 (mean)": 1.0, "rewards/margins": 2.0})
    assert [name for name, *_ in told(Follower(file))] == ["accuracy_1 _mean_", "rewards/margins"]


@pytest.mark.parametrize("in_place", [False, True], ids=["a new file", "a deleted one's number"])
def test_a_file_that_is_replaced_under_the_reader_is_read_from_its_beginning_and_tells_no_step_again(file, in_place):
    follower = Follower(file)
    for step in range(1, 8):
        append(file, step, loss=1.0 / step)
    assert [step for _, step, *_ in told(follower)] == list(range(1, 8))
    kept = "".join(file.read_text().splitlines(keepends=True)[:5])  # up to the checkpoint of step 5
    if in_place:
        file.write_text(kept)
    else:
        draft = file.with_suffix(".tmp")
        draft.write_text(kept)
        draft.replace(file)
    append(file, 6, loss=1.0 / 6)
    assert told(follower) == []
    for step in range(7, 10):
        append(file, step, loss=1.0 / step)
    assert [step for _, step, *_ in told(follower)] == [8, 9]
