"""GRPO of the pipeline sft-grpo beside a plain script of TRL, as whole processes with their start-up.

    python bench/grpo.py [--steps 100] [--rounds 2] [--workers 2]

Same model, prompts, completions per step, steps, reward and precision; the sides take turns. Ours is `posttrain run`
whose other stages are finished: one worker of two threads, or two of one thread. The script is one process of two
threads with TRL's defaults, but without gradient checkpointing, which would only slow it down. On a machine that other
work shares, read the CPU seconds, with OMP_WAIT_POLICY=PASSIVE: else the script's threads spin where they should wait.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.measure import Measured, measure

PIPELINE = ("pipeline=sft-grpo", "~stages.evaluate", "~stages.gate")
CPUS = 2


def arguments() -> argparse.Namespace:
    """The command line arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2, help="of both sides, in turns")
    parser.add_argument("--workers", type=int, choices=(1, 2), default=1, help=f"of ours, which share {CPUS} threads")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="for the script: TRL's default")
    parser.add_argument("--keep", type=Path, help="leave stores and outputs here")
    parser.add_argument("--plain", nargs=3, metavar=("RECIPE", "POLICY", "ROWS"), help=argparse.SUPPRESS)
    return parser.parse_args()


def plain(recipe: Mapping, policy: str, rows: str, output: str, *, checkpoints: bool) -> None:
    """What a user writes from TRL's documentation; prints the rewards of the steps."""
    import torch
    from datasets import load_dataset
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(CPUS)

    def exact(completions: list, answer: list, **_: object) -> list[float]:
        texts = [each[0]["content"].strip() for each in completions]
        return [float(text == right.strip()) for text, right in zip(texts, answer, strict=True)]

    dataset = load_dataset("parquet", data_files=rows, split="train", cache_dir=f"{output}/cache")
    dataset = dataset.map(
        lambda row: {
            "prompt": [{"role": each["role"], "content": each["content"]} for each in row["prompt"]],
            **json.loads(row["columns"]),
        },
        remove_columns=dataset.column_names,
    )
    args = GRPOConfig(
        output_dir=output, max_steps=recipe["num_steps"], per_device_train_batch_size=recipe["global_batch_size"],
        learning_rate=recipe["learning_rate"], lr_scheduler_type="constant", num_generations=recipe["num_generations"],
        max_completion_length=recipe["max_completion_length"], temperature=recipe["sampling"]["temperature"],
        beta=recipe["beta"], loss_type=recipe["loss"], seed=recipe["seed"], logging_steps=1, save_strategy="no",
        report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=checkpoints,
    )  # fmt: skip
    trainer = GRPOTrainer(policy, exact, args=args, train_dataset=dataset)
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    trainer.save_model()
    log = [entry for entry in trainer.state.log_history if "reward" in entry]
    tokens = log[-1]["num_tokens"]
    print(json.dumps({"train_seconds": seconds, "rewards": [entry["reward"] for entry in log], "num_tokens": tokens}))


def run(command: Sequence[str], folder: Path) -> Measured:
    """Runs a command to its end, with as many threads as it wants."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return measure(command, folder / "log", folder, environment, every_seconds=0.5)


def posttrain(folder: Path, *overrides: str) -> tuple[dict[str, dict], Measured]:
    """Runs the command; its stages by name, and what it took."""
    found = run([sys.executable, "-m", "flows", "run", "--json", *overrides], folder)
    return {row["stage"]: row for row in json.loads(found.output)["stages"]}, found


def ours(prepared: Path, folder: Path, overrides: Sequence[str]) -> dict:
    """Trains in a copy of the store in which the stages before are finished."""
    shutil.copytree(prepared, folder, symlinks=True)
    stages, measured = posttrain(folder, *overrides)
    lines = (Path(stages["grpo"]["output"]).parent / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line)["metrics"] for line in lines]
    return {
        "seconds": measured.seconds,
        "cpu_seconds": measured.cpu,
        "train_seconds": stages["grpo"]["train_seconds"],
        "rewards": [each["reward"] for each in metrics],
        "num_tokens": metrics[-1]["num_tokens"],
    }


def report(name: str, found: Sequence[Mapping]) -> str:
    """One side: its median seconds, and the mean reward of the first and the last ten steps of all rounds."""
    first, last = (
        statistics.mean(reward for each in found for reward in each["rewards"][place])
        for place in (slice(10), slice(-10, None))
    )
    walls = ", ".join(f"{each['seconds']:.1f}" for each in found)
    return (
        f"{name}: {statistics.median(each['seconds'] for each in found):.1f} s ({walls}), of which training "
        f"{statistics.median(each['train_seconds'] for each in found):.1f} s; CPU "
        f"{statistics.median(each['cpu_seconds'] for each in found):.1f} s; {found[0]['num_tokens']:.0f} tokens; "
        f"reward of the first ten steps {first:.3f}, of the last {last:.3f}"
    )


def main() -> None:
    """Runs both sides in turns, and prints the ratio."""
    args = arguments()
    if args.plain:
        recipe, policy, rows = args.plain
        plain(json.loads(recipe), policy, rows, str(args.keep), checkpoints=args.gradient_checkpointing)
        return
    from flows.declare.config import load_pipeline

    folder = args.keep or Path(tempfile.mkdtemp(prefix="posttrain-bench-"))
    prepared = folder / "prepared"
    prepared.mkdir(parents=True, exist_ok=True)
    before, _ = posttrain(prepared, *PIPELINE, "~stages.grpo")  # at once where they are kept
    own = [*PIPELINE, f"stages.grpo.method.num_steps={args.steps}"]
    recipe = load_pipeline(own).stages["grpo"].method.recipe()
    own += [
        f"stages.grpo.resources.num_workers={args.workers}",
        f"stages.grpo.resources.cpus_per_worker={CPUS // args.workers}",
        f"stages.grpo.resources.micro_batch_size={recipe['global_batch_size'] // args.workers}",
    ]
    script = [
        sys.executable, str(Path(__file__).resolve()), *["--gradient-checkpointing"] * args.gradient_checkpointing,
        "--plain", json.dumps(recipe, default=str), before["sft"]["output"],
        f"{before['prompts']['output']}/train.parquet", "--keep",
    ]  # fmt: skip
    found: dict[str, list[dict]] = {"plain TRL": [], "posttrain": []}
    for number in range(args.rounds):
        output = folder / f"plain-{number}"
        output.mkdir()
        taken = run([*script, str(output)], output)
        printed = json.loads(taken.output.splitlines()[-1])
        found["plain TRL"].append({**printed, "seconds": taken.seconds, "cpu_seconds": taken.cpu})
        found["posttrain"].append(ours(prepared, folder / f"ours-{number}", own))
    print(
        f"{os.cpu_count()} CPUs; load at the end {os.getloadavg()[0]:.1f}; {args.steps} steps; {args.workers} workers"
    )
    for name, each in found.items():
        print(report(name, each))
    for name, key in (("whole wall", "seconds"), ("training", "train_seconds"), ("CPU seconds", "cpu_seconds")):
        one, other = (statistics.median(each[key] for each in found[side]) for side in ("posttrain", "plain TRL"))
        print(f"{name}: {one / other:.2f}x")


if __name__ == "__main__":
    main()
