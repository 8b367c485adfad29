"""``posttrain steps`` and ``replay``: serve sessions, make keys, commit a session as a stage, execute it again."""

import argparse
import importlib.util
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from flows.commands.arguments import add_overrides, count_of
from lineage.errors import ConfigError
from lineage.filesystem.files import local_path
from lineage.filesystem.lock import Lock

if TYPE_CHECKING:
    from collections.abc import Callable

    from flows.steps.engine import Engine
    from tasks.context import Resources
    from tasks.recipe import Input

_PORT = 8765
_NEEDED = ("fastapi", "uvicorn", "sqlalchemy", "httpx")
KEY_FILE = "key"


def add_steps(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    serve = actions.add_parser("serve", help="serve sessions over REST and MCP", allow_abbrev=False)
    serve.add_argument("--host", default="127.0.0.1", help="default 127.0.0.1: this machine alone")
    serve.add_argument("--port", type=int, default=_PORT, help=f"default {_PORT}; 0: a free one")
    serve.add_argument("--database", metavar="URL", help="of keys, calls and audit; default: SQLite in the root")
    serve.add_argument("--lease-minutes", type=float, default=30.0, help="an idle session then leaves the memory")
    serve.add_argument("--max-sessions", type=count_of("sessions", 1), default=8, help="in memory at once; default 8")
    serve.add_argument("--max-workers", type=count_of("workers", 1), default=8, help="of a session; default 8")
    serve.add_argument("--gpu", action="store_true", help="train on the GPU")
    serve.set_defaults(command=run_serve)
    key = actions.add_parser("key", help="make a key for a client", allow_abbrev=False)
    key.add_argument("name", metavar="NAME", help="who gets it; the audit names it")
    key.add_argument("--database", metavar="URL", help="as of serve")
    key.add_argument("--max-sessions", type=count_of("sessions", 1), help="open sessions at once")
    key.add_argument("--max-tokens", type=count_of("tokens", 1), help="tokens in all")
    key.set_defaults(command=run_key)
    commit = actions.add_parser("commit", help="write a session's model as a stage of the store", allow_abbrev=False)
    commit.add_argument("session", metavar="SESSION", help="as GET /v1/sessions names it")
    commit.add_argument("--stage", required=True, metavar="NAME", help="of the artifact: STAGE@DIGITS is its REF")
    commit.add_argument("--pipeline", default="steps", metavar="NAME", help="that it is recorded under; default steps")
    commit.add_argument("--database", metavar="URL", help="as of serve")
    commit.add_argument("--gpu", action="store_true", help="as of serve")
    commit.set_defaults(command=run_commit)
    for each in (serve, key, commit):
        each.add_argument(
            "--root", type=local_path, default=Path("steps"), help="folder of the sessions; default steps"
        )
        add_overrides(each)


def run_key(options: argparse.Namespace) -> int:
    from flows.steps.records import Records

    records = Records(options.root, options.database)
    print(records.add_key(options.name, options.max_sessions, options.max_tokens))
    records.close()
    return 0


def run_commit(options: argparse.Namespace) -> int:
    from flows.declare.store_root import store_root
    from flows.serving.model import find_model
    from flows.steps.commit import commit
    from flows.steps.engine import Engine

    engine = Engine(options.root, finder(options), database=options.database, resources=_resources(gpu=options.gpu))
    output = commit(
        engine, store_root(options.overrides, options.config_dir), options.session, options.stage,
        lambda ref: find_model(ref, options.overrides, options.config_dir), options.pipeline,
    )  # fmt: skip
    engine.records.close()
    print(output)
    return 0


def add_replay(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ref", metavar="REF", help="a stage that posttrain steps commit wrote")


def run_replay(options: argparse.Namespace) -> int:
    from flows.declare.store_root import asked_store
    from flows.reports.wording import counted
    from flows.steps.commit import as_dict, replay

    found = replay(options.ref, asked_store(options.overrides, options.config_dir), options.config_dir)
    if options.json:
        print(json.dumps(as_dict(found), indent=2))
    elif found.differ:
        print(f"{found.ref}: {found.calls} calls were executed again, and gave other bits: {', '.join(found.differ)}")
    else:
        print(
            f"{found.ref}: {found.calls} calls gave the same weights to the bit, in {counted(found.files, 'file')} "
            f"({found.seconds:.1f} s)"
        )
    return int(bool(found.differ))


def run_serve(options: argparse.Namespace) -> int:
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"steps serve: {', '.join(missing)} is not installed; run: pip install 'posttrain[steps]'")
    from flows.serving.serve_model import bound_socket, serve_app

    lock = Lock(options.root)
    if not lock.try_acquire():
        raise ConfigError(f"--root {options.root}: another server uses it; end that one, or name another folder")
    with lock.holding(), bound_socket(options.host, options.port) as bound:
        from flows.steps.engine import Engine, Limits
        from flows.steps.server import app_of
        from flows.steps.tinker import routes

        limits = Limits(
            lease_minutes=options.lease_minutes, max_live=options.max_sessions, max_workers=options.max_workers
        )
        engine = Engine(
            options.root, finder(options), database=options.database, resources=_resources(gpu=options.gpu),
            limits=limits,
        )  # fmt: skip
        url = f"http://{options.host}:{bound.getsockname()[1]}"
        key = _first_key(options, engine.records.has_keys(), engine)

        shown = f"serving steps at {url} (REST {url}/docs, MCP {url}/mcp); {key}; Ctrl-C ends"
        # Without ``end`` the server would wait for the calls that its clients wait for.
        serve_app(app_of(engine, url=url, more=[routes(engine)]), bound, shown, on_exit=engine.end)
    return 0


def _first_key(options: argparse.Namespace, has_keys: bool, engine: "Engine") -> str:
    file = options.root / KEY_FILE
    if not has_keys:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as opened:
            opened.write(engine.records.add_key("owner"))
    return f"a key is in {file}" if file.exists() else "keys: posttrain steps key NAME"


def finder(options: argparse.Namespace) -> "Callable[[str], Input]":
    """Finds the model that a session names, as a REF of the store or a directory."""
    from flows.serving.model import find_model

    return lambda ref: find_model(ref, options.overrides, options.config_dir).input


def _resources(*, gpu: bool) -> "Resources":
    from tasks.context import Resources

    return Resources(gpus_per_worker=int(gpu))
