"""Who records a run, as the configuration says."""

import pytest

from flows.declare.operation import Tracking
from flows.tracking import make_tracker
from lineage.errors import ConfigError
from lineage.mlflow.tracker import MlflowTracker
from lineage.tracker import NoTracker


def test_mlflow_records_unless_it_is_off():
    assert isinstance(make_tracker(Tracking(mlflow=True, uri=None, dvc=False)), MlflowTracker)
    assert isinstance(make_tracker(Tracking(mlflow=False, uri=None, dvc=False)), NoTracker)


def test_a_wrong_address_is_told_before_anything_starts():
    with pytest.raises(ConfigError, match=r"tracking\.uri=nonsense"):
        make_tracker(Tracking(mlflow=True, uri="nonsense", dvc=False))
    with pytest.raises(ConfigError, match="no MLflow server answers there"):
        make_tracker(Tracking(mlflow=True, uri="http://127.0.0.1:1", dvc=False))
