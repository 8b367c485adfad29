"""What a new attempt says of the one that it takes the place of."""

import json
from dataclasses import replace

import pytest

from flows.progress.run_record import RunRecord, StageRecord
from flows.stages.execute import ended_before
from lineage.attempts import note_attempt
from lineage.owner import Owner, host
from lineage.store import Store

KILLED = replace(Owner.here(), pid=2**30)


@pytest.fixture
def entry(tmp_path):
    entry = Store(tmp_path).entry("sft", "0123456789abcdef")
    entry.begin()
    entry.metrics.write_text(
        "".join(json.dumps({"step": step, "time": 1.0, "metrics": {}}) + "\n" for step in (16, 17))
    )
    note_attempt(entry.path, 0, "code")
    return entry


def note(tmp_path, run_id: str, *, state: str = "running", reason: str = "", **fields) -> None:
    elsewhere = f"/mnt/{tmp_path.name}/sft/0123456789abcdef"  # as another host has it
    stages = {"sft#3": StageRecord(state=state, since=0.0, directory=elsewhere, reason=reason)}
    fields = {"driver": KILLED, **fields}
    RunRecord(id=run_id, pipeline="toy", words=[], started=0.0, stages=stages, **fields).write(tmp_path)


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({}, f"its driver on {host()} was killed at step 17"),
        ({"outcome": "stopped"}, f"its run on {host()} was stopped at step 17"),
        ({"outcome": "failed", "state": "failed", "reason": "stage sft failed: no\nmemory"}, "stage sft failed: no"),
        ({"state": "pending"}, ""),
        ({"driver": Owner.here()}, ""),
    ],
    ids=["killed", "stopped", "failed", "never began", "lives"],
)
def test_it_is_read_in_the_note_of_the_last_run_that_made_it(tmp_path, entry, fields, cause):
    note(tmp_path, "20260101-000000-aaaa", **fields)
    assert ended_before(tmp_path, entry) == cause


def test_the_last_run_counts_and_of_a_first_attempt_nothing_ended_before(tmp_path, entry):
    note(tmp_path, "20260101-000000-aaaa", outcome="stopped")
    note(tmp_path, "20260102-000000-aaaa")
    note(tmp_path, "20260103-000000-aaaa", driver=Owner.here())  # our own
    assert "was killed" in ended_before(tmp_path, entry)
    (entry.path / "attempts.jsonl").unlink()
    assert ended_before(tmp_path, entry) == ""
