"""Joins the Ray cluster at ``RAY_ADDRESS``."""

import os
from traceback import format_exception

import ray
from ray.exceptions import AuthenticationError

from lineage.errors import ConfigError


def join(**options: object) -> str:
    """Joins it as ``ray.init`` does; returns the address of its dashboard, or nothing.

    Raises:
        ConfigError: there is none, or it does not let us in.
    """
    address = os.environ["RAY_ADDRESS"]
    try:
        return str(ray.init(address=address, **options).dashboard_url or "")
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        # Ray passes it on as text, in an error below this one.
        if AuthenticationError.__name__ in "".join(format_exception(error)):
            raise ConfigError(
                f"RAY_ADDRESS={address}: the cluster wants a token and was given none, or another; "
                "set RAY_AUTH_MODE=token and put the token of its head node (`ray get-auth-token`) in RAY_AUTH_TOKEN "
                "or ~/.ray/auth_token"
            ) from error
        cause = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise ConfigError(
            f"RAY_ADDRESS={address}: cannot be joined ({cause}); start the cluster, mend the address, "
            "or unset it for a cluster of our own"
        ) from error
