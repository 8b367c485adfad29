"""How a pipeline is operated: tracking, aliases, schedules, triggers and retraining."""

import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, ClassVar
from zoneinfo import ZoneInfo

from annotated_types import Gt

from lineage.errors import ConfigError

_MODULE = "posttrain_croniter"
_FIELDS = 5
_RANDOM = {"r", "h"}  # croniter's own extensions, which Prefect refuses


def is_cron(expression: str) -> bool:
    """Whether it is of five fields, or a name such as ``@daily``; Prefect takes it; and its time ever comes."""
    croniter = _croniter()
    if len(expression.split()) != (1 if expression.startswith("@") else _FIELDS):
        return False  # croniter takes seconds and years too
    if not croniter.croniter.is_valid(expression) or _RANDOM & {part.casefold() for part in expression.split()}:
        return False
    try:
        croniter.croniter(expression).get_next()
    except croniter.CroniterError:  # such as of 30 February
        return False
    return True


def _croniter() -> ModuleType:
    """Prefect's copy of croniter, without the second that the import of prefect takes: a plan is made without it."""
    if _MODULE not in sys.modules:
        prefect = importlib.util.find_spec("prefect")
        assert prefect is not None and prefect.submodule_search_locations
        file = Path(prefect.submodule_search_locations[0], "_vendor", "croniter", "croniter.py")
        spec = importlib.util.spec_from_file_location(_MODULE, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[_MODULE] = module
        spec.loader.exec_module(module)
    return sys.modules[_MODULE]


_BLOCK = re.compile(r"[a-z0-9-]+/[a-z0-9-]+")


@dataclass(frozen=True, kw_only=True)
class Tracking:
    """Where a run is recorded beside its manifests. Execution, never identity.

    Args:
        mlflow: whether runs, data sets and models go to MLflow.
        uri: of MLflow; None: ``MLFLOW_TRACKING_URI``, or else ``sqlite:///mlflow.db`` where the command is called.
        dvc: whether a run of the pipeline as declared commits to DVC, in a DVC repository.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True}

    mlflow: bool
    uri: str | None
    dvc: bool


@dataclass(frozen=True, kw_only=True)
class Alias:
    """What is stated of an alias of the model registry.

    Args:
        commercial: whether no model may have it that was made from anything with a non-commercial label.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True}

    commercial: bool = False


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When a deployment runs by the clock: by exactly one of ``cron`` and ``interval``.

    Args:
        cron: five fields, or ``@daily`` and its kind.
        interval: seconds from one start to the next, counted from midnight UTC of 2020-01-01, so that starting
            ``posttrain serve`` again does not move the beat.
        timezone: of the cron expression, as the IANA names it; None: UTC.
        paused: registered, and does nothing until it is resumed in Prefect.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True}

    cron: str | None = None
    interval: Annotated[float, Gt(0)] | None = None
    timezone: str | None = None
    paused: bool = False

    def __post_init__(self) -> None:
        if (self.cron is None) == (self.interval is None):
            raise ConfigError(
                f"schedule: cron={self.cron} and interval={self.interval}; state one of them, "
                'such as schedule.cron="0 3 * * *" or schedule.interval=3600'
            )
        if self.cron is not None and not is_cron(self.cron):
            raise ConfigError(
                f"schedule.cron={self.cron!r}: is no cron expression, or one whose time never comes; give minute, "
                'hour, day of month, month and day of week, such as "0 3 * * mon-fri", or @daily and its kind'
            )
        try:
            ZoneInfo(self.timezone or "UTC")
        except (KeyError, ValueError, OSError) as error:
            raise ConfigError(
                f"schedule.timezone={self.timezone}: no such time zone; give an IANA name such as Europe/Berlin"
            ) from error


@dataclass(frozen=True, kw_only=True)
class Trigger:
    """What starts a run besides the clock.

    Args:
        sources: names of sources; a run starts when the digest of one changes.
        poll: seconds between two looks at them.
        settle: seconds that they must rest unchanged before a run starts: a burst of changes is one.
        events: names of Prefect events; a run starts when one arrives, and has rested as long.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True}

    sources: tuple[str, ...] = ()
    poll: Annotated[float, Gt(0)] = 60.0
    settle: Annotated[float, Gt(0)] = 10.0
    events: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not (self.sources or self.events):
            raise ConfigError(
                "trigger: states neither sources nor events; name what is to start a run, or trigger=null"
            )


@dataclass(frozen=True, kw_only=True)
class Retrain:
    """What follows the verdict of a pipeline that renews a model: promotion where the gate passes, else nothing.

    Args:
        promote: the stage whose model is promoted.
        alias: what it is given.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True}

    promote: str
    alias: str = "champion"


@dataclass(frozen=True, kw_only=True)
class Operation:
    """How a pipeline runs without a command: on a schedule, by a trigger.

    Args:
        tags: of its deployments in Prefect.
        notify: a notification block of Prefect, ``TYPE/NAME``, for the outcome of each run; None: no notifications.

    Raises:
        ConfigError: ``notify`` is no name of a block.
    """

    tags: tuple[str, ...] = ()
    schedule: Schedule | None = None
    trigger: Trigger | None = None
    retrain: Retrain | None = None
    notify: str | None = None

    def __post_init__(self) -> None:
        if self.notify is not None and not _BLOCK.fullmatch(self.notify):
            raise ConfigError(
                f"notify={self.notify}: is no block of Prefect; give TYPE/NAME, such as slack-webhook/team or "
                "custom-webhook/ops"
            )
