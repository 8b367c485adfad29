"""How far a stage is, and how a terminal shows it."""

import io
import json
import time

import pytest

from flows.progress import stage_progress as progress
from flows.progress.screen import Screen
from flows.progress.stage_progress import Progress
from flows.reports.wording import clock, coloured, counted
from lineage.record.metrics_file import Part, write_part
from tests.finished import event


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def write_reports(path, *losses):
    lines = [
        json.dumps({"step": step, "time": time.time(), "metrics": {"loss": loss, "tokens_per_second": 1234.0}})
        for step, loss in enumerate(losses, start=1)
    ]
    path.write_text("\n".join(lines) + '\n{"step": 99, "ti')  # the last line is still being written


def test_a_terminal_shows_a_line_per_running_stage_and_none_after(tmp_path):
    stream = Terminal()
    with Screen(stream, ["dpo"]) as board:
        board.on(event("running", directory=tmp_path, num_steps=10))
        write_reports(tmp_path / "metrics.jsonl", 0.7, 0.6, 0.5)
        board._live.refresh()
        shown = stream.getvalue()
        assert "3/10" in shown
        assert "loss 0.500" in shown
        assert "1,234 tok/s" in shown
        assert "ETA" in shown
        board.on(event("done", seconds=1.5, loss=0.4))
        after = stream.getvalue()[len(shown) :]
        assert "done in 1.5 s  loss 0.400" in after
        assert "3/10" not in after


def test_without_a_terminal_lines_are_few_and_plain(tmp_path):
    stream = io.StringIO()
    with Screen(stream, ["dpo", "reward"]) as board:
        board.on(event("waiting", "1 CPU"))
        board.on(event("running", directory=tmp_path, num_steps=10))
        board.on(event("failed", "stage dpo failed: no memory\nsecond line"))
        board.on(event("pruned", "pruned at step 3", title="reward"))
        board.on(event("stopped", "by SIGTERM"))
    assert stream.getvalue().splitlines() == [
        "dpo     waits for 1 CPU",
        "dpo     started (10 steps)",
        "dpo     FAILED: stage dpo failed: no memory",
        "reward  pruned at step 3",
    ]


def test_a_run_of_several_stages_says_how_many_are_done_and_when_all_will_be(tmp_path):
    stream = Terminal()
    with Screen(stream, ["data", "sft", "dpo"], expected={"sft": 100.0, "dpo": 60.0}) as board:
        board.on(event("running", directory=tmp_path, title="data"))
        assert board._whole() == "stage 1 of 3  ETA 2:40+"  # that of data is not known
        board.on(event("done", title="data"))
        board.on(event("running", directory=tmp_path, num_steps=10, title="sft"))
        board._live.refresh()
        assert "stage 2 of 3  ETA 2:40" in stream.getvalue() and board._whole().endswith("2:40")
        board.on(event("running", directory=tmp_path, title="dpo"))
        assert board._whole().startswith("stages 2 to 3 of 3  ")
        board.on(event("done", title="sft"))
        assert "\x1b[32msft" in stream.getvalue()


def test_a_run_of_whose_time_nothing_is_known_names_none(tmp_path):
    with Screen(io.StringIO(), ["data", "sft"]) as board:
        board.on(event("running", directory=tmp_path, title="data"))
        assert board._whole() == "stage 1 of 2"


def test_a_terminal_has_colour_and_what_is_written_to_a_file_has_none(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    text = "stage  state  reason\nsft    run    never run\ncpt    reuse  \nadvice: sft: low"
    assert coloured(text, io.StringIO()) == text
    shown = coloured(text, Terminal())
    assert "sft    \x1b[36mrun\x1b[0m    never run" in shown and "cpt    \x1b[32mreuse\x1b[0m" in shown
    assert "\x1b[33madvice:\x1b[0m" in shown and coloured("posttrain: no", Terminal()).startswith("\x1b[31m")
    monkeypatch.setenv("NO_COLOR", "1")
    assert coloured(text, Terminal()) == text


def test_a_stage_that_resumes_says_from_where(tmp_path):
    stream = io.StringIO()
    write_reports(tmp_path / "metrics.jsonl", 0.7, 0.6, 0.5)
    with Screen(stream, ["dpo"]) as board:
        board.on(event("running", directory=tmp_path, num_steps=10))
    assert stream.getvalue() == "dpo  resumes from step 3 of 10\n"


def test_a_reader_that_has_gone_does_not_stop_the_run(tmp_path):
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with Screen(Closed(), ["dpo"]) as board:
        board.on(event("running", directory=tmp_path))
        board.on(event("done"))
    assert not board._running


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


def test_the_time_left_is_reported_by_the_pace_of_the_reports(path):
    path.write_text(report(2, when=100.0) + report(4, when=104.0))
    assert read(path).seconds_left() == 12.0
    assert read(path, total=None).seconds_left() is None
    path.write_text(report(2, when=100.0))
    assert read(path, started=90.0).seconds_left() == 40.0


def test_the_pace_is_that_of_the_last_attempt_not_of_the_one_that_it_resumes_with(path):
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


def test_between_two_reports_the_rows_that_are_done_are_shown_and_move_the_time_left(path, monkeypatch):
    monkeypatch.setattr(progress.time, "time", lambda: 40.0)
    path.write_text(report(1, when=10.0))
    work = path.parent / "work"
    work.mkdir()
    write_part(work, Part(step=1, what="dpo", done=300, of=1200))
    assert read(path, total=3, started=20.0).describe() == "1/3  dpo: 300 of 1,200 rows  ETA 0:28"
    write_part(work, Part(step=0, what="sft", done=300, of=1200))  # before that report
    assert "rows" not in read(path, total=3, started=20.0).describe()


def test_times_are_read_as_clocks():
    assert [clock(seconds) for seconds in (5, 65, 3605)] == ["0:05", "1:05", "1:00:05"]


def test_one_is_no_plural():
    assert [counted(number, "CPU") for number in (0, 1, 2)] == ["0 CPUs", "1 CPU", "2 CPUs"]


def test_a_stage_without_steps_shows_how_long_it_runs(path, monkeypatch):
    monkeypatch.setattr(progress.time, "time", lambda: 30.0)
    assert read(path, total=None, started=10.0).describe() == "20 s"


def test_a_stage_that_began_again_is_read_from_its_beginning(path):
    path.write_text("".join(report(step, loss=1.0, extra=1.0) for step in range(1, 9)))
    found = read(path)
    path.write_text(report(1, loss=5.0))
    found.refresh()
    assert (found.step, found.metrics) == (1, {"loss": 5.0})
