"""Tells whom ``notify`` names of the ends of deployed runs that their outcome does not tell of."""

import contextlib
from collections.abc import Callable
from typing import Literal

from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.states import State

from flows.declare.config import load_pipeline
from flows.declare.pipeline import Pipeline
from flows.declared import split_words
from flows.deploy.preset import Preset
from flows.promotion.notify import notify
from lineage.errors import ConfigError

Hook = Callable[[Flow[..., None], FlowRun, State[None]], None]


def tell(pipeline: Pipeline, run: str, end: Literal["failed", "stopped", "crashed"], why: str) -> None:
    """In the form of an outcome."""
    if pipeline.operation.notify:
        body = " ".join(f"{pipeline.name}: The run {run!r} {end}: {why}".split())
        notify(pipeline.operation.notify, f"{pipeline.name}: {end}", body)


def end_hook(option: str, preset: Preset) -> Hook:
    """What Prefect calls once when a run was cancelled or has crashed, in its process or in the one that started it."""

    def tell_of_end(flow: Flow[..., None], flow_run: FlowRun, state: State[None]) -> None:
        words = preset.words(option, flow_run.parameters.get("overrides") or [])
        with contextlib.suppress(ConfigError):  # nobody knows then whom to tell
            pipeline = load_pipeline(*split_words(words))
            with get_client(sync_client=True) as client:
                now = client.read_flow_run(flow_run.id)  # who started the run knows the name that it had before
            if state.is_crashed() or not now.state.is_final():  # else it was too late to stop it
                tell(pipeline, now.name, "crashed" if state.is_crashed() else "stopped", state.message or "")

    return tell_of_end
