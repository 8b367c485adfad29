"""The address of the user's Prefect, found if possible without importing prefect, which takes seconds."""

import contextlib
import ipaddress
import os
import shlex
import tomllib
import urllib.error
import urllib.request
from collections.abc import Mapping
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from lineage.errors import ConfigError
from lineage.filesystem.remote_files import basic, request
from lineage.secrets import redacted

_REACH_SECONDS = 10.0  # for busy machines
_PROFILE = "posttrain"  # unless PREFECT_PROFILE asks for another


def configured_api_url() -> str | None:
    """The Prefect API that the user has set, by a variable or a profile."""
    return prefect_settings(os.environ).get("PREFECT_API_URL") or None


def prefect_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Prefect's settings: the environment over the active profile."""
    home = Path(environment.get("PREFECT_HOME", "~/.prefect")).expanduser()
    active: Mapping[str, object] = {}
    with contextlib.suppress(OSError, KeyError, ValueError):
        profiles = tomllib.loads(Path(environment.get("PREFECT_PROFILES_PATH") or home / "profiles.toml").read_text())
        active = profiles["profiles"][environment.get("PREFECT_PROFILE") or profiles["active"]]
    return {name: str(value) for name, value in {**active, **environment}.items()}


def is_loopback(host: str) -> bool:
    """Whether a host is this machine alone, also as an IPv4-mapped IPv6 address."""
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:  # a name
        return host == "localhost"
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback


def require_usable(url: str) -> None:
    """Requires that a Prefect server answers and accepts our credentials, before its client fails with an HTTP error.

    Raises:
        ConfigError: it does not.
    """
    reply = ask_prefect(os.environ)
    if isinstance(reply, str):
        raise ConfigError(
            f"PREFECT_API_URL={url}: no Prefect server answers there ({reply}); start it, correct the URL, "
            "or unset it for an embedded server"
        )
    if reply == HTTPStatus.UNAUTHORIZED:
        raise ConfigError(
            f"PREFECT_API_URL={redacted(url)} does not let you in (HTTP 401); set PREFECT_API_AUTH_STRING, "
            "or PREFECT_API_KEY for Prefect Cloud"
        )


def ask_prefect(environment: Mapping[str, str], *, as_stranger: bool = False) -> int | str:
    """Reply of the configured API to our credentials, or to none: an HTTP status, or an error text."""
    settings = prefect_settings(environment)
    url = settings.get("PREFECT_API_URL", "")
    password = own_auth(url) or settings.get("PREFECT_API_AUTH_STRING")
    header = "" if as_stranger else authorization(settings.get("PREFECT_API_KEY"), password)
    return status_of(f"{url.rstrip('/')}/admin/version", header)


def authorization(token: str | None, password: str | None) -> str:
    """The header for a token, else for ``USER:PASSWORD``; empty for neither."""
    return f"Bearer {token}" if token else basic(password) if password else ""


def status_of(url: str, header: str) -> int | str:
    """The HTTP status of an answer to these credentials, or an error text."""
    try:
        asked = request(url)
        if header:
            asked.add_header("Authorization", header)
        with urllib.request.urlopen(asked, timeout=_REACH_SECONDS) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, ValueError, HTTPException) as error:
        return str(error)


def prefect_home() -> Path:
    """The directory with the user's Prefect profiles and database."""
    return Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser()


def write_profile(url: str, auth: str) -> Path:
    """Writes a Prefect profile, readable only by this user, for a server that we start.

    With ``PREFECT_PROFILES_PATH`` set to it, the ``prefect`` command reaches that server with its password.
    """
    path = _profile_path(url)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # of a server that was killed, on the same port
    name = os.environ.get("PREFECT_PROFILE", _PROFILE)
    settings = f'[profiles."{name}"]\nPREFECT_API_URL = "{url}"\nPREFECT_API_AUTH_STRING = "{auth}"\n'
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f'active = "{name}"\n{settings}')
    return path


def own_auth(url: str) -> str | None:
    """The password of a running server that another command of this user has started; None: there is none."""
    try:
        profiles = tomllib.loads(_profile_path(url).read_text())["profiles"].values()
    except (OSError, ValueError, KeyError):
        return None
    return next((str(each["PREFECT_API_AUTH_STRING"]) for each in profiles if each["PREFECT_API_URL"] == url), None)


def use_own_auth(url: str) -> None:
    """Gives this process the password of a server that another command of this user has started."""
    auth = own_auth(url)
    if auth:
        os.environ["PREFECT_API_AUTH_STRING"] = auth


def prefix_of_command(url: str) -> str:
    """The variables before a ``prefect`` command in a message: the URL of the server, and the profile of ours."""
    profiles = f"PREFECT_PROFILES_PATH={shlex.quote(str(_profile_path(url)))} " if own_auth(url) else ""
    return f"{profiles}PREFECT_API_URL={url} "


def _profile_path(url: str) -> Path:
    return prefect_home() / f"posttrain-{urlsplit(url).port}.toml"
