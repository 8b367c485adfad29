"""A pipeline's ``schedule`` as Prefect takes it."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from flows.declare.operation import Schedule

if TYPE_CHECKING:
    from prefect.schedules import Schedule as PrefectSchedule

_ANCHOR = datetime(2020, 1, 1, tzinfo=UTC)  # what intervals are counted from


def prefect_schedules(schedule: Schedule | None) -> list["PrefectSchedule"]:
    """For a deployment that is served; an empty list takes the schedule away that an earlier one had."""
    from prefect.schedules import Cron, Interval

    if schedule is None:
        return []
    active = not schedule.paused
    if schedule.cron is not None:
        return [Cron(schedule.cron, timezone=schedule.timezone, active=active)]
    assert schedule.interval is not None
    return [Interval(schedule.interval, anchor_date=_ANCHOR, timezone=schedule.timezone, active=active)]


def schedule_entries(schedule: Schedule | None) -> list[dict[str, object]]:
    """The same for ``schedules:`` of a deployment in ``prefect.yaml``."""
    if schedule is None:
        return []
    when: dict[str, object] = (
        {"cron": schedule.cron}
        if schedule.cron is not None
        else {"interval": schedule.interval, "anchor_date": _ANCHOR.isoformat()}
    )
    return [{**when, "timezone": schedule.timezone or "UTC", "active": not schedule.paused}]
