"""What `doctor` says of an MLflow database, and what is not opened."""

import contextlib
import re
import sqlite3
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from alembic.script import ScriptDirectory

from flows.operate import doctor
from lineage.errors import ArtifactError, ConfigError
from lineage.mlflow.address import connect
from lineage.mlflow.tracker import MlflowTracker
from lineage.record.tracker import Execution
from tasks.context import Resources


@pytest.mark.parametrize(
    ("revision", "level", "told"),
    [("e1f2a3b4c5d6", "error", "it is not migrated unasked; stop every run and server that writes to it, back it up, "
                               "then: mlflow db upgrade sqlite:///"),
     ("0123456789ab", "error", "a newer one wrote it, or another program"),
     ("", "error", "has tables of another program (mine)"),
     (None, "ok", "has the schema of MLflow")],
)  # fmt: skip
def test_a_database_of_another_schema_is_named_and_not_opened(tmp_path, revision, level, told, capsys):
    file = tmp_path / "mlflow.db"
    assert doctor.check_mlflow(f"sqlite:///{file}", "X", {}).level == "ok" and not file.exists()
    scripts = ScriptDirectory(str(Path(find_spec("mlflow").origin).parent / "store" / "db_migrations"))
    with contextlib.closing(sqlite3.connect(file)) as database, database:
        database.execute("create table mine (x)")
        if revision != "":
            database.execute("create table alembic_version (version_num varchar(32))")
            database.execute("insert into alembic_version values (?)", [revision or scripts.get_current_head()])
    before = file.read_bytes()
    found = doctor.check_mlflow(f"sqlite:///{file}", "X", {})
    assert found.level == level and told in f"{found.found}; {found.remedy}"
    if level == "ok":
        return
    with pytest.raises(ArtifactError, match=re.escape(told)):
        connect(f"sqlite:///{file}")
    tracker = MlflowTracker(f"sqlite:///{file}")
    with tracker.execution(Execution(pipeline="p", store=tmp_path, cli_args=[], reused={})):
        pass
    assert told in capsys.readouterr().err and file.read_bytes() == before  # the run goes on and says so


def test_a_pool_and_a_block_that_prefect_lacks_are_errors(monkeypatch):
    lacks = ConfigError("resources.gpu_pool=a100: Prefect has no such limit; make it: prefect gcl create a100")

    def refuse(*_):
        raise lacks

    resources = Resources(gpu_pool="a100", gpus_per_worker=2, num_workers=2)
    stage = SimpleNamespace(method=SimpleNamespace(uses_gpu=True), resources=resources)
    pipeline = SimpleNamespace(stages={"sft": stage}, operation=SimpleNamespace(notify="slack-webhook/ops"))
    monkeypatch.setattr(doctor, "ask_prefect", lambda *_, as_stranger=False: 401 if as_stranger else 200)
    monkeypatch.setattr("flows.promotion.notify.require_block", refuse)
    monkeypatch.setattr("flows.stages.resources.require_pools", lambda wanted: wanted == {"a100": 4} and refuse())
    [answers, *found] = doctor.check_prefect({"PREFECT_API_URL": "http://127.0.0.1:1", "PREFECT_HOME": "/n"}, pipeline)
    assert answers.level == "ok" and [each.check for each in found] == ["notify", "pool"]
    assert {(each.level, each.remedy) for each in found} == {("error", "make it: prefect gcl create a100")}
