"""GRPO of the pipeline sft-grpo beside a plain script of TRL, as whole processes with their start-up.

    python bench/grpo.py [--steps 100]

Same model, prompts, generations, steps and reward. Ours: two workers of one thread. The script: one process of two
threads, TRL's defaults, but gradient checkpointing off, which would only slow it down.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from run import posttrain

PIPELINE = ("pipeline=sft-grpo", "tracking=none", "resources.cpus_per_worker=1", "~stages.evaluate", "~stages.gate")


def arguments() -> argparse.Namespace:
    """The command line arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2, help="of ours, with one thread each")
    parser.add_argument("--keep", type=Path, help="leave stores and outputs here")
    parser.add_argument("--plain", nargs=3, metavar=("RECIPE", "POLICY", "ROWS"), help=argparse.SUPPRESS)
    return parser.parse_args()


def plain(recipe: dict, policy: str, rows: str, output: str) -> None:
    """What a user writes from TRL's documentation; prints the rewards of the steps."""
    import torch
    from datasets import load_dataset
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(2)

    def exact(completions: list, answer: list, **_: object) -> list[float]:
        texts = [each[0]["content"].strip() for each in completions]
        return [float(text == right.strip()) for text, right in zip(texts, answer, strict=True)]

    dataset = load_dataset("parquet", data_files=rows, split="train", cache_dir=f"{output}/cache")
    dataset = dataset.map(
        lambda row: {"prompt": [{"role": each["role"], "content": each["content"]} for each in row["prompt"]]}
    )
    args = GRPOConfig(
        output_dir=output, max_steps=recipe["num_steps"], per_device_train_batch_size=recipe["global_batch_size"],
        learning_rate=recipe["learning_rate"], lr_scheduler_type="constant", num_generations=recipe["num_generations"],
        max_completion_length=recipe["max_completion_length"], temperature=recipe["sampling"]["temperature"],
        beta=recipe["beta"], loss_type=recipe["loss"], seed=recipe["seed"], logging_steps=1, save_strategy="no",
        report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = GRPOTrainer(policy, exact, args=args, train_dataset=dataset)
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    trainer.save_model()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print(json.dumps({"train_seconds": seconds, "rewards": rewards}))


def rewards_of(output: Path) -> list[float]:
    """Of each step of a stage."""
    lines = (output.parent / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["metrics"]["reward"] for line in lines]


def tail(rewards: list[float]) -> float:
    """The mean of the last ten steps."""
    last = rewards[-10:]
    return sum(last) / len(last)


def main() -> None:
    """Runs both sides, one after the other, and prints the ratio."""
    args = arguments()
    if args.plain:
        recipe, policy, rows = args.plain
        plain(json.loads(recipe), policy, rows, str(args.keep))
        return
    from flows.declare.config import load_pipeline

    folder = args.keep or Path(tempfile.mkdtemp(prefix="posttrain-bench-"))
    folder.mkdir(parents=True, exist_ok=True)
    before, _ = posttrain(folder, *PIPELINE, "~stages.grpo")
    own = (
        f"stages.grpo.method.num_steps={args.steps}", f"stages.grpo.resources.num_workers={args.workers}",
        f"stages.grpo.resources.micro_batch_size={256 // args.workers}",
    )  # fmt: skip
    recipe = dict(load_pipeline([*PIPELINE, *own]).stages["grpo"].method.recipe())
    stages, ours = posttrain(folder, *PIPELINE, *own)
    mine = stages["grpo"]
    command = [
        sys.executable, __file__, "--keep", str(folder / "plain"), "--plain", json.dumps(recipe, default=str),
        before["sft"]["output"], f"{before['prompts']['output']}/train.parquet",
    ]  # fmt: skip
    start = time.perf_counter()
    result = subprocess.run(command, capture_output=True, text=True)
    theirs = time.perf_counter() - start
    if result.returncode:
        sys.exit(f"the plain script failed:\n{result.stderr[-4000:]}")
    measured = json.loads(result.stdout.splitlines()[-1])
    print(f"{os.cpu_count()} CPUs; load at the end {os.getloadavg()[0]:.1f}; {args.steps} steps")
    print(f"plain TRL: {theirs:.1f} s, of which training {measured['train_seconds']:.1f} s; "
          f"reward {tail(measured['rewards']):.3f}")  # fmt: skip
    print(f"posttrain: {ours:.1f} s, of which training {mine['train_seconds']:.1f} s; "
          f"reward {tail(rewards_of(Path(mine['output']))):.3f}")  # fmt: skip
    print(f"whole wall {ours / theirs:.2f}x, training {mine['train_seconds'] / measured['train_seconds']:.2f}x")


if __name__ == "__main__":
    main()
