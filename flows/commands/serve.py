"""``posttrain serve``."""

import argparse
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from flows.commands.arguments import add_allow_code, cli_args, count_of
from lineage.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flows.declare.pipeline import Pipeline
    from flows.prefect.deployments import Declared, Preset


def add_serve(parser: argparse.ArgumentParser) -> None:
    add_allow_code(parser)
    parser.add_argument("--name", default="local", help="of each deployment, as in cpt-sft-dpo/local")
    parser.add_argument(
        "--limit", type=count_of("runs", 1), help="concurrent runs over all deployments (default: no limit)"
    )
    parser.add_argument(
        "--watch-only", action="store_true", help="only watch the triggers of deployments that another process serves"
    )


def run_serve(options: argparse.Namespace) -> int:
    from flows.declare.store_root import store_root
    from flows.prefect.address import configured_api_url
    from flows.prefect.deployments import Preset, deployable
    from flows.prefect.server import embedded_server

    if options.config_dir:
        options.config_dir = options.config_dir.absolute()
    preset = replace(Preset.of(cli_args(options)), allow_code=options.allow_code)
    if options.watch_only and configured_api_url() is None:
        raise ConfigError("--watch-only: whose deployments? set PREFECT_API_URL to the Prefect server that has them")
    # Logs of a run go to its page; the server's own log stays on this screen.
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "INFO")
    os.environ.setdefault("PREFECT_LOGGING_TO_API_ENABLED", "true")
    log = store_root([word for word in preset.overrides if word.startswith("store=")]) / "logs" / "prefect-server.log"
    with embedded_server(log, ui=True) as server:
        if server:
            server.wait_until_ready()
            print(
                f"Prefect: {server.url.removesuffix('/api')} (it ends with this command; its page asks for the "
                f"password in {server.profile})",
                flush=True,
            )
        pipelines = deployable(preset)
        deployed = {f"{each.name}/{options.name}": each.pipeline for each in pipelines if each.pipeline}
        _close_dead(list(deployed.values()))
        if options.watch_only:
            from flows.prefect.triggers import watch_until_stopped

            watch_until_stopped(deployed)
        else:
            _serve(preset, pipelines, deployed, options)
    return 0


def _close_dead(pipelines: "Sequence[Pipeline]") -> None:
    """Closes runs whose process has died: a run that never ends would block its triggers."""
    from flows.prefect.deployed import notify_of
    from flows.prefect.open_runs import settle_left

    for store in {each.store for each in pipelines}:
        for left in settle_left(store):
            flow = left.open_flow
            assert flow is not None
            print(f"flow run {flow.flow_run}: {flow.end.lower()}: {flow.message}", file=sys.stderr)
            crashed = left.pipeline if left.links.deployed and flow.end == "CRASHED" else None
            for each in pipelines:
                if (each.store, each.name) == (store, crashed):
                    notify_of(each, flow.flow_run, "crashed", flow.message)


def _refused(pipeline: "Pipeline | None") -> str:
    """Why the runs of a pipeline that starts by itself would fail; empty: they would not, or a person starts them."""
    from flows.planning.plan import refusal_of

    if pipeline is None or not (pipeline.operation.schedule or pipeline.operation.trigger):
        return ""
    refused = refusal_of(pipeline)
    return f"  its runs will fail: the plan refuses it: {refused}" if refused else ""


def _serve(
    preset: "Preset", pipelines: "Sequence[Declared]", deployed: "Mapping[str, Pipeline]", options: argparse.Namespace
) -> None:
    from flows.prefect.address import prefix_of_command
    from flows.prefect.deployed import register, serve
    from flows.prefect.triggers import watching

    os.environ.update(preset.environment)  # for the processes of the runs
    runner = register(pipelines, preset, options.name, options.limit)
    for each in pipelines:
        problem = f"  needs overrides: {each.problem}" if each.problem else _refused(each.pipeline)
        print(f"{each.name}/{options.name}{problem}", flush=True)
    api = os.environ.get("PREFECT_API_URL")
    where = prefix_of_command(api) if api else ""
    example = next((each for each in pipelines if each.pipeline), pipelines[0])
    command = f"{where}prefect deployment run {example.name}/{options.name}"
    print(f"run one: {command} -p overrides='[\"KEY=VALUE\"]'", flush=True)
    with watching(deployed):
        serve(runner)
