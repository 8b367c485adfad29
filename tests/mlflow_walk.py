"""What MLflow's own client sees of a model: from a registered version, hop by hop, to the root of its lineage."""

from mlflow import MlflowClient
from mlflow.entities import Run


def walk(client: MlflowClient, name: str, version: str) -> list[dict[str, object]]:
    """The version, then each run with its data and parent models, up to the one that read no model.

    Ids are left out: they are what a rebuilt database cannot keep.
    """
    start = client.get_model_version(name, version)
    hops: list[dict[str, object]] = [{"version": start.version, "tags": dict(start.tags), "aliases": start.aliases}]
    run_id = start.run_id
    while run_id:
        run = client.get_run(run_id)
        assert run.info.status == "FINISHED"
        hops.append(seen(client, run))
        parents = [client.get_logged_model(each.model_id) for each in run.inputs.model_inputs]
        run_id = parents[0].source_run_id if parents else None
    return hops


def seen(client: MlflowClient, run: Run) -> dict[str, object]:
    """All that is comparable of a run."""
    outputs = [client.get_logged_model(each.model_id) for each in run.outputs.model_outputs]
    parents = [client.get_logged_model(each.model_id) for each in run.inputs.model_inputs]
    return {
        "stage": run.info.run_name,
        "times": (run.info.end_time,),
        "params": run.data.params,
        "metrics": {name: history(client, run.info.run_id, name) for name in run.data.metrics},
        "data": sorted(
            (
                each.dataset.name,
                each.dataset.digest,
                each.dataset.source_type,
                each.dataset.source,
                each.dataset.profile,
            )
            for each in run.inputs.dataset_inputs
        ),
        "made": [(each.name, each.model_type, each.params, ours(each.tags)) for each in outputs],
        "from": [(each.name, each.model_type, each.params, ours(each.tags)) for each in parents],
        "tags": {key: value for key, value in ours(run.data.tags).items() if key not in _OF_THE_PROCESS},
    }


_OF_THE_PROCESS = {
    "posttrain.host", "posttrain.pid", "posttrain.process_started", "posttrain.recorded_run_id"
}  # fmt: skip


def ours(tags: dict[str, str]) -> dict[str, str]:
    return {key: value for key, value in tags.items() if key.startswith("posttrain.")}


def history(client: MlflowClient, run_id: str, name: str) -> list[tuple[int, float, int]]:
    return sorted((each.step, each.value, each.timestamp) for each in client.get_metric_history(run_id, name))
