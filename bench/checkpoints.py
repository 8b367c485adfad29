"""What saving costs: the demo's `cpt` with and without checkpoints, beside the same as a plain TRL script.

    make bench    # or: python bench/checkpoints.py [--hidden-size 768] [--steps 25] [--every 4] [--rounds 2]

Sides take turns, so that other work on the machine falls on all of them. Seconds are those of the training loop, saves
included; steps are short (8 rows of 64 tokens), or the saves would not show. posttrain digests every file and waits for
the disk (fsync), beside the training; the script does neither, and the training waits for it. The stall is the time in
which the training waits for a save: for the checkpoint before, and for the copy of the state.
"""

import argparse
import os
import re
import statistics
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from run import plain_command, plain_result, posttrain, recipes  # noqa: E402

SHORT = {"global_batch_size": 8, "max_length": 64}
ALONE = ("~stages.sft", "~stages.reward", "~stages.dpo", "~stages.evaluate", "tracking=none")


def arguments() -> argparse.Namespace:
    """Arguments of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden-size", type=int, default=768, help="of 12 layers; a multiple of 24")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument(
        "--every", type=int, default=4, help="steps from one checkpoint to the next; no divisor of steps"
    )
    parser.add_argument("--rounds", type=int, default=2)
    return parser.parse_args()


def ours(folder: Path, args: argparse.Namespace, seed: int, *words: str) -> dict[str, dict]:
    """One training of a seed of its own, as the store reuses what it has; its stages by name."""
    size = args.hidden_size
    model = {"hidden_size": size, "intermediate_size": 4 * size, "num_layers": 12, "num_heads": 12}
    shape = [f"stages.base.method.{name}={value}" for name, value in model.items()]
    fields = {**SHORT, "num_steps": args.steps, "seed": seed}
    training = [f"stages.cpt.method.{name}={value}" for name, value in fields.items()]
    rows, _ = posttrain(folder, *ALONE, *shape, *training, *words)
    return rows


def theirs(folder: Path, args: argparse.Namespace, made: dict[str, dict], *words: str) -> float:
    """Seconds of the plain script on the same base and rows."""
    fields = {**recipes(1.0)["cpt"], **SHORT, "num_steps": args.steps}
    command = plain_command("cpt", made["base"]["output"], made["corpus"]["output"], folder, fields)
    return plain_result("cpt", [*command, "--no-gradient-checkpointing", *words])["train_seconds"]


def size(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def report(seconds: dict[str, list[float]], steps: int, saves: int, megabytes: float) -> None:
    """Prints both sides, and what one checkpoint took of each."""
    print(f"{os.cpu_count()} CPUs; load at the end {os.getloadavg()[0]:.1f}; a checkpoint is {megabytes:.0f} MB")
    mean = {name: statistics.mean(values) for name, values in seconds.items()}
    costs = {name: (mean[f"{name} saving"] - mean[name]) / saves for name in ("plain", "posttrain")}
    for name, cost in costs.items():
        saving = f"with {saves} checkpoints {mean[f'{name} saving']:.1f} s"
        print(f"{name}: {steps} steps {mean[name]:.1f} s, {saving}: {cost:.2f} s each, {megabytes / cost:.0f} MB/s")
    print(f"a checkpoint of posttrain takes {costs['posttrain'] / costs['plain']:.2f}x the time of a plain one")


def stalls(log: str) -> None:
    """Prints how long the training waited for each save, and how long the writes took."""
    waited, wrote = (
        [float(each) for each in re.findall(rf"state={state} .*?seconds=([\d.]+)", log)]
        for state in ("staged", "written")
    )
    share = statistics.fmean(waited) / statistics.fmean(wrote)
    print(
        f"stalls: {' '.join(f'{each:.2f}' for each in waited)} s; writes: {' '.join(f'{each:.2f}' for each in wrote)} s"
    )
    print(f"the training waits for {share:.0%} of a write, {min(waited) / statistics.fmean(wrote):.0%} at least")


def main() -> None:
    """Times the four sides in turns and prints them."""
    args = arguments()
    saves = (args.steps - 1) // args.every
    seconds: dict[str, list[float]] = {"posttrain": [], "posttrain saving": [], "plain": [], "plain saving": []}
    with tempfile.TemporaryDirectory(prefix="posttrain-bench-") as place:
        folder = Path(place)
        for number in range(args.rounds):
            made = ours(folder, args, 2 * number, "resources.save_minutes=null")
            seconds["posttrain"].append(made["cpt"]["train_seconds"])
            words = ("resources.save_minutes=null", f"resources.save_steps={args.every}")
            kept = "resources.keep_best={metric: loss, n: 1}"  # so that one is there to be measured
            made = ours(folder, args, 2 * number + 1, *words, kept)
            seconds["posttrain saving"].append(made["cpt"]["train_seconds"])
            seconds["plain"].append(theirs(folder / "plain", args, made))
            seconds["plain saving"].append(theirs(folder / "plain", args, made, "--save-steps", str(args.every)))
        [checkpoint] = (Path(made["cpt"]["output"]).parent / "checkpoints").glob("step-*")
        report(seconds, args.steps, saves, size(checkpoint) / 1e6)
        stalls((checkpoint.parents[1] / "logs" / "stage.log").read_text())


if __name__ == "__main__":
    main()
