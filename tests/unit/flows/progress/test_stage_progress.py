import json

import pytest

from flows.progress import stage_progress as progress
from flows.progress.stage_progress import Progress


def report(step, when=0.0, **metrics):
    return json.dumps({"step": step, "time": when, "metrics": metrics}) + "\n"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def read(path, total=10, started=0.0):
    found = Progress(path=path, total=total, started=started)
    found.refresh()
    return found


def test_a_stage_that_has_reported_nothing_is_at_step_0(path):
    assert read(path).describe().startswith("0/10")
    assert read(path).seconds_left() is None


def test_a_line_that_is_still_written_waits_for_its_end(path):
    path.write_text(report(1, loss=2.0) + '{"step": 2, "ti')
    found = read(path)
    assert (found.step, found.metrics) == (1, {"loss": 2.0})
    with path.open("a") as file:
        file.write('me": 0.0, "metrics": {"loss": 1.0}}\n')
    found.refresh()
    assert (found.step, found.metrics) == (2, {"loss": 1.0})


@pytest.mark.parametrize("line", ["{}\n", "nonsense\n", "[]\n", '{"step": "x", "time": 0, "metrics": {}}\n', "\xff\n"])
def test_a_line_that_is_no_report_is_passed_over(path, line):
    path.write_text(report(1, loss=2.0) + line + report(3, loss=1.0))
    assert read(path).step == 3


def test_a_stage_that_began_again_is_read_from_its_beginning(path):
    path.write_text("".join(report(step, loss=1.0, extra=1.0) for step in range(1, 9)))
    found = read(path)
    path.write_text(report(1, loss=5.0))
    found.refresh()
    assert (found.step, found.metrics) == (1, {"loss": 5.0})


def test_of_a_long_file_only_the_end_is_read(path, monkeypatch):
    monkeypatch.setattr(progress, "_TAIL_BYTES", 200)
    path.write_text("".join(report(step, when=float(step), loss=1.0) for step in range(1, 100)))
    found = read(path)
    assert found.step == 99
    assert found.seconds_left() == 0.0 and found._first[0] > 95


def test_the_time_left_is_told_by_the_pace_of_the_reports(path):
    path.write_text(report(2, when=100.0) + report(4, when=104.0))
    assert read(path).seconds_left() == 12.0
    assert read(path, total=None).seconds_left() is None
    path.write_text(report(2, when=100.0))
    assert read(path, started=90.0).seconds_left() == 40.0


def test_a_stage_without_steps_shows_how_long_it_runs(path, monkeypatch):
    monkeypatch.setattr(progress.time, "time", lambda: 30.0)
    assert read(path, total=None, started=10.0).describe() == "20 s"


def test_the_pace_is_that_of_the_last_attempt_not_of_the_one_that_it_goes_on_with(path):
    path.write_text("".join(report(step, when=float(step), loss=1.0) for step in range(1, 51)))
    found = read(path, total=100, started=1000.0)
    assert (found.step, found.seconds_left()) == (50, None)
    with path.open("a") as file:
        file.write(report(51, when=1004.0))
    found.refresh()
    assert found.seconds_left() == pytest.approx(4.0 * 49)  # the start-up is counted in
    with path.open("a") as file:
        file.write(report(52, when=1006.0))
    found.refresh()
    assert found.seconds_left() == pytest.approx(2.0 * 48)
