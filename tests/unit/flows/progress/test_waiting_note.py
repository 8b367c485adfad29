"""The note of a run that waits for its turn."""

import os

import pytest

from flows.progress import waiting_note as module
from flows.progress.run_record import RunRecord, read_run_record, run_ids, run_record_path
from flows.progress.waiting_note import WaitingNote

OTHER = "another run of toy: daily"


def the_note(store) -> RunRecord:
    (run_id,) = run_ids(store)
    note = read_run_record(run_record_path(store, run_id))
    assert note
    return note


@pytest.fixture
def waiting(tmp_path):
    return WaitingNote(tmp_path, "toy", ["pipeline=toy"])


def test_a_run_that_waits_is_noted_until_its_turn_comes(tmp_path, waiting):
    with waiting.open():
        assert run_ids(tmp_path) == []  # it has not had to wait
        waiting.waits_for(OTHER)
        note = the_note(tmp_path)
        assert (note.pipeline, note.words, note.driver.pid) == ("toy", ["pipeline=toy"], os.getpid())
        assert note.waits_for == OTHER
        assert note.is_live(tmp_path)
        waiting.waits_for("another run of toy: nightly")
        assert the_note(tmp_path).waits_for == "another run of toy: nightly"
    assert run_ids(tmp_path) == []


def test_a_wait_that_goes_on_is_written_only_as_a_heartbeat(tmp_path, waiting, monkeypatch):
    with waiting.open():
        waiting.waits_for(OTHER)
        path = run_record_path(tmp_path, the_note(tmp_path).id)
        os.utime(path, (0, 0))
        waiting.waits_for(OTHER)
        assert path.stat().st_mtime == 0
        monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.0)
        waiting.waits_for(OTHER)
        assert path.stat().st_mtime > 0


@pytest.mark.parametrize(
    ("error", "outcome", "cause"), [(KeyboardInterrupt(), "stopped", ""), (OSError("disk full"), "failed", "disk full")]
)
def test_what_cuts_a_wait_off_is_its_end(tmp_path, waiting, error, outcome, cause):
    def wait() -> None:
        with waiting.open():
            waiting.waits_for(OTHER)
            raise error

    with pytest.raises(type(error)):
        wait()
    note = the_note(tmp_path)
    assert (note.outcome, note.cause, note.waits_for) == (outcome, cause, OTHER)
    assert note.ended


def test_a_store_that_cannot_be_written_ends_no_wait(tmp_path, waiting):
    (tmp_path / "runs").write_text("in the way")
    with waiting.open():
        waiting.waits_for(OTHER)
    assert (tmp_path / "runs").read_text() == "in the way"
