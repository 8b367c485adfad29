"""Who records a run, as the configuration says."""

import os
from dataclasses import replace

import pytest

from flows import tracking as module
from flows.declare.operation import Tracking
from flows.progress.run_record import RunRecord, run_record_path
from flows.tracking import make_tracker
from lineage.errors import ConfigError
from lineage.mlflow.tracker import MlflowTracker
from lineage.owner import Owner
from lineage.run_file import OpenRecord, open_records
from lineage.tracker import Tracker


def test_mlflow_records_unless_it_is_off():
    assert isinstance(make_tracker(Tracking(mlflow=True, uri=None, dvc=False)), MlflowTracker)
    assert isinstance(make_tracker(Tracking(mlflow=False, uri=None, dvc=False)), Tracker)


def test_a_wrong_address_is_told_before_anything_starts():
    with pytest.raises(ConfigError, match=r"tracking\.uri=nonsense"):
        make_tracker(Tracking(mlflow=True, uri="nonsense", dvc=False))
    with pytest.raises(ConfigError, match="no MLflow server answers there"):
        make_tracker(Tracking(mlflow=True, uri="http://127.0.0.1:1", dvc=False))


def test_what_a_driver_of_another_machine_left_open_is_completed_when_it_is_silent(toy, tmp_path, monkeypatch):
    elsewhere = replace(Owner.here(), host="elsewhere")
    OpenRecord(tmp_path, elsewhere).write()
    [path] = open_records(tmp_path)
    run = RunRecord(id="20260101-000000-aaaa", pipeline="toy", words=[], driver=elsewhere, started=0.0, stages={})
    run.write(tmp_path)
    told = []
    monkeypatch.setattr(module, "refill", lambda uri, store, silent: told.append(list(silent)))
    tracked = Tracking(mlflow=True, uri=None, dvc=False)
    pipeline = replace(toy().pipeline, store=tmp_path, tracking=tracked)
    module.complete_record(pipeline)
    assert told == [] and path.exists()
    os.utime(run_record_path(tmp_path, run.id), (0, 0))
    module.complete_record(pipeline)
    assert told == [[elsewhere]] and not path.exists()
