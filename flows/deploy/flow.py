"""The flow of a deployed pipeline."""

import logging
import os
import sys
from datetime import datetime
from typing import Annotated

from prefect import Flow, flow, runtime
from prefect.states import State
from pydantic import Field
from pydantic.config import JsonDict

from flows.deploy.code import deployed_code
from flows.deploy.deployed_run import run_deployed
from flows.deploy.keys import override_pattern
from flows.deploy.pipelines import Declared, declared
from flows.deploy.preset import Preset
from flows.deploy.telling import end_hook
from flows.prefect_ends import await_prefect
from flows.prefect_flow import task_runner
from lineage.errors import PipelineError

_ENGINE = "PREFECT__FLOW_RUN_ID"  # what Prefect sets in the process of a run
_NO_OVERRIDES: list[str] = []


def pipeline_flow(pipeline: Declared, preset: Preset, pattern: str | None = None) -> Flow[..., None]:
    """The flow of one pipeline; its version is the digest of the code that it runs.

    Args:
        pattern: of the overrides that Prefect takes, for a flow that is registered.
    """
    items: JsonDict = {"type": "string", **({"pattern": pattern} if pattern else {})}
    overrides_field = Field(
        title="Overrides",
        description="what differs from the pipeline as declared, such as stages.dpo.method.beta=0.2",
        json_schema_extra={"items": items},
    )
    any_code_field = Field(
        title="Any code", description="run although the code has changed since the pipeline was deployed"
    )

    tell_of_end = end_hook(pipeline.option, preset)

    @flow(
        name=pipeline.name,
        version=deployed_code(pipeline.option, preset),
        description=f"The pipeline {pipeline.option}: what is finished is reused.",
        flow_run_name=_run_name,
        task_runner=task_runner(),
        persist_result=False,
        on_cancellation=[tell_of_end],
        on_crashed=[tell_of_end],
    )
    def run_pipeline(
        overrides: Annotated[list[str], overrides_field] = _NO_OVERRIDES,
        any_code: Annotated[bool, any_code_field] = False,
    ) -> State[None]:
        state = run_deployed(pipeline.option, preset, overrides, any_code=any_code)
        await_prefect()  # which is to hear of it
        return state

    return run_pipeline


def flow_of(option: str) -> Flow[..., None] | None:
    """The flow of the pipeline in ``pipeline/<option>.yaml``, for a process of Prefect's; None: no such file."""
    if os.getcwd() not in sys.path:  # where a method of the user's own may lie; its code is part of the digest
        sys.path.append(os.getcwd())
    preset = Preset.of_environment()
    if option not in preset.files():
        return None
    if _ENGINE in os.environ:  # of a run; its overrides have passed the pattern
        for name in ("prefect.flow_runs", "prefect.task_runs"):
            logging.getLogger(name).addFilter(_is_no_echo)
        return pipeline_flow(declared(option, preset), preset)
    return pipeline_flow(declared(option, preset), preset, override_pattern(preset))


def _run_name() -> str:
    """The pipeline, when, and what differs from the declaration: ``cpt-sft-dpo 11-21 03:00 dpo.beta=0.2``."""
    overrides = runtime.flow_run.parameters.get("overrides") or []
    short = [word.removeprefix("stages.").replace(".method.", ".", 1) for word in overrides]
    return " ".join([runtime.flow_run.flow_name, f"{datetime.now():%m-%d %H:%M}", *short[:3]])


def _is_no_echo(record: logging.LogRecord) -> bool:
    """Whether a log record says more than the state and the lines of the page, which tell of our errors in one line."""
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, PipelineError) or type(error).__name__ == "FailedRun")
