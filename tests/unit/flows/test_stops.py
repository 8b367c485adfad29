"""Whoever asks a command to end ends it once, whatever it is at."""

import importlib
import os
import signal
import sys
import time
from collections.abc import Callable

import pytest

from flows import stops
from flows.stops import hearing_sigterm, stoppable
from lineage.owner import host


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_who_is_asked_to_end_by_any_signal_ends_once(number):
    with pytest.raises(KeyboardInterrupt, match=f"^by {number.name} on {host()}$"), stoppable():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) == signal.SIG_DFL


def test_who_is_asked_to_end_says_what_each_stage_goes_on_from():
    def stop() -> None:
        with stoppable():
            stops.ended.extend(["sft saved at step 9", "corpus begins again"])
            os.kill(os.getpid(), signal.SIGINT)

    stops.ended.append("of a run before")
    with pytest.raises(KeyboardInterrupt, match=f"^by SIGINT on {host()}: sft saved at step 9, corpus begins again$"):
        stop()


def test_a_stop_that_prefect_hears_in_our_place_is_told_as_one_that_we_hear():
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
                with hearing_sigterm():
                    then_wait(lambda: importlib.import_module("asked_by_sigterm"))
            finally:
                assert signal.getsignal(signal.SIGTERM) == prefects

    with pytest.raises(KeyboardInterrupt, match=f"^by SIGTERM on {host()}$"):
        flow_run()
    assert sys.modules.pop("asked_by_sigterm").whole


def test_a_repeated_wish_that_a_library_ignores_for_a_moment_comes_again(tmp_path, monkeypatch):
    (tmp_path / "ignores_it.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\n"
        "ours = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGURG)}\n"
        "time.sleep(0.2)\n"
        "for number, handler in ours.items():\n    signal.signal(number, handler)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt), stoppable():
        then_wait(lambda: importlib.import_module("ignores_it"))
    del sys.modules["ignores_it"]


def test_an_import_that_takes_too_long_is_left(tmp_path, monkeypatch):
    (tmp_path / "endless.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\nwhile True:\n    time.sleep(0.01)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("flows.stops._PATIENCE_SECONDS", 0.2)
    with pytest.raises(KeyboardInterrupt), stoppable():
        importlib.import_module("endless")


class Finalized:
    """Is asked to end where Python swallows every exception."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)


def test_a_wish_that_a_finalizer_swallowed_comes_again():
    with pytest.raises(KeyboardInterrupt), stoppable():
        then_wait(Finalized)


def test_an_error_that_is_raised_to_nobody_is_still_shown_to_who_showed_it_before(monkeypatch):
    shown = []
    monkeypatch.setattr(sys, "unraisablehook", shown.append)

    class Faulty:
        def __del__(self) -> None:
            raise ValueError("faulty")

    with stoppable():
        Faulty()
    assert [str(each.exc_value) for each in shown] == ["faulty"]
