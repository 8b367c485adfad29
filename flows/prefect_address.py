"""Where the user's Prefect is, and whether it answers: found without prefect's import where it can be, of seconds."""

import os
import urllib.error
import urllib.request
from pathlib import Path

from lineage.errors import ConfigError


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
    """Asks once, instead of leaving it to the client's long retries.

    Raises:
        ConfigError: nothing answers there.
    """
    try:
        urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=10).close()
    except urllib.error.HTTPError:
        return  # it answers; whether it lets us in is the client's affair
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"PREFECT_API_URL={url}: no Prefect server answers there ({error}); start it, mend the URL, "
            "or unset it for an embedded server"
        ) from error


def answers(url: str, timeout_seconds: float) -> bool:
    """Whether a Prefect server is there, also one that does not let us in."""
    try:
        urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=timeout_seconds).close()
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False
    return True


def prefect_home() -> Path:
    """Where Prefect keeps what is the user's: profiles, the database."""
    return Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser()
