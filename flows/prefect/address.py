"""Where the user's Prefect is: found without prefect's import where it can be, which takes seconds."""

import os
import shlex
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

from lineage.errors import ConfigError
from lineage.remote_files import why_unreachable

_REACH_SECONDS = 10.0
_PROFILE = "posttrain"  # unless PREFECT_PROFILE asks for another


def configured_api_url() -> str | None:
    """The Prefect API that the user has set, by variable or by profile."""
    if os.environ.get("PREFECT_API_URL"):
        return os.environ["PREFECT_API_URL"]
    profiles = Path(os.environ.get("PREFECT_PROFILES_PATH") or prefect_home() / "profiles.toml")
    if "PREFECT_API_URL" not in (profiles.read_text() if profiles.exists() else ""):
        return None
    from prefect.settings import PREFECT_API_URL

    url = PREFECT_API_URL.value()
    return str(url) if url else None


def require_reachable(url: str) -> None:
    """Sees to it that a Prefect server is there.

    Raises:
        ConfigError: nothing answers there.
    """
    error = why_unreachable(url, _REACH_SECONDS)
    if error:
        raise ConfigError(
            f"PREFECT_API_URL={url}: no Prefect server answers there ({error}); start it, mend the URL, "
            "or unset it for an embedded server"
        ) from error


def prefect_home() -> Path:
    """Where Prefect keeps what is the user's: profiles, the database."""
    return Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser()


def write_profile(url: str, auth: str) -> Path:
    """A profile of Prefect for a server that we start, beside the user's own ones, which only this user can read.

    With ``PREFECT_PROFILES_PATH`` set to it the ``prefect`` command reaches that server, and gives the password.
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
    """The password of a server that another command of this user has started, as long as that runs."""
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
    """What a ``prefect`` command that is shown begins with: it reaches a server, and has the password of ours."""
    profiles = f"PREFECT_PROFILES_PATH={shlex.quote(str(_profile_path(url)))} " if own_auth(url) else ""
    return f"{profiles}PREFECT_API_URL={url} "


def _profile_path(url: str) -> Path:
    return prefect_home() / f"posttrain-{urlsplit(url).port}.toml"
