"""What saving costs: the demo's `cpt` with checkpoints, beside the same as a plain TRL script.

    make bench    # or: python bench/checkpoints.py [--hidden-size 768] [--saves 4] [--every 6] [--rounds 3]

Sides take turns, so that other work on the machine falls on both. A checkpoint costs what the steps from it to the next
one take longer than as many quiet steps of the same training: the last two before each save. Steps are short (8 rows of
64 tokens), or the saves would not show. posttrain digests every file and waits for the disk (fsync), beside the
training; the script does neither, and the training waits for it. The stall is the time in which the training waits for
a save: for the checkpoint before, and for the copy of the state. Where every core trains, the digest takes its time
from the training too; both are the least that a checkpoint costs there.
"""

import argparse
import hashlib
import os
import re
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from run import plain_command, plain_result, posttrain, recipes  # noqa: E402

from lineage.record.metrics_file import read_reports  # noqa: E402

SHORT = {"global_batch_size": 8, "max_length": 64}
ALONE = ("~stages.sft", "~stages.reward", "~stages.dpo", "~stages.evaluate", "tracking=none")
QUIET = 2  # steps before a save


def arguments() -> argparse.Namespace:
    """Arguments of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden-size", type=int, default=768, help="of 12 layers; a multiple of 24")
    parser.add_argument("--saves", type=int, default=4, help="in a training")
    parser.add_argument("--every", type=int, default=6, help="steps from one checkpoint to the next")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def ours(folder: Path, args: argparse.Namespace, seed: int) -> dict[str, dict]:
    """One training of a seed of its own, as the store reuses what it has; its stages by name."""
    size = args.hidden_size
    model = {"hidden_size": size, "intermediate_size": 4 * size, "num_layers": 12, "num_heads": 12}
    shape = [f"stages.base.method.{name}={value}" for name, value in model.items()]
    fields = {**SHORT, "num_steps": args.every * (args.saves + 1), "seed": seed}
    training = [f"stages.cpt.method.{name}={value}" for name, value in fields.items()]
    saving = ("resources.save_minutes=null", f"resources.save_steps={args.every}")
    kept = "resources.keep_best={metric: loss, n: 1}"  # so that one is there to be measured
    return posttrain(folder, *ALONE, *shape, *training, *saving, kept)[0]


def theirs(folder: Path, args: argparse.Namespace, made: dict[str, dict]) -> list[float]:
    """When the steps of the plain script ended, on the same base and rows."""
    fields = {**recipes(1.0)["cpt"], **SHORT, "num_steps": args.every * (args.saves + 1)}
    command = plain_command("cpt", made["base"]["output"], made["corpus"]["output"], folder, fields)
    words = ("--no-gradient-checkpointing", "--save-steps", str(args.every))
    return plain_result("cpt", [*command, *words])["times"]


def costs(times: list[float], every: int) -> list[float]:
    """Seconds that each checkpoint of a training cost, of the times at which its steps ended."""
    steps = [after - before for before, after in pairwise(times)]
    saved = range(every, len(times), every)
    quiet = median(each for end in saved for each in steps[end - 1 - QUIET : end - 1])
    return [times[end + every - 1] - times[end - 1] - every * quiet for end in saved]


def report(side: str, seconds: list[float], megabytes: float) -> float:
    """Prints what checkpoints of one side cost, and returns the median."""
    cost = median(seconds)
    print(f"{side}: {' '.join(f'{each:.2f}' for each in seconds)} s; median {cost:.2f} s, {megabytes / cost:.0f} MB/s")
    return cost


def stalls(logs: list[str]) -> float:
    """Prints how long the training waited for each save, and how long the writes took; returns the median wait."""
    waited, wrote = (
        [float(each) for log in logs for each in re.findall(rf"state={state} .*?seconds=([\d.]+)", log)]
        for state in ("staged", "written")
    )
    print(
        f"stalls: {' '.join(f'{each:.2f}' for each in waited)} s; writes: {' '.join(f'{each:.2f}' for each in wrote)} s"
    )
    share = median(waited) / median(wrote)
    print(f"the training waits for {share:.0%} of a write (medians {median(waited):.2f} s, {median(wrote):.2f} s)")
    return median(waited)


def digest_seconds(megabytes: float) -> float:
    """Seconds of a core that SHA-256 takes for so many bytes: the least of three tries."""
    content, tries = bytes(10**7), list[float]()
    for _ in range(3):
        start, digest = time.thread_time(), hashlib.sha256()
        for _ in range(round(megabytes / 10)):
            digest.update(content)
        tries.append(time.thread_time() - start)
    return min(tries)


def main() -> None:
    """Times both sides in turns and prints them."""
    args = arguments()
    mine, plain, logs = [], [], []
    with tempfile.TemporaryDirectory(prefix="posttrain-bench-") as place:
        folder = Path(place)
        for number in range(args.rounds):
            made = ours(folder, args, number)
            stage = Path(made["cpt"]["output"]).parent
            mine += costs([each.time for each in read_reports(stage / "metrics.jsonl")], args.every)
            logs.append((stage / "logs" / "stage.log").read_text())
            plain += costs(theirs(folder / "plain", args, made), args.every)
        [checkpoint] = (stage / "checkpoints").glob("step-*")
        megabytes = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file()) / 1e6
    print(f"{os.cpu_count()} CPUs; load at the end {os.getloadavg()[0]:.1f}; a checkpoint is {megabytes:.0f} MB")
    cost, of_plain = report("posttrain", mine, megabytes), report("plain", plain, megabytes)
    print(f"a checkpoint of posttrain costs {cost / of_plain:.2f} of a plain one")
    waited, digest = stalls(logs), digest_seconds(megabytes)
    least = (waited + digest) / of_plain
    print(f"SHA-256 takes {digest:.2f} s of a core: with the stall {least:.2f} of a plain one, where every core trains")


if __name__ == "__main__":
    main()
