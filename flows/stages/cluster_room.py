"""Asks the cluster at ``RAY_ADDRESS`` for its CPUs and GPUs: a process of its own, which joins it and leaves."""

import json
import sys

from lineage.errors import ConfigError


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
