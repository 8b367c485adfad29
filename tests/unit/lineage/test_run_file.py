"""Whose record in MLflow nobody will complete but the next command."""

import json
from dataclasses import asdict, replace

import pytest

from lineage.owner import Owner
from lineage.run_file import OpenRecord, is_left, open_records

HERE = Owner.here()
DEAD = replace(HERE, started=0.0)
ELSEWHERE = replace(HERE, host="elsewhere")
LATER = replace(ELSEWHERE, started=ELSEWHERE.started + 60)  # its pid was given again
SAID = replace(ELSEWHERE, token="another")  # as the note of its run has it


@pytest.fixture
def noted(tmp_path):
    def note(holder: Owner):
        OpenRecord(tmp_path, HERE).write()
        [path] = open_records(tmp_path)
        path.write_text(json.dumps(asdict(holder)))
        return path

    return note


@pytest.mark.parametrize(
    ("writer", "silent", "left"),
    [(HERE, [], False), (DEAD, [], True), (ELSEWHERE, [], False), (ELSEWHERE, [SAID], True), (LATER, [SAID], False)],
    ids=["lives", "died", "elsewhere", "elsewhere and silent", "another process elsewhere"],
)
def test_a_record_is_left_by_who_is_gone(noted, writer, silent, left):
    assert is_left(noted(writer), silent) is left
