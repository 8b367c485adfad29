import io
import json
import time

from flows.progress.screen import Screen


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
    with Screen(stream, ["dpo"]) as screen:
        screen.running("dpo", tmp_path / "metrics.jsonl", 10)
        write_reports(tmp_path / "metrics.jsonl", 0.7, 0.6, 0.5)
        screen._live.refresh()
        shown = stream.getvalue()
        assert "3/10" in shown
        assert "loss 0.500" in shown
        assert "1,234 tok/s" in shown
        assert "ETA" in shown
        screen.done("dpo", 1.5, {"loss": 0.4})
        after = stream.getvalue()[len(shown) :]
        assert "done in 1.5 s  loss 0.400" in after
        assert "3/10" not in after


def test_without_a_terminal_lines_are_few_and_plain(tmp_path):
    stream = io.StringIO()
    with Screen(stream, ["dpo", "reward"]) as screen:
        for _ in range(5):
            screen.waiting("dpo", "1 CPU")
        screen.running("dpo", tmp_path / "none", 10)
        screen.failed("dpo", "stage dpo failed: no memory\nsecond line")
        screen.pruned("reward", "pruned at step 3")
    assert stream.getvalue().splitlines() == [
        "dpo     waits for 1 CPU",
        "dpo     started (10 steps)",
        "dpo     FAILED: stage dpo failed: no memory",
        "reward  pruned at step 3",
    ]


def test_a_stage_that_goes_on_says_from_where(tmp_path):
    stream = io.StringIO()
    write_reports(tmp_path / "metrics.jsonl", 0.7, 0.6, 0.5)
    with Screen(stream, ["dpo"]) as screen:
        screen.running("dpo", tmp_path / "metrics.jsonl", 10)
    assert stream.getvalue() == "dpo  goes on from step 3 of 10\n"


def test_a_reader_that_has_gone_does_not_stop_the_run(tmp_path):
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with Screen(Closed(), ["dpo"]) as screen:
        screen.running("dpo", tmp_path / "none", None)
        screen.done("dpo", 1.0, {})
    assert not screen._running
