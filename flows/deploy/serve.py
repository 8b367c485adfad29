"""Registers deployments with Prefect, and runs what is asked of them until it is stopped."""

import signal
from collections.abc import Sequence

import anyio
from prefect.deployments.runner import RunnerDeployment
from prefect.logging.handlers import APILogHandler
from prefect.runner import Runner
from prefect.types.entrypoint import EntrypointType

from flows.deploy.flow import pipeline_flow
from flows.deploy.pipelines import Declared
from flows.deploy.prefect_yaml import ENTRY
from flows.deploy.preset import Preset
from flows.watch.schedule import prefect_schedules

_LOOK_SECONDS = 2.0  # between two looks for runs that are due


def deployment_of(pipeline: Declared, preset: Preset, pattern: str, name: str) -> RunnerDeployment:
    """A pipeline as Prefect registers it: its schema, its schedule, its tags, the digest of its code."""
    flow = pipeline_flow(pipeline, preset, pattern)
    deployment = RunnerDeployment.from_flow(
        flow, name,
        schedules=prefect_schedules(pipeline.schedule),
        tags=pipeline.tags, version=flow.version, version_type="prefect:simple", paused=False,
        entrypoint_type=EntrypointType.MODULE_PATH,
    )  # fmt: skip
    deployment.entrypoint = f"{ENTRY}.{pipeline.option}"
    return deployment


def register(deployments: Sequence[RunnerDeployment], limit: int | None) -> Runner:
    """Tells Prefect of the deployments.

    Args:
        limit: runs under way at once; None: no limit.
    """
    runner = Runner(limit=limit, query_seconds=_LOOK_SECONDS)
    for each in deployments:
        runner.add_deployment(each)
    return runner


def serve(runner: Runner) -> None:
    """Runs what is asked of the deployments until Ctrl-C or SIGTERM; what runs then is cancelled."""
    anyio.run(_serve, runner)
    APILogHandler().flush()  # while there is a server: it may end with this command, and is tried for a minute then


async def _serve(runner: Runner) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(runner.start)
        while not runner.started:
            await anyio.sleep(0.05)
        # After the start, which takes SIGTERM for itself: both signals are one stop, and what runs is cancelled.
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for _ in signals:
                await runner.astop()
                break
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # the stop is under way; a second one would only break it
