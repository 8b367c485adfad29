"""Looks for servers of this user that others can reach, and asks the services that a run would use."""

import base64
import ipaddress
import os
import re
import socket
import tomllib
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import psutil

from flows.doctor.facts import Server, Service
from lineage.mlflow.address import is_server, shown

_SECONDS = 2.0  # a service that takes longer is none to rely on
_ENV = re.compile(r"\$\{oc\.env:\s*([A-Za-z_]\w*)\s*\}")  # without a default
_VALUED = ("-W", "-X")  # options of Python that take the next word
_APPLICATION = re.compile(r"\[?(prefect|mlflow)(\.\w+)*:\w")  # what a server of applications is told to serve
_RAY_PROGRAM = re.compile(r"(ray|raylet|gcs_server)$|ray(::|\.)")
_RAY_SCRIPT = "-packages/ray/"

Kind = Literal["prefect", "mlflow", "ray"]


def exposed_servers() -> list[Server]:
    """Of this user, beyond loopback."""
    ports: dict[tuple[Kind, str, bool], set[int]] = defaultdict(set)
    for process in psutil.process_iter():
        try:
            if process.uids().real != os.getuid():
                continue
            words = process.cmdline()
            kind = kind_of(words)
            if kind is None:
                continue
            for each in process.net_connections(kind="tcp"):
                if each.status == psutil.CONN_LISTEN and not is_loopback(each.laddr.ip):
                    ports[kind, each.laddr.ip, is_guarded(kind, words, process.environ())].add(each.laddr.port)
        except psutil.Error:  # it ended meanwhile, or is not ours to look at
            continue
    return [
        Server(kind=kind, address=address, ports=sorted(found), guarded=guarded)
        for (kind, address, guarded), found in sorted(ports.items())
    ]


def kind_of(words: Sequence[str]) -> Kind | None:
    """Whose server a command line is, if any's: by what it runs, not by what else it names."""
    path = _program(words)
    program = path.rpartition("/")[2]
    served = next((found[1] for found in map(_APPLICATION.match, words) if found), program.partition(".")[0])
    if served == "prefect" or program == "flows.prefect_server":
        return "prefect"
    if served == "mlflow":
        return "mlflow"
    return "ray" if _RAY_PROGRAM.match(program) or _RAY_SCRIPT in path else None


def _program(words: Sequence[str]) -> str:
    """The path of a program or a script, or the name of the module that Python runs."""
    rest = iter(words)
    first = next(rest, "")
    if not first.rpartition("/")[2].startswith("python"):
        return first
    for word in rest:
        if word == "-m":
            return next(rest, "")
        if word in _VALUED:
            next(rest, None)
        elif not word.startswith("-"):
            return word
    return first


def is_loopback(address: str) -> bool:
    """Also of an IPv4 address in the clothes of IPv6."""
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def is_guarded(kind: Kind, words: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether a server asks for credentials, by its command line and its environment."""
    if kind == "prefect":
        return bool(prefect_settings(environment).get("PREFECT_SERVER_API_AUTH_STRING"))
    if kind == "mlflow":
        return any("mlflow.server.auth" in word or word == "basic-auth" for word in words)
    return environment.get("RAY_AUTH_MODE") == "token"


def prefect_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Of the active profile, and above it of the environment; without prefect, whose import takes seconds."""
    home = Path(environment.get("PREFECT_HOME", "~/.prefect")).expanduser()
    try:
        profiles = tomllib.loads((home / "profiles.toml").read_text())
        active = profiles["profiles"][environment.get("PREFECT_PROFILE") or profiles["active"]]
    except (OSError, KeyError, ValueError):
        active = {}
    return {**{name: str(value) for name, value in active.items()}, **environment}


def prefect_service(environment: Mapping[str, str]) -> Service | None:
    """The API that is named, and whether it takes what credentials there are."""
    settings = prefect_settings(environment)
    url = settings.get("PREFECT_API_URL")
    if not url:
        return None
    headers = {}
    if settings.get("PREFECT_API_KEY"):
        headers["Authorization"] = f"Bearer {settings['PREFECT_API_KEY']}"
    elif settings.get("PREFECT_API_AUTH_STRING"):
        headers["Authorization"] = _basic(settings["PREFECT_API_AUTH_STRING"])
    return _ask(url, "PREFECT_API_URL", f"{url.rstrip('/')}/admin/version", headers)


def mlflow_service(uri: str | None, stated: bool, environment: Mapping[str, str]) -> Service | None:
    """The server that is meant, if it is one; as ``prefect_service``."""
    if uri is None or not is_server(uri):
        return None
    headers = {}
    if environment.get("MLFLOW_TRACKING_TOKEN"):
        headers["Authorization"] = f"Bearer {environment['MLFLOW_TRACKING_TOKEN']}"
    elif environment.get("MLFLOW_TRACKING_USERNAME"):
        password = environment.get("MLFLOW_TRACKING_PASSWORD", "")
        headers["Authorization"] = _basic(f"{environment['MLFLOW_TRACKING_USERNAME']}:{password}")
    question = f"{uri.rstrip('/')}/api/2.0/mlflow/experiments/get-by-name?experiment_name=Default"
    return _ask(uri, "tracking.uri" if stated else "MLFLOW_TRACKING_URI", question, headers)


def ray_service(environment: Mapping[str, str]) -> Service | None:
    """The cluster that is named, if it is by an address."""
    address = environment.get("RAY_ADDRESS", "")
    place = urlsplit(address if "://" in address else f"ray://{address}")
    try:
        host, port = place.hostname, place.port
    except ValueError as error:
        return Service(url=address, setting="RAY_ADDRESS", trouble=str(error))
    if not host or not port:
        return None
    try:
        socket.create_connection((host, port), timeout=_SECONDS).close()
    except OSError as error:
        return Service(url=address, setting="RAY_ADDRESS", trouble=str(error))
    return Service(url=address, setting="RAY_ADDRESS")


def absent_variables(texts: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that YAML or overrides name and that are not set -> where they are named."""
    return {name: where for where, text in texts.items() for name in _ENV.findall(text) if not environment.get(name)}


def _ask(url: str, setting: str, question: str, headers: Mapping[str, str]) -> Service:
    try:
        with urllib.request.urlopen(urllib.request.Request(question, headers=dict(headers)), timeout=_SECONDS) as reply:
            return Service(url=shown(url), setting=setting, status=reply.status)
    except urllib.error.HTTPError as error:
        return Service(url=shown(url), setting=setting, status=error.code)
    except (OSError, ValueError) as error:
        return Service(url=shown(url), setting=setting, trouble=str(error))


def _basic(pair: str) -> str:
    return "Basic " + base64.b64encode(pair.encode()).decode()
