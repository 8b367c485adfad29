"""DPO with its reference in memory, with precomputed log-probabilities, and with those of an earlier training.

    python bench/reference.py [--rows 400] [--epochs 2] [--hidden-size 256]

A Llama of six layers, one thread, one process per training: seconds of the whole stage, CPU seconds, the most resident
memory, and the loss of the last step. On a machine with other work look at ``cpu_seconds``.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

CASES = ("in memory", "precomputed", "cached")


def arguments() -> argparse.Namespace:
    """The command-line arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--epochs", type=float, default=2.0)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)  # of the process that measures, and the folder
    return parser.parse_args()


def measure(case: str, folder: Path, epochs: float) -> dict[str, float]:
    """One training in this process."""
    import torch

    from tasks.context import Resources, TrainContext
    from tasks.dpo import DPO
    from tests import training

    torch.set_num_threads(1)
    losses = []
    ctx = TrainContext(
        output_dir=folder / case / "output", work_dir=folder / case / "work", cache_dir=folder / "cache",
        resources=Resources(micro_batch_size=8, cpus_per_worker=1, precompute_reference=case != CASES[0]),
        report=lambda _step, metrics: losses.append(metrics["loss"]),
    )  # fmt: skip
    stage = DPO(learning_rate=1e-4, num_epochs=epochs, global_batch_size=16, max_length=256, beta=0.1)
    start, start_cpu = time.perf_counter(), time.process_time()
    stage.run(training.inputs(folder, stage), ctx)
    return {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - start_cpu,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "loss": losses[-1],
    }


def main() -> None:
    """Prints a line per case."""
    args = arguments()
    if args.case:
        print(json.dumps(measure(args.case[0], Path(args.case[1]), args.epochs)))
        return
    from tests import tiny

    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        tiny.write_policy(folder / "policy", hidden_size=args.hidden_size, num_layers=6)
        tiny.write_rows(folder / "preferences", tiny.preference_rows(args.rows))
        command = [sys.executable, __file__, "--epochs", str(args.epochs), "--case"]
        for case in CASES:
            ran = subprocess.run([*command, case, directory], check=True, capture_output=True, text=True)
            found = json.loads(ran.stdout.splitlines()[-1])
            print(
                f"{case:11}   seconds {found['seconds']:6.1f}   cpu_seconds {found['cpu_seconds']:6.1f}   "
                f"peak_mib {found['peak_mib']:6.0f}   loss {found['loss']:.5f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
