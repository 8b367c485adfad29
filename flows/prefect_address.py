"""Where the user's Prefect is: found without prefect's import where it can be, which takes seconds."""

import os
from pathlib import Path

from lineage.errors import ConfigError
from lineage.reach import why_silent

_REACH_SECONDS = 10.0


def configured_api_url() -> str | None:
    """The Prefect API that the user has set, by variable or by profile."""
    if os.environ.get("PREFECT_API_URL"):
        return os.environ["PREFECT_API_URL"]
    profiles = prefect_home() / "profiles.toml"
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
    error = why_silent(url, _REACH_SECONDS)
    if error:
        raise ConfigError(
            f"PREFECT_API_URL={url}: no Prefect server answers there ({error}); start it, mend the URL, "
            "or unset it for an embedded server"
        ) from error


def prefect_home() -> Path:
    """Where Prefect keeps what is the user's: profiles, the database."""
    return Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser()
