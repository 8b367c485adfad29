"""Runs that ended before their stage did: gone on with, so that a stage has one, however often it was interrupted."""

from collections.abc import Mapping

from lineage.lease import Holder
from lineage.manifest import Manifest
from lineage.mlflow.client import MlflowException, PatientClient, Run, RunTag
from lineage.mlflow.lookup import ABSENT
from lineage.mlflow.names import CAUSE, FINGERPRINT, HOST, PID, STAGE, STARTED


def reopen(client: PatientClient, run: Run, tags: Mapping[str, str]) -> dict[str, int]:
    """Opens a run again that was ended.

    Args:
        tags: of who goes on with it.

    Returns:
        Metric -> the last step that it holds.
    """
    run_id = str(run.info.run_id)
    client.log_batch(run_id, tags=[RunTag(name, value) for name, value in tags.items()])  # first: whose it is now
    client.update_run(run_id, status="RUNNING")
    if CAUSE in run.data.tags:  # of the end before
        client.delete_tag(run_id, CAUSE)
    histories = {name: client.get_metric_history(run_id, name) for name in run.data.metrics}
    return {name: max(each.step for each in history) for name, history in histories.items()}


def half_recorded(client: PatientClient, manifest: Manifest) -> Run | None:
    """The run of a stage that was committed, when nobody could be told of it any more; None: there is none here."""
    run = find_run(client, manifest.mlflow_run_id) if manifest.mlflow_run_id else None
    if run is None or run.info.lifecycle_stage != "active" or run.info.status not in ("KILLED", "FAILED"):
        return None
    whose = run.data.tags.get(STAGE), run.data.tags.get(FINGERPRINT)
    return run if whose == (manifest.stage, manifest.fingerprint) else None


def has_inputs(run: Run) -> bool:
    """Whether it was told what its stage reads: that comes after its beginning, and a kill may come between."""
    return len(run.inputs.dataset_inputs) + len(run.inputs.model_inputs) > 0


def find_run(client: PatientClient, run_id: str) -> Run | None:
    """A run by its id; None: this database has none."""
    try:
        return client.get_run(run_id)
    except MlflowException as error:
        if error.error_code not in ABSENT:
            raise
        return None


def process_tags() -> dict[str, str]:
    """Who writes a run: it is closed by the next command when that process is gone."""
    me = Holder.here()
    return {HOST: me.host, PID: str(me.pid), STARTED: repr(me.started)}
