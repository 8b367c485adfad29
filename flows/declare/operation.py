"""How a pipeline is operated: tracking, aliases, schedules, triggers and retraining."""

import importlib.util
import netrc
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Annotated, TypeVar, dataclass_transform
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo

from annotated_types import Gt

from lineage.errors import ConfigError
from lineage.record.run_file import RunNames

_MODULE = "posttrain_croniter"
_FIELDS = 5
_RANDOM = {"r", "h"}  # croniter's own extensions, which Prefect refuses


def is_cron(expression: str) -> bool:
    """Whether a cron expression of five fields, or a name such as ``@daily``, is accepted by Prefect and ever fires."""
    croniter = _croniter()
    if len(expression.split()) != (1 if expression.startswith("@") else _FIELDS):
        return False  # croniter also accepts seconds and years
    if not croniter.croniter.is_valid(expression) or _RANDOM & {part.casefold() for part in expression.split()}:
        return False
    try:
        croniter.croniter(expression).get_next()
    except croniter.CroniterError:  # such as 30 February
        return False
    return True


def _croniter() -> ModuleType:
    """Prefect's vendored croniter, loaded from its file: importing prefect would take a second."""
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


T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def strict(cls: type[T]) -> type[T]:
    """A frozen dataclass whose keys and types are checked when it is built from YAML."""
    cls.__pydantic_config__ = {"extra": "forbid", "strict": True}  # type: ignore[attr-defined]
    return dataclass(frozen=True, kw_only=True)(cls)


_TAG, _TAG_LENGTH = re.compile(r"[\w.\- :/]{1,250}"), 5000  # what MLflow accepts
_BLOCK = re.compile(r"[a-z0-9-]+/[a-z0-9-]+")


@strict
class Tracking:
    """Where runs are recorded besides their manifests. Not identity.

    Args:
        mlflow: whether runs, data sets and models go to MLflow.
        tensorboard, wandb, trackio: whether the stages' curves go there too.
        uri: of MLflow; None: ``MLFLOW_TRACKING_URI``, or else ``sqlite:///mlflow.db`` in the working directory.
        dvc: whether runs of the pipeline as declared commit to DVC, in a DVC repository.
        experiment: MLflow experiment, and the project of other trackers; None: named after the pipeline. Several
            pipelines may share one.
        run_name: of the execution's run; ``{pipeline}``, ``{time}`` and ``{user}`` are filled in.
        tags: of the runs of the execution, its stages and its trials.

    Raises:
        ConfigError: MLflow does not accept a name or a tag.
    """

    mlflow: bool = True
    uri: str | None = None
    dvc: bool = True
    tensorboard: bool = False
    wandb: bool = False
    trackio: bool = False
    experiment: str | None = None
    run_name: str | None = None
    tags: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in {"experiment": self.experiment, "run_name": self.run_name}.items():
            if value is not None and not value.strip():
                raise ConfigError(f"tracking.{name}={value!r}: is empty; give a name, or null for the default")
        try:
            self.names().filled("", 0.0)
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"tracking.run_name={self.run_name}: has another placeholder than {{pipeline}}, {{time}} and {{user}} "
                f"({error}); write a brace that is meant twice"
            ) from error
        for name, value in self.tags.items():
            if not _TAG.fullmatch(name) or name.startswith(("mlflow.", "posttrain.")) or len(value) > _TAG_LENGTH:
                raise ConfigError(
                    f"tracking.tags.{name}: a tag's name has letters, digits and _ - . / : and blanks, at most 250, "
                    f"and does not begin with mlflow. or posttrain.; its value has at most {_TAG_LENGTH} characters"
                )

    @property
    def others(self) -> list[str]:
        """The trackers beside MLflow, each of which is installed, and has an account where it needs one.

        Raises:
            ConfigError: one is not installed, or Weights & Biases would ask a person for a key.
        """
        chosen = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}
        for name, package in chosen.items():
            if getattr(self, name) and importlib.util.find_spec(package) is None:
                raise ConfigError(
                    f"tracking.{name}=true: the package {package} is not installed; run: pip install "
                    f"'posttrain[{name}]', or leave it out"
                )
        if self.wandb:
            _require_account()
        return [name for name in chosen if getattr(self, name)]

    def names(self) -> RunNames:
        return RunNames(experiment=self.experiment or "", run_name=self.run_name or "", tags=self.tags)


def _require_account() -> None:
    """Refuses a run for which Weights & Biases would ask a person for a key, or which it would refuse.

    Raises:
        ConfigError: there is no key, and nothing says that it is offline; or its mode is none that it knows.
    """
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    named = any(os.environ.get(f"WANDB_{name}") for name in ("API_KEY", "IDENTITY_TOKEN_FILE"))
    mode, online, away = os.environ.get("WANDB_MODE", "online"), ("online", "run", "shared"), ("offline", "dryrun")
    if mode not in (*online, *away, "disabled"):
        raise ConfigError(
            f"tracking.wandb=true: WANDB_MODE={mode!r} is no mode of Weights & Biases; online, offline, shared and "
            "disabled are accepted; set one of them, or unset it for online"
        )
    try:
        known = netrc.netrc(os.environ.get("NETRC")).authenticators(host)
    except (OSError, netrc.NetrcParseError):
        known = None
    if mode in online and not (named or known):
        raise ConfigError(
            f"tracking.wandb=true: there is no key for {host}; log in with `wandb login`, set WANDB_API_KEY, or keep "
            "the runs in the store with WANDB_MODE=offline, for `wandb sync` later"
        )


@strict
class Alias:
    """Settings of an alias of the model registry.

    Args:
        commercial: refuse models whose ancestry has a non-commercial label.
    """

    commercial: bool = False


@strict
class Schedule:
    """The schedule of a deployment: exactly one of ``cron`` and ``interval``.

    Args:
        cron: five fields, or a name such as ``@daily``.
        interval: seconds between two starts, counted from 2020-01-01 UTC, so that a restart of ``posttrain serve``
            does not shift them.
        timezone: IANA time zone of the cron expression; None: UTC.
        paused: registered, but inactive until it is resumed in Prefect.
    """

    cron: str | None = None
    interval: Annotated[float, Gt(0)] | None = None
    timezone: str | None = None
    paused: bool = False

    def __post_init__(self) -> None:
        if (self.cron is None) == (self.interval is None):
            raise ConfigError(
                f"schedule: cron={self.cron} and interval={self.interval}; set one of them, "
                'such as schedule.cron="0 3 * * *" or schedule.interval=3600'
            )
        if self.cron is not None and not is_cron(self.cron):
            raise ConfigError(
                f"schedule.cron={self.cron!r}: is not a cron expression, or one that never fires; give minute, "
                'hour, day of month, month and day of week, such as "0 3 * * mon-fri", or a name such as @daily'
            )
        try:
            ZoneInfo(self.timezone or "UTC")
        except (KeyError, ValueError, OSError) as error:
            raise ConfigError(
                f"schedule.timezone={self.timezone}: no such time zone; give an IANA name such as Europe/Berlin"
            ) from error


@strict
class Trigger:
    """What starts a run besides the schedule.

    Args:
        sources: names of sources; a run starts when the digest of one changes.
        poll: seconds between two checks of them.
        settle: seconds without changes before a run starts, so that a burst of changes starts one run.
        events: names of Prefect events; a run starts ``settle`` seconds after the first of them.
    """

    sources: tuple[str, ...] = ()
    poll: Annotated[float, Gt(0)] = 60.0
    settle: Annotated[float, Gt(0)] = 10.0
    events: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not (self.sources or self.events):
            raise ConfigError(
                "trigger: has neither sources nor events; name what is to start a run, or set trigger=null"
            )


@strict
class Retrain:
    """Promotes a retrained model if its gate passes.

    Args:
        promote: the stage whose model is promoted.
        alias: the alias that it gets.
    """

    promote: str
    alias: str = "champion"


@dataclass(frozen=True, kw_only=True)
class Operation:
    """How a pipeline runs by itself: on a schedule, by a trigger.

    Args:
        tags: of its deployments in Prefect.
        notify: Prefect notification block, ``TYPE/NAME``, for the outcome of each run; None: no notifications.

    Raises:
        ConfigError: ``notify`` is not the name of a block.
    """

    tags: tuple[str, ...] = ()
    schedule: Schedule | None = None
    trigger: Trigger | None = None
    retrain: Retrain | None = None
    notify: str | None = None

    def __post_init__(self) -> None:
        if self.notify is not None and not _BLOCK.fullmatch(self.notify):
            raise ConfigError(
                f"notify={self.notify}: is not a block of Prefect; give TYPE/NAME, such as slack-webhook/team or "
                "custom-webhook/ops"
            )
