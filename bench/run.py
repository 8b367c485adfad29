"""posttrain beside the same four trainings as plain TRL scripts, one after the other, in one run.

    make bench    # or: python bench/run.py [--fraction 0.2] [--no-gradient-checkpointing]

Same model, rows, steps and micro batches. Both sides are timed as whole processes. posttrain's side also reads and
checks the data, makes the base model, digests and records every output; the scripts start from its prepared rows.
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
CPUS_PER_TRAINING = 2  # conf/resources/local.yaml
STAGES = {"cpt": "corpus", "sft": "instructions", "reward": "preferences", "dpo": "preferences"}
POLICY = {"cpt": "base", "sft": "cpt", "reward": "sft", "dpo": "sft"}


def arguments() -> argparse.Namespace:
    """Arguments of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fraction", type=float, default=1.0, help="of the recipe's steps")
    parser.add_argument("--no-gradient-checkpointing", action="store_true", help="for the scripts; TRL's default is on")
    parser.add_argument("--keep", type=Path, help="leave stores and outputs here")
    return parser.parse_args()


def recipes(fraction: float) -> dict[str, dict[str, float]]:
    """The fields that the shipped recipe of the tiny model states, steps scaled."""
    from flows.declare.config import load_pipeline

    pipeline = load_pipeline([])
    found = {name: dict(pipeline.stages[name].method.recipe()) for name in STAGES}
    for recipe in found.values():
        recipe["num_steps"] = max(10, round(recipe["num_steps"] * fraction))
    return found


def posttrain(folder: Path, *words: str) -> tuple[dict[str, dict], float]:
    """Runs the command; its stages by name, and its wall seconds as a whole process."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "flows", "run", "--json", *words]
    result = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    wall = time.perf_counter() - start
    return {row["stage"]: row for row in json.loads(result.stdout)["stages"]}, wall


def plain_command(name: str, policy: str, data: str, output: Path, fields: dict[str, float]) -> list[str]:
    """The plain script of one method on the prepared rows of a data stage, with the fields of a recipe."""
    return [
        sys.executable, str(HERE / "plain_trl.py"), name, "--policy", policy,
        "--rows", f"{data}/train.parquet", "--output", str(output),
        "--steps", str(fields["num_steps"]), "--batch-size", str(fields["global_batch_size"]),
        "--max-length", str(fields["max_length"]), "--learning-rate", str(fields["learning_rate"]),
    ]  # fmt: skip


def plain_result(name: str, command: list[str]) -> dict:
    """Runs a plain script; what it measured."""
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"plain {name} failed:\n{result.stderr[-4000:]}")
    measured = json.loads(result.stdout.splitlines()[-1])
    print(f"plain {name}: {measured['train_seconds']:.1f} s", file=sys.stderr)
    return measured


def plain(folder: Path, recipe: dict[str, dict], ours: dict[str, dict], extra: list[str]) -> tuple[dict, float]:
    """Runs the four scripts in turn, each on the output of the one before."""
    outputs = {"base": ours["base"]["output"]}
    results, start = {}, time.perf_counter()
    for name, data in STAGES.items():
        outputs[name] = str(folder / name)
        command = plain_command(name, outputs[POLICY[name]], ours[data]["output"], folder / name, recipe[name])
        results[name] = plain_result(name, [*command, *extra])
    return results, time.perf_counter() - start


def window_loss(row: dict) -> float:
    """Mean loss of the last whole ten steps: the window of which TRL's last log line is the mean."""
    lines = (Path(row["output"]).parent / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["metrics"]["loss"] for line in lines]
    end = len(losses) // 10 * 10
    return sum(losses[end - 10 : end]) / 10


def busy_seconds(ours: dict[str, dict]) -> float:
    """Seconds in which at least one stage trained: with two CPUs for each, reward and dpo run side by side."""
    is_beside = len(os.sched_getaffinity(0)) >= 2 * CPUS_PER_TRAINING
    last = (max if is_beside else sum)((ours["reward"]["train_seconds"], ours["dpo"]["train_seconds"]))
    return ours["cpt"]["train_seconds"] + ours["sft"]["train_seconds"] + last


def report(ours: dict[str, dict], walls: dict[str, float], theirs: dict[str, dict]) -> str:
    """The figures as a Markdown table with ratios."""
    lines = [
        f"{os.cpu_count()} CPUs; load at the end {os.getloadavg()[0]:.1f}", "",
        "| stage | plain TRL, train s | posttrain, train s | tokens/s ratio | loss plain | loss posttrain |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name in STAGES:
        mine, other = ours[name], theirs[name]
        lines.append(
            f"| {name} | {other['train_seconds']:.1f} | {mine['train_seconds']:.1f} "
            f"| {other['train_seconds'] / mine['train_seconds']:.2f} "
            f"| {other['loss']:.5f} | {window_loss(mine):.5f} |"
        )
    trained, their_train = busy_seconds(ours), sum(row["train_seconds"] for row in theirs.values())
    overhead = walls["posttrain"] - trained
    lines += [
        "",
        f"training: plain {their_train:.1f} s, posttrain {trained:.1f} s: tokens/s {their_train / trained:.2f}x",
        f"whole wall: plain {walls['plain']:.1f} s, posttrain {walls['posttrain']:.1f} s: "
        f"{walls['posttrain'] / walls['plain']:.2f}x",
        f"not training: plain {walls['plain'] - their_train:.1f} s, posttrain {overhead:.1f} s; "
        f"with the evaluation {overhead + ours['evaluate']['seconds']:.1f} s",
        f"the same command again, nothing to do: {walls['again']:.1f} s",
    ]
    return "\n".join(lines)


def main() -> None:
    """Runs both sides and prints the comparison."""
    args = arguments()
    folder = args.keep or Path(tempfile.mkdtemp(prefix="posttrain-bench-"))
    folder.mkdir(parents=True, exist_ok=True)
    recipe = recipes(args.fraction)
    steps = [f"stages.{name}.method.num_steps={fields['num_steps']}" for name, fields in recipe.items()]
    walls: dict[str, float] = {}
    ours, walls["posttrain"] = posttrain(folder, *steps, "~stages.evaluate")
    evaluated, _ = posttrain(folder, *steps)
    ours["evaluate"] = evaluated["evaluate"]
    _, walls["again"] = posttrain(folder, *steps)
    extra = ["--no-gradient-checkpointing"] if args.no_gradient_checkpointing else []
    theirs, walls["plain"] = plain(folder / "plain", recipe, ours, extra)
    print(report(ours, walls, theirs))


if __name__ == "__main__":
    main()
