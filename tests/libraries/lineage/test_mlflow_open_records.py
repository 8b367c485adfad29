"""Whose record in MLflow nobody will complete but the next command."""

import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from lineage.holder import Holder
from lineage.mlflow.executions import end_dead_runs
from lineage.mlflow.names import HOST, PID, STARTED
from lineage.mlflow.open_records import OpenRecord, is_left, open_records

HERE = Holder.here()
DEAD = replace(HERE, started=0.0)
ELSEWHERE = replace(HERE, host="elsewhere")
LATER = replace(ELSEWHERE, started=ELSEWHERE.started + 60)  # its pid was given again
SAID = replace(ELSEWHERE, token="another")  # as the note of its run has it


@pytest.fixture
def noted(tmp_path):
    def note(holder: Holder):
        OpenRecord(tmp_path).write()
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


class Client:
    """An MLflow with one open run."""

    def __init__(self, writer: Holder) -> None:
        tags = {HOST: writer.host, PID: str(writer.pid), STARTED: repr(writer.started)}
        self.run = SimpleNamespace(info=SimpleNamespace(run_id="r"), data=SimpleNamespace(tags=tags))
        self.ended: list[str] = []

    def search_runs(self, *_: object, **__: object) -> list[SimpleNamespace]:
        class Page(list):
            token = None

        return Page([self.run])

    def log_batch(self, *_: object, **__: object) -> None:
        pass

    def set_terminated(self, run_id: str, status: str) -> None:
        self.ended.append(status)


def test_the_runs_of_a_driver_that_died_elsewhere_are_closed():
    client = Client(ELSEWHERE)
    end_dead_runs(client, "1")
    assert client.ended == []
    end_dead_runs(client, "1", [SAID])
    assert client.ended == ["KILLED"]
