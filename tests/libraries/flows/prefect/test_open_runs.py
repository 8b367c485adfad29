"""Flow runs whose end Prefect may not know."""

import os
from dataclasses import replace

import pytest

from flows.prefect import open_runs
from flows.prefect.open_runs import settle_left
from flows.progress.run_record import OpenFlow, RunRecord, StageRecord, left_open
from lineage.filesystem.owner import Owner

ID = "00000000-0000-0000-0000-000000000001"
API = "http://127.0.0.1:9/api"
FLOW = OpenFlow(flow_run=ID, api=API)


@pytest.fixture
def dead() -> Owner:
    return replace(Owner.here(), started=0.0)


@pytest.fixture
def settled(monkeypatch):
    """What Prefect, which takes all, was told."""
    found = []
    monkeypatch.setenv("PREFECT_API_URL", API)
    monkeypatch.setattr(open_runs, "settle", lambda record: found.append(record) or True)
    return found


def record_of(store, driver, flow=FLOW, **fields) -> RunRecord:
    stages = {"data": StageRecord(state="done", since=0.0, directory="", after=[])}
    known = {"pipeline": "toy", "cli_args": [], "started": 0.0, "stages": stages}
    record = RunRecord(id="20260101-000000-aaaa", driver=driver, open_flow=flow, **{**known, **fields})
    record.write(store)
    return record


def test_only_the_runs_of_the_dead_are_reported_once_and_say_how_they_died(tmp_path, dead, settled):
    record_of(tmp_path, Owner.here())
    assert settle_left(tmp_path) == []
    record_of(tmp_path, dead)
    [record] = settle_left(tmp_path)
    assert record.open_flow.end == "CRASHED" and settled == [record]
    assert f"its process {os.getpid()} on {dead.host} was killed" in record.open_flow.message
    assert settle_left(tmp_path) == []


def test_what_a_run_came_to_is_reported(tmp_path, dead, settled):
    record = record_of(tmp_path, dead, replace(FLOW, end="FAILED", message="no memory"), outcome="failed")
    assert settle_left(tmp_path) == [record]


def test_a_prefect_that_is_away_leaves_it_to_the_next_command(tmp_path, dead, monkeypatch, capsys):
    monkeypatch.setenv("PREFECT_API_URL", API)
    record_of(tmp_path, dead, replace(FLOW, api="http://elsewhere/api"))
    assert settle_left(tmp_path) == [] and capsys.readouterr().err == ""  # of another Prefect
    record = record_of(tmp_path, dead)
    assert settle_left(tmp_path) == []
    assert f"Prefect at {API} does not answer, and shows the flow run {ID} as running" in capsys.readouterr().err
    assert left_open(tmp_path) == [record]
