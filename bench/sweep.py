"""A sweep beside its parts run by hand, and beside the naive loop.

    make bench    # or: python bench/sweep.py [--fraction 0.3] [--trials 8] [--parallel 1] [--no-naive]

Values of the learning rate of the demo's last training stage, dpo, on what it needs: the data stages, base, cpt, sft.

- parents once + trials alone: `posttrain run` of all that the trials share, as a whole process, then the seconds of
  the dpo of each trial, run one after the other with nothing beside it; the start-up of those commands is not counted;
- the sweep: `posttrain run --multirun` in a fresh store, as a whole process;
- the naive loop: the whole chain in a fresh store, as a whole process, for every trial; one turn is timed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from run import recipes  # noqa: E402

RATE = "stages.dpo.method.learning_rate"
CHAIN = ("~stages.evaluate", "~stages.reward", "tracking=none")


def arguments() -> argparse.Namespace:
    """Arguments of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fraction", type=float, default=0.3, help="of the recipe's steps")
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--parallel", type=int, help="trials at once; 1 shows what a sweep adds to its parts")
    parser.add_argument("--no-naive", action="store_true", help="leave the naive loop out")
    return parser.parse_args()


def posttrain(folder: Path, *words: str) -> tuple[dict, float]:
    """Runs the command; what it prints, and its wall seconds as a whole process."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "flows", "run", "--json", *CHAIN, *words]
    result = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(result.stdout), time.perf_counter() - start


def main() -> None:
    """Times the three and prints them."""
    args = arguments()
    steps = [
        f"stages.{name}.method.num_steps={recipe['num_steps']}"
        for name, recipe in recipes(args.fraction).items()
        if name != "reward"
    ]
    rates = [f"{1e-4 * (number + 1):g}" for number in range(args.trials)]
    with tempfile.TemporaryDirectory(prefix="posttrain-bench-") as place:
        folder = Path(place)
        shared = [word for word in steps if not word.startswith("stages.dpo")]
        _, parents = posttrain(folder, *shared, "~stages.dpo", "store=alone")
        trials = [posttrain(folder, *steps, "store=alone", f"{RATE}={rate}")[0] for rate in rates]
        together = [f"sweep.parallel={args.parallel}"] if args.parallel else []
        told, sweep = posttrain(folder, "--multirun", *steps, *together, "store=sweep", f"{RATE}={','.join(rates)}")
        assert [trial["state"] for trial in told["trials"]] == ["complete"] * args.trials
        turn = 0.0 if args.no_naive else posttrain(folder, *steps, "store=naive", f"{RATE}={rates[0]}")[1]
    alone = sum(stage["seconds"] for trial in trials for stage in trial["stages"])
    parts = parents + alone
    print(f"{os.cpu_count()} CPUs; load at the end {os.getloadavg()[0]:.1f}")
    print(f"parents once {parents:.1f} s + {args.trials} trials alone {alone:.1f} s = {parts:.1f} s")
    print(f"the sweep: {sweep:.1f} s, {sweep / parts:.2f}x")
    if turn:
        naive = args.trials * turn
        print(f"naive loop: {args.trials} x {turn:.1f} s = {naive:.1f} s, {naive / parts:.2f}x")


if __name__ == "__main__":
    main()
