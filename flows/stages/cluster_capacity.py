"""The Ray cluster at ``RAY_ADDRESS``: joins it, and asks for its CPUs and GPUs in a process that leaves it again."""

import json
import os
import subprocess
import sys
from traceback import format_exception

from flows.stages.process_settings import stage_environment
from lineage.errors import ConfigError


def ask_cluster(seconds: float) -> tuple[float, float]:
    """CPUs and GPUs of the cluster, asked in that process.

    Args:
        seconds: to wait for its answer.

    Raises:
        ConfigError: there is none; why, in one line.
    """
    command = [sys.executable, "-P", "-m", "flows.stages.cluster_capacity"]
    environment = {**stage_environment(), **os.environ}
    try:
        answer = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=seconds, check=True
        ).stdout
        held = json.loads(answer.splitlines()[-1])
        return float(held["CPU"]), float(held["GPU"])
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"no answer within {seconds:g} s") from error
    except (OSError, subprocess.SubprocessError, ValueError, IndexError, KeyError) as error:
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else ""
        raise ConfigError([type(error).__name__, *(said or "").strip().splitlines()][-1]) from error


def main() -> int:
    """Prints one JSON object, or on stderr what is wrong."""
    import ray

    try:
        join(log_to_driver=False, configure_logging=False)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    held = ray.cluster_resources()
    print(json.dumps({"CPU": held.get("CPU", 0.0), "GPU": held.get("GPU", 0.0)}))
    return 0


def join(**options: object) -> str:
    """Joins it as ``ray.init`` does; returns the address of its dashboard, or nothing.

    Raises:
        ConfigError: there is none, or it does not let us in.
    """
    import ray
    from ray.exceptions import AuthenticationError

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


if __name__ == "__main__":
    sys.exit(main())
