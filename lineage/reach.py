"""Whether a server of the user's answers, asked once: their clients try for minutes before they say so."""

import base64
import urllib.error
import urllib.request
from http.client import HTTPException
from urllib.parse import unquote, urlsplit, urlunsplit


def why_silent(url: str, timeout_seconds: float) -> Exception | None:
    """Why nothing answers at ``<url>/health``; None: a server does, also one that does not let us in."""
    try:
        urllib.request.urlopen(request(f"{url.rstrip('/')}/health"), timeout=timeout_seconds).close()
    except urllib.error.HTTPError:
        return None  # whether it lets us in is the client's affair
    except (OSError, ValueError, HTTPException) as error:
        return error
    return None


def request(url: str) -> urllib.request.Request:
    """A question to an address that may name a user and a password, which urllib takes for a part of the host."""
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    headers = {"Authorization": basic(unquote(user))} if user else {}
    return urllib.request.Request(urlunsplit(parts._replace(netloc=host)), headers=headers)


def basic(pair: str) -> str:
    """The header of ``user:password``."""
    return "Basic " + base64.b64encode(pair.encode()).decode()
