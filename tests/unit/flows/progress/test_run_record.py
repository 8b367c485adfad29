"""What the notes of runs say of their drivers."""

import os
from dataclasses import replace

from flows.progress.run_record import RunRecord, run_record_path, silent_drivers
from lineage.owner import Owner

ELSEWHERE = replace(Owner.here(), host="elsewhere")


def note(run_id: str, driver: Owner) -> RunRecord:
    return RunRecord(id=run_id, pipeline="toy", words=[], driver=driver, started=0.0, stages={})


def test_a_driver_of_another_machine_is_gone_when_none_of_its_runs_is_heard(tmp_path):
    old, new = note("20260101-000000-aaaa", ELSEWHERE), note("20260102-000000-bbbb", replace(ELSEWHERE, token="new"))
    here = note("20260103-000000-cccc", replace(Owner.here(), started=0.0))  # of which the kernel knows
    for each in (old, new, here):
        each.write(tmp_path)
    for each in (old, here):
        os.utime(run_record_path(tmp_path, each.id), (0, 0))
    assert silent_drivers(tmp_path) == []  # a process that has run more than one
    os.utime(run_record_path(tmp_path, new.id), (0, 0))
    assert silent_drivers(tmp_path) == [new.driver, old.driver]
