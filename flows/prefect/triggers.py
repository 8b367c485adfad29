"""Starts a run of a deployment when the digest of a source changes.

Events start runs by an automation of Prefect, which is registered with the deployment.
"""

import contextlib
import json
import logging
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Literal
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import DeploymentFilter, FlowRunFilter
from prefect.exceptions import ObjectNotFound
from prefect.states import Scheduled

from flows.declare.config import typed
from flows.declare.operation import Trigger
from flows.declare.pipeline import Pipeline
from flows.planning.plan import make_plan
from flows.promotion.retrain import has_work
from flows.stages.stops import stoppable
from lineage.artifact import SOURCE
from lineage.errors import ConfigError, PipelineError
from lineage.filesystem.digest import DigestCache
from lineage.filesystem.files import atomic_write
from lineage.fingerprint import digest_json
from lineage.source.sources import pin
from lineage.store import Store

logger = logging.getLogger(__name__)

Exit = Literal["open", "lost", "over"]
_MAX_TRIES = 5  # of runs that crash over the same data: the run itself may be the cause
_SHUTDOWN = "Runner is shutting down."  # Prefect's message for a run that `posttrain serve` stops


@dataclass(frozen=True, kw_only=True)
class Taken:
    """``<store>/watch/<pipeline>.json``: the sources as the last run has taken them.

    Args:
        digests: source -> fingerprint, before the run that was started last.
        started: the same, as that run takes them, while it is open.
        run: its id; None: it is over.
        key: its idempotency key, which the next one continues; before the first run, a random one.
        tries: the number of runs that crashed over the same data.
    """

    digests: Mapping[str, str]
    started: Mapping[str, str] = field(default_factory=dict)
    run: str | None = None
    key: str = ""
    tries: int = 0

    def now(self) -> Mapping[str, str]:
        """The sources that need no further run, unless the open one crashes."""
        return {**self.digests, **self.started}


class Runs:
    """The runs of a deployment on the server of ``PREFECT_API_URL``."""

    def __init__(self, deployment: str) -> None:
        self._deployment = deployment

    def under_way(self) -> str | None:
        """The name of a run that waits or runs; not of one that a schedule has set for later."""
        states = {"type": {"any_": ["SCHEDULED", "PENDING", "RUNNING", "PAUSED", "CANCELLING"]}}
        due = {"state": states, "expected_start_time": {"before_": datetime.now(UTC)}}
        with get_client(sync_client=True) as client:
            deployment = {"id": {"any_": [client.read_deployment_by_name(self._deployment).id]}}
            found = client.read_flow_runs(
                deployment_filter=DeploymentFilter.model_validate(deployment),
                flow_run_filter=FlowRunFilter.model_validate(due), limit=1,
            )  # fmt: skip
        return str(found[0].name) if found else None

    def create(self, causes: Sequence[str], key: str) -> tuple[str, str]:
        """Creates a run, unless there is one of this idempotency key, and returns its id and name."""
        with get_client(sync_client=True) as client:
            run = client.create_flow_run_from_deployment(
                client.read_deployment_by_name(self._deployment).id,
                state=Scheduled(message=f"started by a trigger: {', '.join(causes)}"),
                tags=[f"trigger:{cause}" for cause in causes], idempotency_key=key,
            )  # fmt: skip
        return str(run.id), str(run.name)

    def exit(self, run_id: str) -> Exit:
        """The state of a run: "lost" if it crashed or its server stopped, "over" if it terminated otherwise."""
        with get_client(sync_client=True) as client:
            try:
                state = client.read_flow_run(UUID(run_id)).state
            except ObjectNotFound:  # the server lost its database
                return "lost"
        if not state.is_final():
            return "open"
        stopped = state.is_cancelled() and state.message == _SHUTDOWN
        return "lost" if stopped or state.is_crashed() else "over"


class Watcher:
    """Watches the sources of one deployment's pipeline.

    A run is due when a source is not what the last run took, and no source changed for ``settle`` seconds. None is
    created while another waits or runs: later changes are for the next run. A run that crashes has taken nothing.

    Args:
        deployment: ``FLOW/DEPLOYMENT``.
        clock: seconds, monotonic.
    """

    def __init__(
        self, pipeline: Pipeline, trigger: Trigger, deployment: str, runs: Runs,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._pipeline, self._trigger, self._deployment = pipeline, trigger, deployment
        self._runs, self._clock = runs, clock
        self._cache = DigestCache(pipeline.store / "digests.json")
        self._path = pipeline.store / "watch" / f"{pipeline.name}.json"
        self._found: Mapping[str, str] = {}
        self._since = 0.0
        self._logged = ""

    def poll(self) -> float:
        """Polls the sources once, and returns the seconds until the next poll."""
        try:
            found = {
                name: pin(name, self._pipeline.sources[name], self._cache).fingerprint for name in self._trigger.sources
            }
            return self._poll(found, self._taken(found))
        except Exception as error:  # from the store, the hub, a bucket, the server: the next poll may succeed
            self._log(logging.WARNING, f"cannot poll: {type(error).__name__}: {error}")
            return self._trigger.poll

    def _poll(self, found: Mapping[str, str], taken: Taken) -> float:
        now = self._clock()
        if found != self._found:
            self._found, self._since = found, now
        changed = sorted(name for name, digest in found.items() if taken.now().get(name) != digest)
        remaining = self._since + self._trigger.settle - now
        if not changed:
            self._logged = ""
        elif remaining > 0:
            self._log(logging.INFO, f"new: {', '.join(changed)}; waits until it settles")
            return min(remaining, self._trigger.poll)
        else:
            self._log(logging.INFO, f"new: {', '.join(changed)}; {self._follow(taken, found, changed)}")
        return self._trigger.poll

    def _follow(self, taken: Taken, found: Mapping[str, str], changed: Sequence[str]) -> str:
        """Creates a run unless one is under way; returns what happened."""
        other = self._runs.under_way() or taken.run
        if other:
            return f"waits for the run {other}"
        with contextlib.suppress(PipelineError):  # the run reports it
            if not has_work(make_plan(self._pipeline)):
                self._write(replace(taken, digests=found, tries=0))
                return "another run has taken it"
        content = {"deployment": self._deployment, "before": taken.key, "digests": dict(found), "tries": taken.tries}
        key = digest_json(content)
        run_id, name = self._runs.create(changed, key)
        self._write(replace(taken, started=found, run=run_id, key=key))
        return f"started the run {name}"

    def _taken(self, found: Mapping[str, str]) -> Taken:
        """The sources as earlier runs have taken them; one that is new here, as in the pipeline's last output."""
        stored = None
        with contextlib.suppress(OSError, ValueError, ConfigError):  # missing or damaged: watching starts again
            stored = typed(Taken, json.loads(self._path.read_text()), str(self._path))
        # Its own first key: another store, or one that was deleted, may have had the same data on the same server.
        taken = self._settled(stored or Taken(digests={}, key=secrets.token_hex(16)))
        unknown = found.keys() - taken.now().keys()
        known = {name: last_taken(self._pipeline, name) or found[name] for name in unknown}
        taken = replace(taken, digests={**taken.digests, **known})
        if taken != stored:
            self._write(taken)
        return taken

    def _settled(self, taken: Taken) -> Taken:
        """Updates the record by the exit of the last run, if it is over."""
        found = self._runs.exit(taken.run) if taken.run else "open"
        if found == "open":
            return taken
        if found == "lost" and taken.tries + 1 < _MAX_TRIES:
            self._log(logging.WARNING, "the run was stopped or crashed; its data is new again")
            return replace(taken, started={}, run=None, tries=taken.tries + 1)
        if found == "lost":
            self._log(logging.WARNING, f"the run crashed, as {taken.tries} before it; start the next yourself")
        return replace(taken, digests=taken.now(), started={}, run=None, tries=0)

    def _write(self, taken: Taken) -> None:
        atomic_write(self._path, json.dumps(asdict(taken), indent=1) + "\n")

    def _log(self, level: int, text: str) -> None:
        """Logs a change of state, once."""
        if text != self._logged:
            self._logged = text
            logger.log(level, "%s: %s", self._deployment, text)


def last_taken(pipeline: Pipeline, name: str) -> str | None:
    """The fingerprint of a source in the newest output that this pipeline made from it; None: there is none."""
    found: list[tuple[float, str]] = []
    for stage_name, stage in pipeline.stages.items():
        slots = [slot for slot, reference in stage.inputs.items() if pipeline.key(reference) == SOURCE + name]
        for manifest in Store(pipeline.store).finished(stage_name) if slots else ():
            read = manifest.inputs.get(slots[0])
            if manifest.pipeline == pipeline.name and read and read.artifact == SOURCE + name:
                found.append((manifest.provenance.end, read.fingerprint))
    return max(found, key=lambda each: each[0])[1] if found else None


@contextlib.contextmanager
def watching(deployments: Mapping[str, Pipeline]) -> Iterator[None]:
    """Watches in a thread per deployment for as long as the context lasts, and logs to stderr what starts a run.

    Args:
        deployments: ``FLOW/DEPLOYMENT`` -> its pipeline. They need not be served by this process.
    """
    if not logger.handlers:  # of this module alone; Prefect configures the loggers of its own
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    stop = threading.Event()

    def watch(watcher: Watcher) -> None:
        while not stop.wait(watcher.poll()):
            pass

    for name, pipeline in deployments.items():
        if trigger := _watched(pipeline):
            watcher = Watcher(pipeline, trigger, name, Runs(name))
            logger.info("%s: watches %s", name, ", ".join(trigger.sources))
            threading.Thread(target=watch, args=(watcher,), name=f"watch {name}", daemon=True).start()
    try:
        yield
    finally:
        stop.set()  # without waiting for the threads: a run that is being created is found by its key the next time


def watch_until_stopped(deployments: Mapping[str, Pipeline]) -> None:
    """Watches for deployments that other processes serve, until Ctrl-C or SIGTERM.

    Raises:
        ConfigError: no pipeline has a trigger on sources.
    """
    if not any(map(_watched, deployments.values())):
        raise ConfigError(
            "--watch-only: no pipeline has a trigger on sources; set one, such as trigger={sources: [corpus]} in "
            "pipeline/NAME.yaml"
        )
    with contextlib.suppress(KeyboardInterrupt), stoppable(), watching(deployments):
        threading.Event().wait()


def _watched(pipeline: Pipeline) -> Trigger | None:
    trigger = pipeline.operation.trigger
    return trigger if trigger and trigger.sources else None
