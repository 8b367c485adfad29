"""Notes of flow runs that Prefect may take for running."""

import os
from dataclasses import replace

import pytest

from flows.open_flows import OpenFlow, left_open
from flows.progress.run_record import Links, RunRecord, run_record_path
from lineage.owner import Owner

ID = "00000000-0000-0000-0000-000000000001"
API = "http://127.0.0.1:9/api"


@pytest.fixture
def dead() -> Owner:
    return replace(Owner.here(), started=0.0)


def test_only_the_notes_of_the_dead_are_left_and_say_how_they_died(tmp_path, dead):
    OpenFlow(flow_run=ID, driver=Owner.here(), api=API).write(tmp_path)
    assert list(left_open(tmp_path)) == []
    OpenFlow(flow_run=ID, driver=dead, api=API).write(tmp_path)
    [flow] = left_open(tmp_path)
    assert (flow.end, flow.api) == ("CRASHED", API)
    assert f"its process {os.getpid()} on {dead.host} was killed" in flow.message
    flow.remove(tmp_path)
    assert list(left_open(tmp_path)) == []


def test_what_a_run_came_to_is_kept(tmp_path, dead):
    flow = OpenFlow(flow_run=ID, driver=dead, api=None, end="FAILED", message="no memory", finished=["data"])
    flow.write(tmp_path)
    assert list(left_open(tmp_path)) == [flow]


def test_a_note_that_a_kill_has_cut_is_passed_over(tmp_path, dead):
    flow = OpenFlow(flow_run=ID, driver=dead, api=API)
    flow.write(tmp_path)
    flow.path(tmp_path).write_text('{"flow_run": "0')
    assert list(left_open(tmp_path)) == []


def test_of_another_machine_its_run_tells_by_its_silence(tmp_path):
    elsewhere = replace(Owner.here(), host="elsewhere")
    OpenFlow(flow_run=ID, driver=elsewhere, api=API).write(tmp_path)
    run = RunRecord(
        id="20260101-000000-aaaa", pipeline="toy", words=[], driver=elsewhere, started=0.0, stages={},
        links=Links(flow_run=ID),
    )  # fmt: skip
    run.write(tmp_path)
    assert list(left_open(tmp_path)) == []
    os.utime(run_record_path(tmp_path, run.id), (0, 0))
    assert [flow.flow_run for flow in left_open(tmp_path)] == [ID]
