"""Whether a server of the user's answers, asked once: their clients try for minutes before they say so."""

import urllib.error
import urllib.request


def why_silent(url: str, timeout_seconds: float) -> Exception | None:
    """Why nothing answers at ``<url>/health``; None: a server does, also one that does not let us in."""
    try:
        urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=timeout_seconds).close()
    except urllib.error.HTTPError:
        return None  # whether it lets us in is the client's affair
    except (OSError, ValueError) as error:
        return error
    return None
