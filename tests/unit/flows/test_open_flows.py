"""Notes of flow runs that Prefect may take for running."""

import os
from dataclasses import replace

import pytest

from flows.open_flows import OpenFlow, left_open
from lineage.holder import Holder

ID = "00000000-0000-0000-0000-000000000001"
API = "http://127.0.0.1:9/api"


@pytest.fixture
def dead() -> Holder:
    return replace(Holder.here(), started=0.0)


def test_only_the_notes_of_the_dead_are_left_and_say_how_they_died(tmp_path, dead):
    OpenFlow(flow_run=ID, driver=Holder.here(), api=API).write(tmp_path)
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
