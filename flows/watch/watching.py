"""Watchers at work: a thread for each deployment whose pipeline states a ``trigger``."""

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator, Mapping

from flows.declare.pipeline import Pipeline
from flows.stops import stoppable
from flows.watch.watcher import Watcher
from lineage.errors import ConfigError

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def watching(deployments: Mapping[str, Pipeline]) -> Iterator[None]:
    """Watches for as long as the context lasts, and says on stderr what starts a run.

    The runs are those of the server that ``PREFECT_API_URL`` names; that must be set before ``prefect`` is imported.

    Args:
        deployments: ``FLOW/DEPLOYMENT`` -> its pipeline. They need not be served by this process.
    """
    from flows.watch.prefect_runs import PrefectRuns

    _log_to_stderr()
    stop = threading.Event()
    for name, pipeline in deployments.items():
        if pipeline.operation.trigger:
            watcher = Watcher(pipeline, pipeline.operation.trigger, name, PrefectRuns())
            logger.info("%s: watches %s", name, ", ".join(watcher.watched()))
            threading.Thread(target=_keep_looking, args=(watcher, stop), name=f"watch {name}", daemon=True).start()
    try:
        yield
    finally:
        stop.set()  # they are not waited for: a run that is being created now is found by its key the next time


def watch_until_stopped(deployments: Mapping[str, Pipeline]) -> None:
    """Watches for deployments that others serve, until Ctrl-C or SIGTERM.

    Raises:
        ConfigError: no pipeline states a trigger.
    """
    if not any(pipeline.operation.trigger for pipeline in deployments.values()):
        raise ConfigError(
            "--watch-only: no pipeline states a trigger; state one, such as trigger={sources: [corpus]} in "
            "pipeline/NAME.yaml"
        )
    with contextlib.suppress(KeyboardInterrupt), stoppable(), watching(deployments):
        threading.Event().wait()


def _keep_looking(watcher: Watcher, stop: threading.Event) -> None:
    while not stop.wait(watcher.look()):
        pass


def _log_to_stderr() -> None:
    """Of this package alone; Prefect configures the loggers of its own."""
    package = logging.getLogger(__package__)
    if not package.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        package.addHandler(handler)
        package.setLevel(logging.INFO)
        package.propagate = False
