"""What `doctor` says of an MLflow database."""

import contextlib
import sqlite3
from importlib.util import find_spec
from pathlib import Path

import pytest
from alembic.script import ScriptDirectory

from flows.operate import doctor


@pytest.mark.parametrize(
    ("revision", "level", "told"),
    [("e1f2a3b4c5d6", "error", "migrates the database when it opens it, or refuses it; stop every run"),
     ("0123456789ab", "error", "a newer one wrote it"),
     (None, "ok", "has the schema of MLflow")],
)  # fmt: skip
def test_a_database_of_another_schema_is_named(tmp_path, revision, level, told):
    file = tmp_path / "mlflow.db"
    assert doctor.check_mlflow(f"sqlite:///{file}", "X", {}).level == "ok" and not file.exists()
    scripts = ScriptDirectory(str(Path(find_spec("mlflow").origin).parent / "store" / "db_migrations"))
    with contextlib.closing(sqlite3.connect(file)) as database, database:
        database.execute("create table alembic_version (version_num varchar(32))")
        database.execute("insert into alembic_version values (?)", [revision or scripts.get_current_head()])
    found = doctor.check_mlflow(f"sqlite:///{file}", "X", {})
    assert found.level == level and told in f"{found.found}; {found.remedy}"
