"""``posttrain serve``."""

import argparse
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from flows.commands.arguments import add_allow_code, add_overrides, stated_words
from lineage.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flows.declare.pipeline import Pipeline
    from flows.deploy.pipelines import Declared
    from flows.deploy.preset import Preset


def add_serve(parser: argparse.ArgumentParser) -> None:
    add_overrides(parser)
    add_allow_code(parser)
    parser.add_argument("--name", default="local", help="of each deployment, as in cpt-sft-dpo/local")
    parser.add_argument("--limit", type=_count, help="runs under way at once, over all deployments (default: no limit)")
    parser.add_argument(
        "--watch-only", action="store_true", help="only watch the triggers of deployments that others serve"
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number of runs; 1 and more are accepted")
    return int(text)


def run_serve(options: argparse.Namespace) -> int:
    from flows.declare.store_root import store_root
    from flows.deploy.pipelines import deployable
    from flows.deploy.preset import Preset
    from flows.prefect_address import configured_api_url
    from flows.prefect_server import embedded_server

    if options.config_dir:
        options.config_dir = options.config_dir.absolute()
    preset = replace(Preset.of(stated_words(options)), allow_code=options.allow_code)
    if options.watch_only and configured_api_url() is None:
        raise ConfigError("--watch-only: whose deployments? set PREFECT_API_URL to the Prefect server that has them")
    # What is said of a run belongs on its page; the server's own log stays on this screen.
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
        _close_dead(pipelines, options.name)
        if options.watch_only:
            from flows.watch.watching import watch_until_stopped

            watch_until_stopped(deployed)
        else:
            _serve(preset, pipelines, deployed, options)
    return 0


def _close_dead(pipelines: "Sequence[Declared]", name: str) -> None:
    """Of the runs that died unheard: one that never ends would hold up every trigger."""
    from flows.deploy.owner import close_dead_runs

    for run in close_dead_runs({f"{each.name}/{name}": each.pipeline for each in pipelines}):
        print(f"{run}: its process died unheard; marked as crashed", file=sys.stderr)


def _serve(
    preset: "Preset", pipelines: "Sequence[Declared]", deployed: "Mapping[str, Pipeline]", options: argparse.Namespace
) -> None:
    from flows.deploy.keys import override_pattern
    from flows.deploy.serve import deployment_of, register, serve
    from flows.prefect_address import prefix_of_command
    from flows.watch.watching import watching

    os.environ.update(preset.environment)  # for the processes of the runs
    pattern = override_pattern(preset)
    runner = register([deployment_of(each, preset, pattern, options.name) for each in pipelines], options.limit)
    for each in pipelines:
        alone = f"  does not stand without overrides: {each.problem}" if each.problem else ""
        print(f"{each.name}/{options.name}{alone}", flush=True)
    api = os.environ.get("PREFECT_API_URL")
    where = prefix_of_command(api) if api else ""
    stands = next((each for each in pipelines if each.pipeline), pipelines[0])
    example = f"{stands.name}/{options.name}"
    print(f"run one: {where}prefect deployment run {example} -p overrides='[\"KEY=VALUE\"]'", flush=True)
    with watching(deployed):
        serve(runner)
