"""Runs that ended before their stage did: gone on with, so that a stage has one, however often it was interrupted."""

from collections.abc import Mapping

from lineage.manifest import Manifest
from lineage.mlflow.client import MlflowException, PatientClient, Run, RunTag
from lineage.mlflow.lookup import ABSENT
from lineage.mlflow.names import CAUSE, FINGERPRINT, STAGE


def reopen(client: PatientClient, run: Run, tags: Mapping[str, str]) -> dict[str, int]:
    """Opens a run again that was ended.

    Args:
        tags: of who goes on with it.

    Returns:
        Metric -> the last step that it holds.
    """
    run_id = str(run.info.run_id)
    client.update_run(run_id, status="RUNNING")
    client.log_batch(run_id, tags=[RunTag(name, value) for name, value in tags.items()])
    if CAUSE in run.data.tags:  # of the end before
        client.delete_tag(run_id, CAUSE)
    histories = {name: client.get_metric_history(run_id, name) for name in run.data.metrics}
    return {name: max(each.step for each in history) for name, history in histories.items()}


def half_recorded(client: PatientClient, manifest: Manifest) -> Run | None:
    """The run of a stage that was committed, when nobody could be told of it any more; None: there is none here."""
    if manifest.mlflow_run_id is None:
        return None
    try:
        run = client.get_run(manifest.mlflow_run_id)
    except MlflowException as error:
        if error.error_code not in ABSENT:
            raise
        return None  # it was recorded elsewhere
    whose = run.data.tags.get(STAGE), run.data.tags.get(FINGERPRINT)
    is_whole = len(run.inputs.dataset_inputs) + len(run.inputs.model_inputs) > 0 or not manifest.inputs
    is_its_own = whose == (manifest.stage, manifest.fingerprint) and run.info.lifecycle_stage == "active"
    return run if is_its_own and is_whole and run.info.status in ("KILLED", "FAILED") else None
