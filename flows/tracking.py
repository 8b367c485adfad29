"""Chooses who records a run."""

from flows.pipeline import Tracking
from lineage.mlflow.address import require_reachable, tracking_uri
from lineage.mlflow.tracker import MlflowTracker
from lineage.tracker import NoTracker, Tracker


def make_tracker(tracking: Tracking) -> Tracker:
    """MLflow, or nobody.

    Raises:
        ConfigError: MLflow's address is none, or nothing answers there.
    """
    if not tracking.mlflow:
        return NoTracker()
    uri = tracking_uri(tracking.uri)
    require_reachable(uri, tracking.uri)
    return MlflowTracker(uri)
