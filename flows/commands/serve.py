"""``posttrain serve``."""

import argparse
import contextlib
import os
import sys
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING

from flows.commands.arguments import add_allow_code, cli_args, count_of
from lineage.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

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
    from lineage.store import create_store

    if options.config_dir:
        options.config_dir = options.config_dir.absolute()
    preset = replace(Preset.of(cli_args(options)), allow_code=options.allow_code)
    if options.watch_only and configured_api_url() is None:
        raise ConfigError("--watch-only: whose deployments? set PREFECT_API_URL to the Prefect server that has them")
    # Logs of a run go to its page; the server's own log stays on this screen.
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "INFO")
    os.environ.setdefault("PREFECT_LOGGING_TO_API_ENABLED", "true")
    store = store_root([word for word in preset.overrides if word.startswith("store=")])
    pipelines = deployable(preset)
    deployed = {f"{each.name}/{options.name}": each.pipeline for each in pipelines if each.pipeline}
    with contextlib.ExitStack() as until_end:
        if not options.watch_only:
            stores = {each.name: each.pipeline.store if each.pipeline else store for each in pipelines}
            until_end.enter_context(only_server_of({f"{name}/{options.name}": stores[name] for name in stores}))
        if configured_api_url() is None:
            create_store(store)  # it has the server's log, and `status` finds it before the first run
        server = until_end.enter_context(embedded_server(store / "logs" / "prefect-server.log", ui=True))
        if server:
            server.wait_until_ready()
            print(
                f"Prefect: {server.url.removesuffix('/api')} (it ends with this command; its page asks for the "
                f"password in {server.profile})",
                flush=True,
            )
        _close_dead(list(deployed.values()))
        if options.watch_only:
            from flows.prefect.triggers import watch_until_stopped

            watch_until_stopped(deployed)
        else:
            _serve(preset, pipelines, deployed, options)
    return 0


@contextlib.contextmanager
def only_server_of(stores: "Mapping[str, Path]") -> "Iterator[None]":
    """Locks deployments: Prefect has one of a name, and another process that served it would take its runs.

    Servers that posttrain starts share the user's Prefect database. Of a server of the user's own, another machine's
    ``serve`` is not seen.

    Args:
        stores: deployment -> store of its runs.

    Raises:
        ConfigError: another process on this machine serves one of them.
    """
    from flows.prefect.address import configured_api_url, own_auth, prefect_home
    from lineage.filesystem.lock import Lock, owner

    url = configured_api_url() or ""
    database = "" if own_auth(url) else url.rstrip("/")
    with contextlib.ExitStack() as held:
        for name, store in stores.items():
            lock = Lock(prefect_home() / "posttrain-served" / sha256(f"{database} {name}".encode()).hexdigest()[:16])
            served = lock.directory / "served.txt"
            if not lock.try_acquire():
                found, where = owner(lock.directory), served.read_text() if served.exists() else "it is starting"
                raise ConfigError(
                    f"{name}: is already served by process {found.pid if found else 'unknown'} ({where}), which would "
                    "take its runs; stop that process, or serve other names: posttrain serve --name NAME"
                )
            held.enter_context(lock.holding())
            served.write_text(f"in {os.getcwd()}, store={store}")
        yield


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
