"""The end of a flow run whose events Prefect may have lost: settled, or left to the next command."""

import threading
from types import SimpleNamespace

import pytest

from flows import prefect_ends
from flows.open_flows import OpenFlow
from flows.prefect_ends import Ending
from lineage.owner import Owner


@pytest.fixture
def ending(tmp_path, monkeypatch) -> Ending:
    """Of a stopped run that Prefect knows of, after its server was away."""
    monkeypatch.setattr(prefect_ends, "emit_event", lambda *args: None)
    monkeypatch.setattr(prefect_ends, "_STOP_SECONDS", 0.05)
    ending = Ending(tmp_path, None, [])
    ending._flow_run = SimpleNamespace(state=SimpleNamespace(is_final=lambda: True))
    ending._write(OpenFlow(flow_run="f", driver=Owner.here(), api=None))
    ending._error, ending._was_away = KeyboardInterrupt(), True
    return ending


@pytest.mark.parametrize("are_sent", [True, False])
def test_events_that_cannot_be_sent_do_not_hold_up_a_stop(are_sent, ending, tmp_path, monkeypatch, capsys):
    told, sent = [], threading.Event()
    if are_sent:
        sent.set()
    monkeypatch.setattr(prefect_ends, "tell", lambda note, store: told.append(note.flow_run))
    monkeypatch.setattr(
        prefect_ends, "EventsWorker", SimpleNamespace(instance=lambda: SimpleNamespace(wait_until_empty=sent.wait))
    )
    with ending.told():
        pass
    sent.set()
    assert told == (["f"] if are_sent else [])
    assert ("the next command tells it how that ended" in capsys.readouterr().err) != are_sent
    assert list((tmp_path / "logs/prefect-open").glob("*.json"))  # `tell` takes it away
