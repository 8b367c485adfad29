"""The runs of deployments, and the events, by Prefect's API."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterExpectedStartTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import StateType
from prefect.events.filters import EventFilter, EventNameFilter, EventOccurredFilter
from prefect.exceptions import ObjectNotFound
from prefect.states import Scheduled

from flows.watch.memory import Arrival
from flows.watch.watcher import Fate

_UNDER_WAY = [
    StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.PAUSED, StateType.CANCELLING,
]  # fmt: skip
_PAGE = 50  # of events; the most that the server gives at once
_SHUTDOWN = "Runner is shutting down."  # what Prefect says of a run that `posttrain serve` takes along
_AHEAD = timedelta(days=1)  # by which the clock of an event's sender may be ahead of ours


class PrefectRuns:
    """Asks the server of ``PREFECT_API_URL``."""

    def under_way(self, deployment: str) -> str | None:
        with get_client(sync_client=True) as client:
            found = client.read_flow_runs(
                deployment_filter=DeploymentFilter(
                    id=DeploymentFilterId(any_=[client.read_deployment_by_name(deployment).id])
                ),
                flow_run_filter=FlowRunFilter(
                    state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_UNDER_WAY)),
                    expected_start_time=FlowRunFilterExpectedStartTime(before_=datetime.now(UTC)),
                ),
                limit=1,
            )
        return str(found[0].name) if found else None

    def arrivals(self, names: tuple[str, ...], since: datetime) -> tuple[Arrival, ...]:
        wanted = EventFilter(
            occurred=EventOccurredFilter(since=since, until=datetime.now(UTC) + _AHEAD),
            event=EventNameFilter(name=list(names)),
        )
        with get_client(sync_client=True) as client:
            page = client.read_events(wanted, limit=_PAGE)
            found = list(page.events)
            while page.next_page:
                page = client.read_events_page(page.next_page)
                found += page.events
        return tuple(
            Arrival(id=str(each.id), name=each.event, occurred=each.occurred.astimezone(UTC).isoformat())
            for each in found
        )

    def start(self, deployment: str, causes: tuple[str, ...], key: str) -> tuple[str, str]:
        with get_client(sync_client=True) as client:
            run = client.create_flow_run_from_deployment(
                client.read_deployment_by_name(deployment).id,
                state=Scheduled(message=f"started by a trigger: {', '.join(causes)}"),
                tags=[f"trigger:{cause}" for cause in causes],
                idempotency_key=key,
            )
        return str(run.id), str(run.name)

    def fate(self, run_id: str) -> tuple[Fate, str]:
        with get_client(sync_client=True) as client:
            try:
                run = client.read_flow_run(UUID(run_id))
            except ObjectNotFound:  # the server has lost its runs
                return "lost", run_id
        if not run.state.is_final():
            return "open", run.name
        stopped = run.state.is_cancelled() and run.state.message == _SHUTDOWN
        return "lost" if stopped or run.state.is_crashed() else "over", run.name
