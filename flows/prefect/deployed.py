"""Deployments in Prefect: registered and served, and one run of one.

A run does what `posttrain run` does, inside a flow run that Prefect has made.
"""

import contextlib
import logging
import os
import shlex
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Annotated, Literal

import anyio
from prefect import Flow, flow, runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.deployments.runner import RunnerDeployment
from prefect.events import DeploymentEventTrigger
from prefect.logging import get_run_logger
from prefect.logging.handlers import APILogHandler
from prefect.runner import Runner
from prefect.schedules import Cron, Interval, Schedule
from prefect.states import Cancelled, Completed, Failed, State
from prefect.types.entrypoint import EntrypointType
from pydantic import Field

from flows.declare.config import CONF, Composer, load_pipeline
from flows.declare.pipeline import Pipeline
from flows.planning.plan import Plan, make_plan
from flows.planning.verdicts import require_passed
from flows.prefect.deployments import ANCHOR, ENTRY, Declared, Preset, declared
from flows.prefect.flow import approved, enter_flow_run, flow_run_here, leave_flow_run, task_runner
from flows.prefect.page import RunPage, show_plan
from flows.progress.declared import adopt_view, show_declared, split_cli_args
from flows.progress.recorder import RunRecorder
from flows.progress.run_record import latest
from flows.promotion.notify import notify, require_block
from flows.promotion.retrain import follow_up, has_work
from flows.run import open_run, prepare_run, run_stages
from lineage.code import code_digest
from lineage.errors import ConfigError, GateError, PipelineError
from lineage.filesystem.digest import digest_file, digest_of
from lineage.filesystem.lock import Lock, acquire_or
from lineage.fingerprint import short
from lineage.secrets import redacted
from lineage.source.source_checks import PYTHON, code_of, python_function
from lineage.store import create_store

logger = logging.getLogger(__name__)

_ENGINE = "PREFECT__FLOW_RUN_ID"  # set by Prefect in the process of a run
_PACKAGES = ("lineage", "tasks", "flows")
_NO_OVERRIDES: list[str] = []
_DUE_SECONDS = 2.0  # between two polls for runs that are due
_POLL_SECONDS = 1.0  # of the process that started this one
_END_SECONDS = 30.0


def register(pipelines: Sequence[Declared], preset: Preset, name: str, limit: int | None) -> Runner:
    """Registers deployments with Prefect: schema, schedule, automations, tags, digest of the code.

    Args:
        name: of each deployment.
        limit: runs under way at once; None: no limit.
    """
    runner = Runner(limit=limit, query_seconds=_DUE_SECONDS)
    for each in pipelines:
        flow = pipeline_flow(each, preset)
        deployment = RunnerDeployment.from_flow(
            flow, name, schedules=list(map(_schedule, each.schedules)), tags=each.tags, paused=False,
            triggers=list(map(DeploymentEventTrigger.model_validate, each.triggers)),
            version=flow.version, version_type="prefect:simple", entrypoint_type=EntrypointType.MODULE_PATH,
        )  # fmt: skip
        deployment.entrypoint = f"{ENTRY}.{each.option}"
        runner.add_deployment(deployment)
    return runner


def _schedule(when: Mapping[str, object]) -> Schedule:
    rest = {name: value for name, value in when.items() if name in ("timezone", "active")}
    return Cron(when["cron"], **rest) if "cron" in when else Interval(when["interval"], anchor_date=ANCHOR, **rest)


def serve(runner: Runner) -> None:
    """Runs what is asked of the deployments until Ctrl-C or SIGTERM; what runs then is cancelled."""

    async def serving() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(runner.start)
            await anyio.sleep(0)  # its first step takes SIGTERM for itself
            # Both signals are one stop, from the first moment on, and what runs is cancelled.
            with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                async for _ in signals:
                    while not runner.started:
                        await anyio.sleep(0.05)
                    await runner.astop()
                    break
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)  # the stop is under way; a second one would only break it

    anyio.run(serving)
    APILogHandler().flush()  # while there is a server: it may end with this command, and is tried for a minute then


def flow_of(option: str) -> Flow[..., None] | None:
    """The flow of the pipeline in ``pipeline/<option>.yaml``, for a process of Prefect's; None: no such file."""
    preset = Preset.of_environment()
    if option not in preset.files():
        return None
    if _ENGINE in os.environ:
        for name in ("prefect.flow_runs", "prefect.task_runs"):
            logging.getLogger(name).addFilter(_is_no_repetition)
    return pipeline_flow(declared(option, preset), preset)


def pipeline_flow(pipeline: Declared, preset: Preset) -> Flow[..., None]:
    """The flow of one pipeline; its version is the digest of the code that it runs."""
    overrides_field = Field(
        title="Overrides", description="what differs from the pipeline as declared, such as stages.dpo.method.beta=0.2"
    )
    any_code_field = Field(
        title="Any code", description="run although the code has changed since the pipeline was deployed"
    )

    def ended(flow: Flow[..., None], flow_run: FlowRun, state: State[None]) -> None:
        """Called once Prefect knows the end, in the process of the run or in the one that started it."""
        with contextlib.suppress(ConfigError):  # there is neither a store nor a block to notify
            cli_args = preset.cli_args(pipeline.option, flow_run.parameters.get("overrides") or [])
            found = load_pipeline(*split_cli_args(cli_args))
            for record in latest(found.store):
                if record.open_flow and record.open_flow.flow_run == str(flow_run.id):
                    record.reported(found.store, to_prefect=True)
            if state.is_cancelled() or state.is_cancelling() or state.is_crashed():
                with get_client(sync_client=True) as client:
                    now = client.read_flow_run(flow_run.id)  # the process that started the run knows its first name
                if state.is_crashed() or not now.state.is_final():  # else it was too late to stop it
                    notify_of(found, now.name, "crashed" if state.is_crashed() else "stopped", state.message or "")

    @flow(
        name=pipeline.name,
        version=deployed_code(pipeline.option, preset),
        description=f"The pipeline {pipeline.option}: what is finished is reused.",
        flow_run_name=_run_name,
        task_runner=task_runner(),
        persist_result=False,
        on_completion=[ended],
        on_failure=[ended],
        on_cancellation=[ended],
        on_crashed=[ended],
    )
    def run_pipeline(
        overrides: Annotated[list[str], overrides_field] = _NO_OVERRIDES,
        any_code: Annotated[bool, any_code_field] = False,
    ) -> State[None]:
        return _run_deployed(pipeline.option, preset, overrides, any_code=any_code)

    return run_pipeline


def _run_name() -> str:
    """The pipeline, when, and what differs from the declaration: ``cpt-sft-dpo 11-21 03:00 dpo.beta=0.2``."""
    overrides = runtime.flow_run.parameters.get("overrides") or []
    short_ones = [word.removeprefix("stages.").replace(".method.", ".", 1) for word in overrides]
    return " ".join([runtime.flow_run.flow_name, f"{datetime.now():%m-%d %H:%M}", *short_ones[:3]])


def _is_no_repetition(record: logging.LogRecord) -> bool:
    """Whether a log record is more than a traceback of an error that state and page report in one line."""
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, PipelineError) or type(error).__name__ == "FailedRun")


def _run_deployed(option: str, preset: Preset, overrides: Sequence[str], *, any_code: bool) -> State[None]:
    """Runs what is not finished of a pipeline; every exit of ours is a state with one paragraph."""
    _exit_with_parent()
    flow_run = flow_run_here()
    try:
        cli_args = preset.cli_args(option, overrides)
        pipeline = load_pipeline(*split_cli_args(cli_args))
    except ConfigError as error:
        return Failed(message=str(error))
    recorder = RunRecorder(pipeline.store, pipeline.name, list(map(redacted, cli_args)))
    try:
        if not any_code:
            planned, found = flow_run.deployment_version, deployed_code(option, preset)
            if planned and planned != found:
                raise ConfigError(
                    f"this run was planned with the code {planned}, and the code here is {found}; deploy the new code "
                    "(start `posttrain serve` again, or `prefect deploy --all`) and make a new run, "
                    "or give this one any_code=true"
                )
        create_store(pipeline.store)
        with recorder.open():
            enter_flow_run(recorder, is_ours=False)
            state = _run_in_turn(pipeline, recorder, may_leave=not overrides)
    except GateError as refusal:
        state = Failed(name="Refused", message=str(refusal))
    except Exception as error:  # foreseen or not: of the store, full or away; of Prefect's server
        cause = str(error) if isinstance(error, PipelineError) else f"{type(error).__name__}: {error}"
        if not isinstance(error, PipelineError):
            logger.exception("run=%s state=failed", flow_run.name)
        notify_of(pipeline, flow_run.name, "failed", cause)
        state = Failed(message=cause)
    leave_flow_run(recorder, state)
    return state


def _run_in_turn(pipeline: Pipeline, recorder: RunRecorder, *, may_leave: bool) -> State[None]:
    """Serialises deployed runs of a pipeline per store: the next makes its plan when the one before it is over.

    A lock, and no concurrency limit of Prefect's deployment: its client ends a run whose server is away, and a server
    that restarts forgets who has the slots.

    Args:
        may_leave: to a run with the same arguments that waits already.
    """
    runs, cli_args = pipeline.store / "runs", recorder.record.cli_args
    lock = Lock(runs / f"{pipeline.name}.turn")
    with contextlib.ExitStack() as stack:
        if not lock.try_acquire():
            alike = Lock(runs / f"{pipeline.name}.next-{short(digest_of({'words': shlex.join(cli_args)}))}")
            if may_leave and not alike.try_acquire():
                return Completed(message="left to another run with the same overrides, which waits already")
            waiting = f"another run of {pipeline.name}"
            get_run_logger().info(f"waits for {waiting}")
            recorder.change(lambda record: replace(record, waits_for=waiting))
            with alike.holding():
                acquire_or(lock, lambda: False, lambda: None)
            recorder.change(lambda record: replace(record, waits_for=""))
        stack.enter_context(lock.holding())
        adopt_view(pipeline)
        return _run(make_plan(pipeline), recorder)


def _run(plan: Plan, recorder: RunRecorder) -> State[None]:
    """Runs a plan.

    Raises:
        GateError: a gate, or a person, refused.
        PipelineError: the run failed; the caller reports it.
    """
    start, cli_args = time.perf_counter(), recorder.record.cli_args
    show_plan(plan)
    prepare_run(plan)
    outcome, is_approved = None, True
    if has_work(plan):
        try:
            is_approved = _execute(plan, recorder)
        except PipelineError as error:
            if follow_up(plan, cli_args, error) is None:
                raise
            return Failed(message=str(error))
        outcome = follow_up(plan, cli_args)
    show_declared(plan, cli_args)
    if not is_approved:
        return Cancelled(message="rejected")
    try:
        require_passed(plan)
    except GateError:
        if plan.pipeline.operation.retrain is None:
            raise
        kept = "nothing to do: the gate has refused this model before"
        return Completed(name="ChampionKept", message=outcome or kept)
    count, seconds = len(plan.stages), time.perf_counter() - start
    done = f"{len(plan.stale)} of {count} stages run in {seconds:.1f} s"
    return Completed(message=outcome or (done if plan.stale else f"nothing to do: all {count} stages are finished"))


def _execute(plan: Plan, recorder: RunRecorder) -> bool:
    """Runs what is stale; whether every approval that was asked for was given."""
    if plan.pipeline.operation.notify:
        require_block(plan.pipeline.operation.notify)
    cli_args = recorder.record.cli_args
    with RunPage(plan, recorder) as page, open_run(plan, cli_args, page.on, plan.stale, recorder=recorder) as run:
        run_stages(run, {})
        return approved(run)


def _exit_with_parent() -> None:
    """Stops this run when the server or worker that started it dies: nothing else could cancel it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the server, which forwards it as a cancellation
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_END_SECONDS)  # to end the stages and to report to Prefect, which may be gone too
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent").start()


def notify_of(pipeline: Pipeline, run: str, end: Literal["failed", "stopped", "crashed"], why: str) -> None:
    """Notifies whom the pipeline names of an end that its outcome does not report."""
    if pipeline.operation.notify:
        body = " ".join(f"{pipeline.name}: The run {run!r} {end}: {why}".split())
        notify(pipeline.operation.notify, f"{pipeline.name}: {end}", body)


def deployed_code(option: str, preset: Preset) -> str:
    """Digest of our packages and their YAML, the user's groups, and this pipeline's own methods and reward functions.

    A commit would not do: it says nothing of files that are not committed.
    """
    root, config_dir = CONF.parent, preset.config_dir
    files = {
        path.relative_to(root).as_posix(): path for package in _PACKAGES for path in (root / package).rglob("*.py")
    }
    files |= {path.relative_to(root).as_posix(): path for path in CONF.rglob("*.yaml")}
    if config_dir:
        files |= {f"--config-dir/{path.relative_to(config_dir)}": path for path in config_dir.rglob("*.yaml")}
    digests = {name: digest_file(path) for name, path in sorted(files.items())}
    for method in _methods(option, preset):
        target = method.get("_target_")
        if isinstance(target, str) and "." in target and target.partition(".")[0] not in _PACKAGES:
            module = target.rpartition(".")[0]
            digests[module] = code_digest(module)
        rewards = method.get("rewards")
        for reward in rewards.values() if isinstance(rewards, Mapping) else ():
            path = reward.get("function") if isinstance(reward, Mapping) else None
            if isinstance(path, str) and path.startswith(PYTHON):
                digests[path] = code_of(python_function(path))
    return short(digest_of(digests))


def _methods(option: str, preset: Preset) -> Iterator[Mapping[str, object]]:
    """The methods of a pipeline's stages, as declared; of a pipeline that cannot be composed, none."""
    with contextlib.suppress(ConfigError):
        for stage in Composer(*split_cli_args(preset.cli_args(option))).part("stages").values():
            method = stage.get("method") if isinstance(stage, Mapping) else None
            if isinstance(method, Mapping):
                yield method
