"""Which process runs a flow run, as a label of it: so that a run whose process died unheard can be told."""

import socket
import time
from collections.abc import Iterator, Mapping
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import DeploymentFilter, FlowFilter, FlowRunFilter
from prefect.client.schemas.objects import FlowRun
from prefect.states import Cancelled, Crashed

from flows.declare.pipeline import Pipeline
from flows.deploy.telling import tell
from lineage.owner import Owner

_LABEL = "posttrain.process"
_STARTING_SECONDS = 300.0  # by then a run that was handed to a process has said who it is
_OPEN = ["PENDING", "RUNNING", "CANCELLING", "PAUSED"]


def sign(flow_run_id: UUID) -> None:
    """Writes on a flow run that this process runs it."""
    me = Owner.here()
    with get_client(sync_client=True) as client:
        client.update_flow_run_labels(flow_run_id, {_LABEL: f"{me.host} {me.pid} {me.started}"})


def close_dead_runs(deployments: Mapping[str, Pipeline | None]) -> Iterator[str]:
    """Ends in Prefect the open runs whose process was of this host and is gone, tells of them, and yields their names.

    Args:
        deployments: ``FLOW/DEPLOYMENT`` -> its pipeline, where that stands.
    """
    with get_client(sync_client=True) as client:
        for name, pipeline in deployments.items():
            for run in filter(_is_dead, _open_runs(client, name)):
                said = "its process is gone, and so is the one that would have said so; run it again to go on"
                state = Cancelled(message=said) if run.state.is_cancelling() else Crashed(message=said)
                client.set_flow_run_state(run.id, state, force=True)
                if pipeline:
                    tell(pipeline, run.name, "crashed", said)
                yield run.name


def _open_runs(client: SyncPrefectClient, name: str) -> list[FlowRun]:
    flow, _, deployment = name.partition("/")
    filters = FlowRunFilter.model_validate({"state": {"type": {"any_": _OPEN}}})
    of_flow = FlowFilter.model_validate({"name": {"any_": [flow]}})
    of_deployment = DeploymentFilter.model_validate({"name": {"any_": [deployment]}})
    found = client.read_flow_runs(flow_filter=of_flow, flow_run_filter=filters, deployment_filter=of_deployment)
    return list(found)


def _is_dead(run: FlowRun) -> bool:
    signed = str(run.labels.get(_LABEL, "")).split()
    if len(signed) == 3:
        host, pid, started = signed
        here = host == socket.gethostname()
        return here and Owner(host=host, pid=int(pid), started=float(started), token="").is_dead(0.0)
    if run.work_pool_name:  # a worker anywhere may still fetch the code of it
        return False
    unclaimed = bool(run.state.is_pending() or run.state.is_cancelling())
    silent_seconds = time.time() - float(run.state.timestamp.timestamp())
    return unclaimed and silent_seconds > _STARTING_SECONDS
