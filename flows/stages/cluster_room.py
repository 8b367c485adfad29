"""Asks the cluster at ``RAY_ADDRESS`` for its CPUs and GPUs: a process of its own, which joins it and leaves."""

import json
import os


def main() -> None:
    """Prints one JSON object."""
    import ray

    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, configure_logging=False)
    held = ray.cluster_resources()
    print(json.dumps({"CPU": held.get("CPU", 0.0), "GPU": held.get("GPU", 0.0)}))


if __name__ == "__main__":
    main()
