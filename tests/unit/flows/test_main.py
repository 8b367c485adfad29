import importlib
import os
import signal

import pytest

from flows import __main__ as module


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
    assert capsys.readouterr().err == "posttrain: stopped; run the same command again to go on\n"


def test_a_command_that_was_stopped_says_in_one_line_by_whom_and_what_goes_on_from_where(monkeypatch, capsys):
    def stopped(arguments):
        raise KeyboardInterrupt("by SIGTERM on here: sft saved at step 9")

    monkeypatch.setattr(module, "_end_soon", lambda: None)
    monkeypatch.setattr(module, "_run", stopped)
    assert module.main(["run"]) == module.STOPPED
    said = "posttrain: stopped by SIGTERM on here: sft saved at step 9; run the same command again to go on\n"
    assert capsys.readouterr().err == said


def test_a_command_under_nohup_outlives_its_terminal(monkeypatch):
    class Imported:
        @staticmethod
        def add_status(parser):
            os.kill(os.getpid(), signal.SIGHUP)

        @staticmethod
        def run_status(options):
            return 0

    monkeypatch.setattr(importlib, "import_module", lambda name: Imported)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert module.main(["status"]) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
