"""Asks the cluster at ``RAY_ADDRESS`` for its CPUs and GPUs: a process of its own, which joins it and leaves."""

import json
import os
import subprocess
import sys

from flows.stages.process_settings import stage_environment
from lineage.errors import ConfigError


def ask_cluster(seconds: float) -> tuple[float, float]:
    """CPUs and GPUs of the cluster, asked in that process.

    Args:
        seconds: to wait for its answer.

    Raises:
        ConfigError: there is none; why, in one line.
    """
    command = [sys.executable, "-P", "-m", "flows.stages.cluster_room"]
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

    from flows.stages.ray_cluster import join

    try:
        join(log_to_driver=False, configure_logging=False)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    held = ray.cluster_resources()
    print(json.dumps({"CPU": held.get("CPU", 0.0), "GPU": held.get("GPU", 0.0)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
