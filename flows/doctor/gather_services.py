"""Asks the services that a run would use."""

import os
import re
import socket
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from flows.doctor.facts import Service
from flows.prefect_address import own_auth
from flows.stages.cluster_room import ask_cluster
from flows.wording import counted
from lineage.errors import ConfigError
from lineage.mlflow.address import is_server, shown
from lineage.reach import basic, request

_SECONDS = 2.0  # a service that takes longer is none to rely on
_RAY_SECONDS = 60.0  # to join a cluster, which takes seconds
_ENV = re.compile(r"\$\{oc\.env:\s*([A-Za-z_]\w*)\s*\}")  # without a default


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
    headers, question = {}, f"{url.rstrip('/')}/admin/version"
    auth = own_auth(url) or settings.get("PREFECT_API_AUTH_STRING")
    if settings.get("PREFECT_API_KEY"):
        headers["Authorization"] = f"Bearer {settings['PREFECT_API_KEY']}"
    elif auth:
        headers["Authorization"] = basic(auth)
    found = _ask(url, "PREFECT_API_URL", question, headers)
    without = _ask(url, "PREFECT_API_URL", question, {}) if headers and found.status == 200 else found
    return replace(found, open_to_all=without.status == 200)


def mlflow_service(uri: str | None, stated: bool, environment: Mapping[str, str]) -> Service | None:
    """The server that is meant, if it is one; as ``prefect_service``."""
    if uri is None or not is_server(uri):
        return None
    headers = {}
    if environment.get("MLFLOW_TRACKING_TOKEN"):
        headers["Authorization"] = f"Bearer {environment['MLFLOW_TRACKING_TOKEN']}"
    elif environment.get("MLFLOW_TRACKING_USERNAME"):
        password = environment.get("MLFLOW_TRACKING_PASSWORD", "")
        headers["Authorization"] = basic(f"{environment['MLFLOW_TRACKING_USERNAME']}:{password}")
    question = f"{uri.rstrip('/')}/api/2.0/mlflow/experiments/get-by-name?experiment_name=Default"
    return _ask(uri, "tracking.uri" if stated else "MLFLOW_TRACKING_URI", question, headers)


def ray_service() -> Service | None:
    """The cluster at ``RAY_ADDRESS``, joined as a run would join it; a dead address is told without that."""
    address, setting = os.environ.get("RAY_ADDRESS", ""), "RAY_ADDRESS"
    if not address:
        return None
    place = urlsplit(address if "://" in address else f"ray://{address}")
    try:
        if place.hostname and place.port:  # "auto" has neither
            socket.create_connection((place.hostname, place.port), timeout=_SECONDS).close()
    except (OSError, ValueError) as error:
        return Service(url=address, setting=setting, trouble=str(error))
    try:
        cpus, gpus = ask_cluster(_RAY_SECONDS)
    except ConfigError as error:
        return Service(url=address, setting=setting, refusal=str(error).removeprefix(f"{setting}={address}: "))
    return Service(url=address, setting=setting, answer=f"{counted(round(cpus), 'CPU')}, {counted(round(gpus), 'GPU')}")


def absent_variables(texts: Iterable[tuple[str, str]], environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that YAML or overrides name and that are not set -> where they are named.

    Args:
        texts: each with where it stands.
    """
    return {name: where for where, text in texts for name in _ENV.findall(text) if not environment.get(name)}


def _ask(url: str, setting: str, question: str, headers: Mapping[str, str]) -> Service:
    try:
        asked = request(question)
        asked.headers.update(headers)
        with urllib.request.urlopen(asked, timeout=_SECONDS) as reply:
            return Service(url=shown(url), setting=setting, status=reply.status)
    except urllib.error.HTTPError as error:
        return Service(url=shown(url), setting=setting, status=error.code)
    except (OSError, ValueError) as error:
        return Service(url=shown(url), setting=setting, trouble=str(error))
