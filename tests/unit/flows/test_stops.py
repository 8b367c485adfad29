"""Whoever asks a command to end ends it once, whatever it is at."""

import importlib
import os
import signal
import sys
import time
from collections.abc import Callable

import pytest

from flows import __main__ as module
from flows.stages import stops
from flows.stages.stops import handling_sigterm, stoppable
from lineage.filesystem.owner import host


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_command_that_is_asked_to_end_while_it_imports_ends_with_130(number, monkeypatch, capsys):
    monkeypatch.setattr(module, "_end_soon", lambda: None)
    monkeypatch.setattr(importlib, "import_module", lambda name: os.kill(os.getpid(), number))
    handler = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    before = signal.signal(number, handler)  # a job in the background is started deaf to Ctrl-C
    try:
        assert module.main(["status"]) == module.STOPPED
        assert signal.getsignal(number) == handler
    finally:
        signal.signal(number, before)
    assert capsys.readouterr().err == "posttrain: stopped; run the same command again to resume\n"


def test_a_command_that_was_stopped_says_in_one_line_by_whom_and_what_resumes_from_where(monkeypatch, capsys):
    def stopped(arguments):
        raise KeyboardInterrupt("by SIGTERM on here: sft saved at step 9")

    monkeypatch.setattr(module, "_end_soon", lambda: None)
    monkeypatch.setattr(module, "_run", stopped)
    assert module.main(["run"]) == module.STOPPED
    message = "posttrain: stopped by SIGTERM on here: sft saved at step 9; run the same command again to resume\n"
    assert capsys.readouterr().err == message
    assert module.main(["data", "a.jsonl"]) == module.STOPPED
    assert "resume" not in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_who_is_asked_to_end_by_any_signal_ends_once(number):
    with pytest.raises(KeyboardInterrupt, match=f"^by {number.name} on {host()}$"), stoppable():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) == signal.SIG_DFL


def test_a_stop_may_take_as_long_as_a_process_manager_gives_unless_the_user_hurries_it():
    def stop() -> None:
        with stoppable():
            os.kill(os.getpid(), signal.SIGINT)

    with stoppable():
        assert stops.seconds_left() == 0.0
    with pytest.raises(KeyboardInterrupt):
        stop()
    assert 25.0 < stops.seconds_left() <= 30.0
    stops.hurried.set()
    assert stops.seconds_left() == 0.0
    stops.hurried.clear()


def test_who_is_asked_to_end_says_what_each_stage_resumes_from():
    def stop() -> None:
        with stoppable():
            stops.ended.extend(["sft saved at step 9", "corpus starts again"])
            os.kill(os.getpid(), signal.SIGINT)

    stops.ended.append("of a run before")
    with pytest.raises(KeyboardInterrupt, match=f"^by SIGINT on {host()}: sft saved at step 9, corpus starts again$"):
        stop()


def test_a_stop_that_prefect_hears_in_our_place_is_reported_as_one_that_we_hear():
    with pytest.raises(KeyboardInterrupt, match=f"^by SIGTERM on {host()}$"), stoppable():
        raise KeyboardInterrupt


def test_a_run_under_nohup_outlives_its_terminal():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stoppable():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def then_wait(work: Callable[[], object]) -> None:
    work()
    for _ in range(100):
        time.sleep(0.05)


def test_an_import_is_finished_first_as_it_would_keep_its_lock(tmp_path, monkeypatch):
    (tmp_path / "asked_in_here.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nwhole = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt), stoppable():
        then_wait(lambda: importlib.import_module("asked_in_here"))
    assert sys.modules.pop("asked_in_here").whole


def test_an_import_that_takes_too_long_is_left(tmp_path, monkeypatch):
    (tmp_path / "endless.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\nwhile True:\n    time.sleep(0.01)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("flows.stages.stops._PATIENCE_SECONDS", 0.2)
    with pytest.raises(KeyboardInterrupt), stoppable():
        importlib.import_module("endless")


def test_sigterm_too_inside_of_a_flow_run_where_prefect_would_hear_it(tmp_path, monkeypatch):
    def prefects(number, frame):
        raise RuntimeError

    (tmp_path / "asked_by_sigterm.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\nwhole = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def flow_run() -> None:
        with stoppable():
            signal.signal(signal.SIGTERM, prefects)
            try:
                with handling_sigterm():
                    then_wait(lambda: importlib.import_module("asked_by_sigterm"))
            finally:
                assert signal.getsignal(signal.SIGTERM) == prefects

    with pytest.raises(KeyboardInterrupt, match=f"^by SIGTERM on {host()}$"):
        flow_run()
    assert sys.modules.pop("asked_by_sigterm").whole


def test_a_command_under_nohup_outlives_its_terminal(monkeypatch):
    class Imported:
        @staticmethod
        def add_status(parser):
            os.kill(os.getpid(), signal.SIGHUP)

        @staticmethod
        def run_status(options):
            return 0

    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda name: Imported if "commands" in name else real(name))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert module.main(["status"]) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
