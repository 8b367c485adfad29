"""Which MLflow is meant, who records a run there, and who completes what was left open."""

import json
import os
import sys
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from flows.declare.operation import Tracking
from flows.progress import tracking as module
from flows.progress.run_record import Links, RunRecord, StageRecord, run_record_path
from flows.progress.tracking import make_tracker, recorded_uri
from lineage.errors import ConfigError
from lineage.filesystem.owner import Owner
from lineage.mlflow.address import require_reachable, shown, sqlite_file, tracking_uri
from lineage.mlflow.tracker import MlflowTracker
from lineage.record.labels import user
from lineage.record.run_file import RunNames, is_gone
from lineage.record.tracker import Tracker


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tmp_path


def test_a_database_in_the_working_directory_is_the_default(here):
    assert sqlite_file(tracking_uri(None)) == here / "mlflow.db"


@pytest.mark.parametrize("uri", ["localhost:5000", "mlruns", "file:///tmp/mlruns", "htp://host"])
def test_what_is_neither_database_nor_server_is_refused(uri):
    with pytest.raises(ConfigError, match=r"tracking\.uri=.*is no address of an MLflow database or server"):
        tracking_uri(uri)


def test_no_password_is_shown_or_written_down_also_of_a_server_that_nobody_runs():
    assert shown("postgresql://me:secret@db:5432/mlflow?sslkey=secret") == "postgresql://db:5432/mlflow"
    assert shown("sqlite:////here/mlflow.db") == "sqlite:////here/mlflow.db"
    with pytest.raises(ConfigError, match=r"MLFLOW_TRACKING_URI=.*no MLflow server answers there") as refusal:
        require_reachable("http://me:secret@127.0.0.1:1", None)
    assert "secret" not in str(refusal.value)


HERE = Owner.here()
DEAD = replace(HERE, started=0.0)
ELSEWHERE = replace(HERE, host="elsewhere")
LATER = replace(ELSEWHERE, started=ELSEWHERE.started + 60)  # its pid was given again
SAID = replace(ELSEWHERE, token="another")  # as the note of its run has it


@pytest.mark.parametrize(
    ("writer", "silent", "left"),
    [(HERE, [], False), (DEAD, [], True), (ELSEWHERE, [], False), (ELSEWHERE, [SAID], True), (LATER, [SAID], False)],
    ids=["lives", "died", "elsewhere", "elsewhere and silent", "another process elsewhere"],
)
def test_a_record_is_left_by_who_is_gone(writer, silent, left):
    assert is_gone(writer, silent) is left


def test_mlflow_records_unless_it_is_off():
    assert isinstance(make_tracker(Tracking(mlflow=True, uri=None, dvc=False)), MlflowTracker)
    assert isinstance(make_tracker(Tracking(mlflow=False, uri=None, dvc=False)), Tracker)


def test_a_wrong_address_is_reported_before_anything_starts():
    with pytest.raises(ConfigError, match=r"tracking\.uri=nonsense"):
        make_tracker(Tracking(mlflow=True, uri="nonsense", dvc=False))
    with pytest.raises(ConfigError, match="no MLflow server answers there"):
        make_tracker(Tracking(mlflow=True, uri="http://127.0.0.1:1", dvc=False))


def test_experiment_run_name_and_tags_reach_the_record_and_change_no_fingerprint(toy):
    overrides = ("tracking.experiment=shared", 'tracking.run_name="{pipeline} of {user}"', "tracking.tags.team=nlp")
    named = toy(*overrides)
    tracker = make_tracker(replace(named.pipeline.tracking, mlflow=True, uri="sqlite:///x.db"))
    assert isinstance(tracker, MlflowTracker)
    filled = RunNames(experiment="shared", run_name=f"toy of {user()}", tags={"team": "nlp"})
    assert tracker._names.filled("toy", 0.0) == filled
    filled = RunNames(run_name="{time}").filled("toy", 0.0).run_name
    assert datetime.strptime(filled, "%Y-%m-%d %H:%M:%S").timestamp() == 0.0
    plain = toy()
    assert [each.fingerprint for each in named.stages] == [each.fingerprint for each in plain.stages]


@pytest.mark.parametrize(
    ("word", "refusal"),
    [
        ('tracking.run_name="{model}"', r"run_name=\{model\}: has another placeholder than \{pipeline\}, \{time\}"),
        ('tracking.run_name="{}"', "another placeholder"),
        ('tracking.run_name="{"', "another placeholder"),
        ("tracking.experiment=' '", "experiment=' ': is empty"),
        ("tracking.tags={mlflow.user: me}", "tags.mlflow.user: .*does not begin with mlflow"),
        ("tracking.tags={posttrain.stage: me}", "does not begin with mlflow"),
    ],
)
def test_names_that_mlflow_would_refuse_are_refused_by_the_plan(toy, word, refusal):
    with pytest.raises(ConfigError, match=refusal):
        toy(word)
    with pytest.raises(ConfigError, match="a tag's name has letters"):
        Tracking(mlflow=True, uri=None, dvc=False, tags={"a=b": "me"})


@pytest.fixture
def reported(monkeypatch):
    """The silent processes of each refill."""
    found = []
    registry = SimpleNamespace(
        refill=lambda uri, store, silent: found.append(list(silent)),
        close_left=lambda uri, store, directories, silent: found.append((uri, directories)),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "lineage.mlflow.registry", registry)  # which imports mlflow
    return found


@pytest.fixture
def pipeline(toy, tmp_path):
    return replace(toy().pipeline, store=tmp_path, tracking=Tracking(mlflow=True, uri=None, dvc=False))


def test_what_a_driver_of_another_machine_left_open_is_completed_when_it_is_silent(pipeline, reported, tmp_path):
    elsewhere = replace(Owner.here(), host="elsewhere")
    run = RunRecord(
        id="20260101-000000-aaaa", pipeline="toy", cli_args=[], driver=elsewhere, started=0.0, stages={},
        open_mlflow=True, waits_for="another run",
    )  # fmt: skip
    run.write(tmp_path)
    module.complete_record(pipeline)
    assert reported == []
    os.utime(run_record_path(tmp_path, run.id), (0, 0))
    module.complete_record(pipeline)
    module.complete_record(pipeline)
    assert reported == [[elsewhere]]


def recorded(store, uri, place="left"):
    stages = {"left": StageRecord(state="done", since=0.0, directory=str(store / place))}
    run = RunRecord(
        id="20260101-000000-aaaa", pipeline="toy", cli_args=[], driver=DEAD, started=0.0, stages=stages,
        open_mlflow=True, links=Links(mlflow=uri),
    )  # fmt: skip
    run.write(store)


@pytest.mark.parametrize(
    ("uri", "place", "found"),
    [
        ("sqlite:////elsewhere/mlflow.db", "left", "sqlite:////elsewhere/mlflow.db"),
        ("sqlite:////elsewhere/mlflow.db", "/another/store/left", None),  # the store was copied
        ("http://mlflow:5000", "/another/store/left", "http://mlflow:5000"),
        (None, "left", None),
    ],
)
def test_a_record_is_read_where_the_last_run_wrote_it(pipeline, tmp_path, monkeypatch, uri, place, found):
    recorded(tmp_path, uri, place)
    assert recorded_uri(pipeline) == found
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://another:5000")
    assert recorded_uri(pipeline) is None  # which is the variable
    assert recorded_uri(replace(pipeline, tracking=replace(pipeline.tracking, uri="http://own:1"))) == "http://own:1"


def test_what_a_killed_run_left_open_in_another_mlflow_is_ended_there(pipeline, reported, tmp_path):
    recorded(tmp_path, "http://mlflow:5000")
    module.complete_record(pipeline)
    assert reported == [[], ("http://mlflow:5000", [str(tmp_path / "left")])]
    reported.clear()
    recorded(tmp_path, f"sqlite:///{tmp_path}/mlflow.db")
    module.complete_record(pipeline)
    assert reported == [[]]


def test_what_an_earlier_version_left_open_is_completed_once(pipeline, reported, tmp_path):
    path = tmp_path / "logs" / "mlflow-open" / f"{DEAD.host}-1-abc.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(asdict(DEAD)))
    module.complete_record(pipeline)
    module.complete_record(pipeline)
    assert reported == [[]] and not path.exists()


def test_the_variable_wins_over_the_default_and_the_configuration_over_the_variable(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow.example:5000")
    assert tracking_uri(None) == "http://mlflow.example:5000"
    assert tracking_uri("sqlite:///other.db") == f"sqlite:///{Path.cwd()}/other.db"  # also from another folder
    assert tracking_uri("sqlite:////here/other.db") == "sqlite:////here/other.db"
