"""Checks whether this machine can run a pipeline: each check yields findings, each with its remedy."""

import contextlib
import json
import os
import platform
import re
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.client import HTTPException
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

import psutil
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from flows.prefect.address import ask_prefect, authorization, is_loopback, prefect_settings, status_of
from lineage.errors import ConfigError, PipelineError
from lineage.filesystem.remote_files import request
from lineage.mlflow.address import is_server, schema_fault, shown, sqlite_file, tracking_uri
from lineage.record.environment import run_answering
from lineage.secrets import redacted
from lineage.store import Store
from posttrain import PACKAGES, ROOT

if TYPE_CHECKING:
    from flows.declare.pipeline import Pipeline

LOCK = Path(ROOT) / "requirements.lock"  # in a wheel too
_INSTALL = f"pip install --requirement {shlex.quote(str(LOCK))}"
_GIB = 2**30
_TIMEOUT_SECONDS = 10.0
_CLUSTER_SECONDS = 60.0  # joining a cluster takes seconds
_COMMAND_SECONDS = 120.0  # importing torch takes seconds
_VARIABLE = re.compile(r"\$\{oc\.env:\s*([A-Za-z_]\w*)\s*\}")  # without a default

# Older versions have published vulnerabilities.
FLOORS = {"prefect": "3.6.22", "mlflow": "3.10", "ray": "2.54", "transformers": "5.3"}
# Requirements that pip installs together although they conflict; the package that fixes them; reason; remedy.
KNOWN_BAD = (
    (("hqq",), "termcolor", "hqq imports termcolor without requiring it, and transformers imports hqq",
     "pip install termcolor, or pip uninstall hqq"),
    (("optuna>=3", "hydra-optuna-sweeper<1.4"), "", "the plugin works only with optuna 2",
     "pip uninstall hydra-optuna-sweeper: posttrain run --multirun needs no plugin"),
    (("gptqmodel", "torch<2.14"), "", "gptqmodel is built for torch 2.14 and later, and transformers imports it",
     "pip uninstall gptqmodel"),
)  # fmt: skip
# Patterns for the command lines of server processes; for Ray those that always run.
_SERVERS = {
    "prefect": re.compile(r"(^|[/ ])prefect server|flows\.prefect\.server|(^|[\[ ])prefect(\.\w+)+:\w"),
    "mlflow": re.compile(r"(^|[/ ])mlflow (server|ui)|(^|[\[ ])mlflow(\.\w+)+:\w"),
    "ray": re.compile(r"^(\S*/)?(raylet|gcs_server)( |$)"),
}
_GUARD = {
    "prefect": "set PREFECT_SERVER_API_AUTH_STRING where it starts and PREFECT_API_AUTH_STRING where it is used",
    "mlflow": "start it with --app-name basic-auth, or with --host 127.0.0.1",
    "ray": "set RAY_AUTH_MODE=token on every node and for every driver, and keep its ports inside a private network",
}
_TORCH = """
import json, os, sys, torch
cuda = torch.version.cuda
nccl = ".".join(map(str, torch.cuda.nccl.version())) if cuda and torch.distributed.is_nccl_available() else None
with os.fdopen(int(sys.argv[1]), "w") as answer:
    json.dump({"cuda": cuda, "seen": torch.cuda.device_count(), "nccl": nccl}, answer)
"""


@dataclass(frozen=True)
class Finding:
    """The result of a check; ``remedy`` is empty if the level is ``ok``."""

    check: str
    level: Literal["ok", "warn", "error"]
    found: str
    remedy: str = ""


def _judged(
    check: str, faults: Sequence[str], well: str, remedy: str, level: Literal["warn", "error"] = "error"
) -> Finding:
    """A finding with the faults and their remedy, or with level ``ok``."""
    some = "; ".join([*faults[:8], *([f"and {len(faults) - 8} more"] if len(faults) > 8 else [])])
    return Finding(check, level, some, remedy) if faults else Finding(check, "ok", well)


def diagnose(overrides: Sequence[str], config_dir: Path | None) -> Iterator[Finding]:
    """All findings; with an invalid configuration, only those on the machine and the environment."""
    from flows.declare.config import load_pipeline
    from flows.planning.plan import refusal_of

    pipeline, uri, refused = None, None, None
    try:
        pipeline = load_pipeline(overrides, config_dir)
        uri = tracking_uri(pipeline.tracking.uri) if pipeline.tracking.mlflow else None
    except ConfigError as error:
        refused = error
    yield from check_packages(*installed())
    yield check_names(sys.path)
    yield from check_store(pipeline.store if pipeline else Path.cwd(), pipeline.stages if pipeline else ())
    yield from check_limits()
    yield check_byte_code()
    yield check_gpus(stages_on_gpus(pipeline) if pipeline else ())
    yield from check_exposed(psutil.process_iter())
    yield from check_prefect(os.environ, pipeline)
    if not refused:
        setting = "tracking.uri" if pipeline and pipeline.tracking.uri else "MLFLOW_TRACKING_URI"
        yield check_mlflow(uri, setting, os.environ)
    yield check_ray(os.environ.get("RAY_ADDRESS", ""))
    yield from check_configuration(refused or (refusal_of(pipeline) if pipeline else None), overrides, config_dir)


def installed() -> tuple[dict[str, str], dict[str, list[str]], str]:
    """Versions, requirements and the lock file; posttrain's requirements come from the checkout, if there is one."""
    found: dict[str, metadata.Distribution] = {}
    for each in metadata.distributions():
        found.setdefault(canonicalize_name(each.metadata["Name"]), each)  # the first on the path, as for import
    requires = {name: each.requires or [] for name, each in found.items()}
    requires["posttrain"] = [each for each in requires["posttrain"] if "extra ==" not in each]
    requires["posttrain"].append(f"python{found['posttrain'].metadata['Requires-Python']}")
    with contextlib.suppress(OSError):
        project = tomllib.loads((Path(ROOT) / "pyproject.toml").read_text())["project"]
        requires["posttrain"] = [*project["dependencies"], f"python{project['requires-python']}"]
    versions = {name: each.version for name, each in found.items()} | {"python": platform.python_version()}
    return versions, requires, LOCK.read_text() if LOCK.exists() else ""


def check_names(path: Sequence[str]) -> Finding:
    """Names what has the name of one of our packages elsewhere on the path: our processes use ours."""
    places = [Path(each) for each in path if os.path.abspath(each) != ROOT]
    found = [
        each for place in places for name in PACKAGES for each in (place / f"{name}.py", place / name) if each.exists()
    ]
    remedy = "nothing for posttrain, which uses its own; a method or function of yours needs a module of another name"
    return _judged(
        "names", list(map(str, dict.fromkeys(found))), "no other lineage, tasks or flows is on the path", remedy, "warn"
    )


def check_packages(versions: Mapping[str, str], requires: Mapping[str, list[str]], lock: str) -> Iterator[Finding]:
    """Checks Python, requirements, the lock file, conflicting packages, and releases with published vulnerabilities."""
    needed = {package: list(requirements_here(texts)) for package, texts in requires.items()}
    names = {canonicalize_name(each.name) for each in needed["posttrain"]}
    broken: dict[str, list[str]] = {"python": [], "own": [], "others": []}
    for package, requirements in needed.items():
        is_own = package == "posttrain"
        for each in requirements:
            has = versions.get(canonicalize_name(each.name))
            if not is_own and (has is None or names.isdisjoint({package, canonicalize_name(each.name)} - {"python"})):
                continue  # of no use to us
            if not _holds(each, versions):
                kind = "python" if each.name == "python" else "own" if is_own else "others"
                text = f"{package} requires {each.name}{each.specifier}, {has or 'none'} is installed"
                broken[kind].append(f"{has}, and posttrain requires {each.specifier}" if kind == "python" else text)
    make = "create a virtual environment with such a Python: make PYTHON=/path/to/python3.11"
    yield _judged("python", broken["python"], versions["python"], make)
    if broken["own"] or not broken["others"]:
        yield _judged("packages", broken["own"], f"all {len(names) - 1} requirements are met", _INSTALL)
    if broken["others"]:
        remedy = "uninstall what you do not need, or use a separate environment for it"
        yield _judged("packages", broken["others"], "", remedy, "warn")
    locked = lock_versions(lock)
    wanted = {canonicalize_name(each.name) for requirements in needed.values() for each in requirements}
    other = [  # the lock also has tools of the tests, which may be absent
        f"{name} {versions.get(name, 'is absent')} (lock: {version})"
        for name, version in sorted(locked.items())
        if (Version(versions[name]).public != Version(version).public if name in versions else name in wanted)
    ]
    well = "all versions match" if locked else "no requirements.lock to compare with"
    yield _judged("lock", other, well, _INSTALL, "warn")
    bad = 0
    for together, cure, why, remedy in KNOWN_BAD:
        parts = list(map(Requirement, together))
        if cure not in versions and all(_holds(each, versions) for each in parts):
            bad += 1
            found = " and ".join(f"{each.name} {versions[each.name]}" for each in parts)
            yield Finding("known-bad", "error", f"{found}{f' without {cure}' if cure else ''}: {why}", remedy)
    if not bad:
        yield Finding("known-bad", "ok", "no packages that are known to break each other")
    floored = {name: versions[name] for name in FLOORS if name in versions}
    old = [
        f"a release with published holes: {name} {version} (>={FLOORS[name]})"
        for name, version in floored.items()
        if Version(version) < Version(FLOORS[name])
    ]
    yield _judged("security", old, ", ".join(map(" ".join, floored.items())), _INSTALL)


def lock_versions(text: str) -> dict[str, str]:
    """Name -> version in a file of ``uv pip compile``, without packages for other systems."""
    found = requirements_here(re.findall(r"^[A-Za-z0-9][^\s=]*==[^#\n]+", text, re.MULTILINE))
    return {canonicalize_name(each.name): next(iter(each.specifier)).version for each in found}


def requirements_here(texts: Iterable[str]) -> Iterator[Requirement]:
    """The valid requirements for this system, without extras."""
    for text in texts:
        with contextlib.suppress(InvalidRequirement):
            requirement = Requirement(text)
            if not requirement.marker or requirement.marker.evaluate({"extra": ""}):
                yield requirement


def _holds(requirement: Requirement, versions: Mapping[str, str]) -> bool:
    version = versions.get(canonicalize_name(requirement.name))
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def check_store(store: Path, stages: Iterable[str]) -> Iterator[Finding]:
    """Checks that the store is writable, has space for one more run, and supports hard links."""
    there = next(path for path in (store, *store.parents) if path.exists())
    linked = False
    try:
        with tempfile.TemporaryDirectory(dir=there, prefix=".posttrain-doctor-") as name:
            (Path(name) / "file").touch()
            with contextlib.suppress(OSError):
                os.link(f"{name}/file", f"{name}/link")
                linked = True
    except OSError as error:
        yield Finding("store", "error", f"{store} cannot be written: {error.strerror or error}",
                      "choose a directory that you may write: store=DIRECTORY")  # fmt: skip
        return
    free, last = shutil.disk_usage(there).free, sum(_last_output_bytes(store, stage) for stage in stages)
    space = f"{free / _GIB:,.1f} GiB free at {store}"
    used = f", and the last outputs of this pipeline take {last / _GIB:,.1f} GiB" if last else ""
    lacks = [space + used] if free < max(_GIB, last) else []
    remedy = "free space, or choose another disk: store=DIRECTORY"
    yield _judged("store", lacks, space, remedy, "error" if free < _GIB else "warn")
    if not linked:
        yield Finding("store", "warn", f"the file system of {store} has no hard links",
                      "use a local disk, or accept that its view and DVC's cache are copies")  # fmt: skip


def _last_output_bytes(store: Path, stage: str) -> int:
    outputs = [path for path in (Store(store).root / stage).glob("*/output") if path.is_dir()]
    newest = max(outputs, key=lambda path: path.stat().st_mtime, default=None)
    return sum(file.stat().st_size for file in newest.rglob("*") if file.is_file()) if newest else 0


def check_limits() -> Iterator[Finding]:
    """Checks the temporary directory, shared memory and open files, which Ray, NCCL and data loaders use."""
    tmp, shm = tempfile.gettempdir(), Path("/dev/shm")
    free, files = shutil.disk_usage(tmp).free, resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    shared = shutil.disk_usage(shm).total if shm.is_dir() else _GIB  # not every system has it
    limits = [
        ("tmp", free >= _GIB, f"{free / _GIB:,.1f} GiB free at {tmp}", "free space, or set TMPDIR to another disk"),
        ("shared memory", shared >= _GIB, f"/dev/shm holds {shared / _GIB:,.1f} GiB",
         "start the container with --shm-size=8g, or --ipc=host"),
        ("open files", files == resource.RLIM_INFINITY or files >= 4096, f"a process may open {files} files",
         "raise the hard limit to 65536: ulimit -Hn, or nofile in /etc/security/limits.conf"),
    ]  # fmt: skip
    for check, fits, found, remedy in limits:
        yield _judged(check, [] if fits else [found], found, remedy, "warn")


def check_byte_code(packages: Sequence[str] = ("torch", "transformers", "prefect")) -> Finding:
    """Checks that compiled modules are on disk or will be: else each process compiles thousands of them."""
    found = {name: spec for name in packages if (spec := find_spec(name)) and spec.cached}
    missing = [name for name, spec in found.items() if not Path(spec.cached or "").exists()]
    faults = [f"Python writes no byte code here, and there is none of {', '.join(missing)}: each process compiles it"]
    return _judged(
        "byte code", faults if missing and sys.dont_write_bytecode else [], "modules are compiled once",
        "unset PYTHONDONTWRITEBYTECODE, or run once: python -m compileall -q $(python -c 'import site; "
        "print(*site.getsitepackages())')", "warn",
    )  # fmt: skip


def stages_on_gpus(pipeline: "Pipeline") -> list[str]:
    """The stages that ask for GPUs of this machine."""
    return [
        name
        for name, stage in pipeline.stages.items()
        if stage.method.uses_gpu and stage.resources.gpus_per_worker
        and not (stage.resources.on_cluster and os.environ.get("RAY_ADDRESS"))
    ]  # fmt: skip


def check_gpus(asking: Sequence[str] = ()) -> Finding:
    """Checks that torch can use every GPU that the driver lists, and has NCCL for several.

    Args:
        asking: the stages that ask for GPUs of this machine.
    """
    if shutil.which("nvidia-smi") is None and not Path("/proc/driver/nvidia").exists():
        if asking:
            found = f"this machine has no NVIDIA GPU, and these stages ask for one: {', '.join(asking)}"
            return Finding("gpu", "error", found, "run on a machine with a GPU, or leave resources=gpu out")
        return Finding("gpu", "ok", "no NVIDIA GPU: stages run on the CPU")
    listed, driver_fault = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    rows = [line.rpartition(", ") for line in listed.splitlines() if ", " in line]
    if driver_fault or not rows:
        found = f"the NVIDIA driver lists no GPU: {driver_fault or listed.strip() or 'no output'}"
        return Finding("gpu", "error", found, "make `nvidia-smi` list the GPUs: reinstall the driver, restart the "
                       "machine after an update, start a container with --gpus all")  # fmt: skip
    counts = Counter(name for name, _, _ in rows)
    found = f"{', '.join(f'{count}x {name}' for name, count in counts.items())}, driver {rows[0][2]}"
    answer, torch_fault = _output(sys.executable, "-c", _TORCH, run=run_answering)  # imports torch, which takes seconds
    if torch_fault:
        return Finding("gpu", "error", f"{found}; torch fails: {torch_fault}", _INSTALL)
    torch = json.loads(answer)
    found += f", CUDA {torch['cuda']}, NCCL {torch['nccl']}"
    faults = [
        (torch["cuda"] is None, "torch was built without CUDA",
         "pip install torch from an index that has CUDA builds: see pytorch.org/get-started"),
        (torch["seen"] < len(rows), f"torch can use {torch['seen']} of {len(rows)}",
         f"install a driver that supports CUDA {torch['cuda']}, or check CUDA_VISIBLE_DEVICES"),
        (torch["nccl"] is None and len(rows) > 1, "torch was built without NCCL",
         "pip install torch's CUDA build, which brings NCCL; until then num_workers=1"),
    ]  # fmt: skip
    why, remedy = next(((why, remedy) for is_so, why, remedy in faults if is_so), ("", ""))
    return _judged("gpu", [f"{found}: {why}"] if why else [], found, remedy)


_run = partial(subprocess.run, capture_output=True, text=True, check=False)


def _output(*command: str, run: "Callable[..., subprocess.CompletedProcess[str]]" = _run) -> tuple[str, str]:
    """Output of a command, and the last two lines of it if the command failed."""
    try:
        done = run(command, timeout=_COMMAND_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        return "", str(error)
    lines = [line for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
    return done.stdout, "; ".join(lines[-2:] or [f"exit status {done.returncode}"]) if done.returncode else ""


def check_exposed(processes: Iterable[psutil.Process]) -> Iterator[Finding]:
    """Finds servers of this user without authentication, whose clients can run code or delete runs.

    Checks servers of Prefect, MLflow and Ray that listen beyond loopback; Prefect's on loopback too, where other users
    and web pages reach it.
    """
    ports: dict[tuple[str, str], set[int]] = defaultdict(set)
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it has ended, or is not accessible
            kind = server_kind(process.cmdline()) if process.uids().real == os.getuid() else None
            if kind and not _is_guarded(kind, process):
                for each in process.net_connections("tcp"):
                    if each.status == psutil.CONN_LISTEN and (kind == "prefect" or not is_loopback(each.laddr.ip)):
                        ports[kind, each.laddr.ip].add(each.laddr.port)
    for (kind, address), found in sorted(ports.items()):
        level: Literal["warn", "error"] = "warn" if kind == "ray" or is_loopback(address) else "error"
        listening = f"{kind} listens at {address}, port {', '.join(map(str, sorted(found)))}, without authentication"
        yield Finding("exposed", level, listening, _GUARD[kind])
    if not ports:
        yield Finding("exposed", "ok", "no server of yours is open to others")


def server_kind(command: Sequence[str]) -> str | None:
    """The kind of server that a command line runs; None: none."""
    return next((kind for kind, pattern in _SERVERS.items() if pattern.search(" ".join(command))), None)


def _is_guarded(kind: str, process: psutil.Process) -> bool:
    if kind == "mlflow":
        return any("mlflow.server.auth" in word or word == "basic-auth" for word in process.cmdline())
    if kind == "ray":
        return process.environ().get("RAY_AUTH_MODE") == "token"
    return bool(prefect_settings(process.environ()).get("PREFECT_SERVER_API_AUTH_STRING"))


def check_prefect(environment: Mapping[str, str], pipeline: "Pipeline | None" = None) -> Iterator[Finding]:
    """Checks that the configured API answers, accepts our credentials, requires some, and has what a pipeline names."""
    from flows.stages.resources import require_pools

    notify, pools = (pipeline.operation.notify, _pools(pipeline)) if pipeline else (None, {})
    url = prefect_settings(environment).get("PREFECT_API_URL")
    if not url:
        yield Finding("prefect", "ok", "none is set: an embedded server is started for each run")
        if notify:
            found = f"notify={notify}, and no PREFECT_API_URL: the block is looked up in your own Prefect database"
            yield Finding("prefect", "warn", found, "set PREFECT_API_URL to the server that holds the block")
        for pool, slots in pools.items():
            yield _accepted("pool", partial(require_pools, {pool: slots}), "")
        return
    named = f"PREFECT_API_URL={shown(url)}"
    yield _answer("prefect", named, ask_prefect(environment),
                  "set PREFECT_API_AUTH_STRING, or PREFECT_API_KEY for Prefect Cloud",
                  "start it (prefect server start), correct the URL, or unset it: one is embedded")  # fmt: skip
    if ask_prefect(environment, as_stranger=True) == HTTPStatus.OK:
        why = f"{named} asks for no password: every client can run code where its runs run"
        yield Finding("prefect", "warn", why, _GUARD["prefect"])
    if ask_prefect(environment) == HTTPStatus.OK:
        if notify:
            from flows.promotion.notify import require_block

            yield _accepted("notify", partial(require_block, notify), f"Prefect has the block {notify}")
        for pool, slots in pools.items():
            yield _accepted("pool", partial(require_pools, {pool: slots}), f"Prefect has the pool {pool}")


def _pools(pipeline: "Pipeline") -> dict[str, int]:
    """The GPU pools that its stages use, each with the most slots that one stage takes."""
    found: dict[str, int] = {}
    for stage in pipeline.stages.values():
        resources = stage.resources
        if resources.gpu_pool and stage.method.uses_gpu:
            slots = max(1, resources.num_workers * resources.gpus_per_worker)
            found[resources.gpu_pool] = max(slots, found.get(resources.gpu_pool, 0))
    return found


def _accepted(check: str, require: Callable[[], None], well: str) -> Finding:
    """What a check of a run found, with its remedy apart."""
    try:
        require()
    except ConfigError as error:
        found, _, remedy = str(error).rpartition("; ")
        return Finding(check, "error", found, remedy)
    except Exception as error:  # Prefect's client raises errors of several libraries
        return Finding(check, "error", f"Prefect does not say: {type(error).__name__}", "posttrain doctor again")
    return Finding(check, "ok", well)


def check_mlflow(uri: str | None, setting: str, environment: Mapping[str, str]) -> Finding:
    """Checks that the configured server answers and accepts our credentials, or the schema of the database."""
    if uri is None:
        return Finding("mlflow", "ok", "no record in MLflow")
    if not is_server(uri):
        return _check_schema(uri)
    user, password = environment.get("MLFLOW_TRACKING_USERNAME"), environment.get("MLFLOW_TRACKING_PASSWORD", "")
    header = authorization(environment.get("MLFLOW_TRACKING_TOKEN"), f"{user}:{password}" if user else None)
    reply = status_of(f"{uri.rstrip('/')}/api/2.0/mlflow/experiments/get-by-name?experiment_name=Default", header)
    older = _older_server(uri, header) if reply == HTTPStatus.OK else None
    if older:
        return Finding(
            "mlflow", "warn",
            f"{setting}={shown(uri)} runs MLflow {older}, and this machine has {metadata.version('mlflow')}: an "
            "upgrade of the server migrates its database",
            "stop the server and every run that writes to it, back its database up, then: mlflow db upgrade DATABASE",
        )  # fmt: skip
    return _answer("mlflow", f"{setting}={shown(uri)}", reply,
                   "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
                   "start it, correct the address, or turn the record off with tracking.mlflow=false")  # fmt: skip


def _check_schema(uri: str) -> Finding:
    """Compares the schema of an MLflow database with that of the installed MLflow."""
    from sqlalchemy.exc import SQLAlchemyError

    file, named = sqlite_file(uri), f"the database {shown(uri)}"
    if file and not file.exists():
        return Finding("mlflow", "ok", "no server is set, and no database is there yet")
    try:
        fault = schema_fault(uri)
    except (SQLAlchemyError, ImportError) as error:
        cause = redacted(str(error).partition("\n")[0])
        return Finding("mlflow", "error", f"{named} cannot be read: {cause}", "start it, or correct tracking.uri")
    if fault:
        return Finding("mlflow", "error", *fault)
    return Finding("mlflow", "ok", f"{named} has the schema of MLflow {metadata.version('mlflow')}")


def _older_server(uri: str, header: str) -> str | None:
    """The version of an MLflow server whose minor release is older than the installed one; None: it is not."""
    asked = request(f"{uri.rstrip('/')}/version")
    if header:
        asked.add_header("Authorization", header)
    with contextlib.suppress(OSError, ValueError, HTTPException, InvalidVersion):
        with urllib.request.urlopen(asked, timeout=_TIMEOUT_SECONDS) as reply:
            found = Version(reply.read(64).decode().strip())
        if found.release[:2] < Version(metadata.version("mlflow")).release[:2]:
            return str(found)
    return None


def check_ray(address: str) -> Finding:
    """Checks that the configured cluster answers and can be joined."""
    from flows.stages.resources import ask_cluster

    if not address:
        return Finding("ray", "ok", "none is set: a cluster is started for each stage that needs one")
    named, remedy = f"RAY_ADDRESS={address}", "start it, correct the address, or unset it for a cluster of our own"
    try:
        place = urlsplit(address if "://" in address else f"ray://{address}")
        if place.hostname and place.port:  # "auto" has neither
            socket.create_connection((place.hostname, place.port), timeout=_TIMEOUT_SECONDS).close()
        cluster = ask_cluster(_CLUSTER_SECONDS)
    except (OSError, ValueError) as error:
        return _answer("ray", named, str(error), "", remedy)
    except ConfigError as error:
        cause, _, own = str(error).removeprefix(f"{named}: ").rpartition("; ")
        return Finding("ray", "error", f"{named}: {cause or own}", own if cause else remedy)
    return Finding("ray", "ok", f"{named} answers: {cluster}")


def _answer(check: str, named: str, reply: int | str, admit: str, start: str) -> Finding:
    if isinstance(reply, str):
        return Finding(check, "error", f"{named}: nothing answers ({reply})", start)
    if reply in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return Finding(check, "error", f"{named}: does not let you in (HTTP {reply})", admit)
    return Finding(check, "ok", f"{named} answers")


def check_configuration(
    refused: PipelineError | None, overrides: Sequence[str], config_dir: Path | None
) -> Iterator[Finding]:
    """Checks that a run would accept the configuration, and that its environment variables are set."""
    from omegaconf.errors import InterpolationResolutionError

    from flows.declare.config import composed_files

    absent = {}
    # Other errors may mean that a file is not YAML.
    if refused and isinstance(refused.__cause__, InterpolationResolutionError):
        files = ((str(path), path.read_text()) for path, _ in composed_files(overrides, config_dir))
        texts = [*(("an override", word) for word in overrides), *files]
        names = {name: where for where, text in texts for name in _VARIABLE.findall(text)}
        absent = {name: where for name, where in names.items() if not os.environ.get(name)}
    for name, where in absent.items():
        found = f"{where} names the variable {name}, which is not set"
        yield Finding("credentials", "error", found, f"export {name}=...")
    if refused and not absent:
        yield Finding("configuration", "error", str(refused), "correct it as the message says")
    if not refused:
        yield Finding("configuration", "ok", "every key and value is accepted")
        yield Finding("credentials", "ok", "every variable that the configuration names is set")
