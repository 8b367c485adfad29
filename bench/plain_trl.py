"""The same four trainings as plain TRL scripts: what a user writes from TRL's documentation.

    python bench/plain_trl.py cpt|sft|reward|dpo --policy DIR --rows FILE.parquet --output DIR --steps N ...

Each run is one process with TRL's default settings, and prints one JSON line last. Nothing of posttrain is imported.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from transformers import AutoTokenizer, TrainerCallback, set_seed
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

METHODS = ("cpt", "sft", "reward", "dpo")


def arguments() -> argparse.Namespace:
    """What a run is told."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--policy", required=True, help="directory of the model to start from")
    parser.add_argument("--rows", required=True, help="train.parquet of a data stage")
    parser.add_argument("--output", required=True, help="directory for the trained model")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True, help="rows per optimizer step")
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--max-length", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--warmup-ratio", type=float, default=0.05)
    parser.add_argument("--lr-schedule", default="cosine")
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--logging-steps", type=int, default=10, help="TRL's default is 10")
    parser.add_argument("--bf16", action="store_true", help="autocast; fp32 else")
    parser.add_argument("--save-steps", type=int, help="a checkpoint every so many steps; two stay")
    parser.add_argument(
        "--no-gradient-checkpointing", action="store_true", help="TRL's default is to checkpoint; this turns it off"
    )
    return parser.parse_args()


def common(args: argparse.Namespace) -> dict[str, object]:
    """What every TRL config is given; the rest is TRL's default."""
    settings: dict[str, object] = {
        "output_dir": args.output,
        "max_steps": args.steps,
        "per_device_train_batch_size": args.micro_batch_size,
        "gradient_accumulation_steps": args.batch_size // args.micro_batch_size,
        "max_length": args.max_length,
        "learning_rate": args.learning_rate,
        "lr_scheduler_type": args.lr_schedule,
        "warmup_steps": args.warmup_ratio,
        "weight_decay": args.weight_decay,
        "seed": args.seed,
        "save_strategy": "steps" if args.save_steps else "no",
        "save_steps": args.save_steps or 1,
        "save_total_limit": 2,
        "report_to": "none",
        "use_cpu": not torch.cuda.is_available(),
        "bf16": args.bf16,
        "logging_steps": args.logging_steps,
    }
    if args.no_gradient_checkpointing:
        settings["gradient_checkpointing"] = False
    return settings


def chunks(rows: Dataset, tokenizer: AutoTokenizer, max_length: int) -> Dataset:
    """Documents joined with <|endoftext|> and cut in chunks: ``group_texts`` of the transformers examples."""

    def group_texts(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        stream: list[int] = []
        for ids in tokenizer(batch["text"], add_special_tokens=False)["input_ids"]:
            stream += [*ids, tokenizer.convert_tokens_to_ids("<|endoftext|>")]
        total = len(stream) // max_length * max_length
        return {"input_ids": [stream[i : i + max_length] for i in range(0, total, max_length)]}

    return rows.map(group_texts, batched=True, batch_size=len(rows), remove_columns=rows.column_names)


def prompt_completion(row: dict[str, list[dict[str, str]]]) -> dict[str, list[dict[str, str]]]:
    """A conversation as TRL's prompt-completion format: the last turn is trained."""
    return {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]}


def trainer_for(args: argparse.Namespace, rows: Dataset) -> SFTTrainer | RewardTrainer | DPOTrainer:
    """TRL's trainer for the method, with its defaults."""
    tokenizer = AutoTokenizer.from_pretrained(args.policy)
    settings = common(args)
    if args.method == "cpt":
        dataset = chunks(rows, tokenizer, args.max_length)
        return SFTTrainer(args.policy, SFTConfig(**settings), train_dataset=dataset, processing_class=tokenizer)
    if args.method == "sft":
        dataset = rows.map(prompt_completion, remove_columns=rows.column_names)
        return SFTTrainer(args.policy, SFTConfig(**settings), train_dataset=dataset, processing_class=tokenizer)
    if args.method == "reward":
        return RewardTrainer(args.policy, RewardConfig(**settings), train_dataset=rows, processing_class=tokenizer)
    return DPOTrainer(
        args.policy, args=DPOConfig(beta=args.beta, **settings), train_dataset=rows, processing_class=tokenizer
    )


class Clock(TrainerCallback):
    """When each step ended, before its checkpoint."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        self.times.append(time.time())


def main() -> None:
    """Trains, saves, and prints what it took."""
    args = arguments()
    torch.set_num_threads(args.threads)
    set_seed(args.seed)
    rows = load_dataset("parquet", data_files=args.rows, split="train", cache_dir=str(Path(args.output) / "cache"))
    trainer, clock = trainer_for(args, rows), Clock()
    trainer.add_callback(clock)
    start, cpu_start = time.perf_counter(), time.process_time()
    trainer.train()
    train_seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    trainer.save_model()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    result = {
        "method": args.method,
        "train_seconds": train_seconds,
        "cpu_seconds": cpu_seconds,  # what it cost, where others share the machine
        "num_tokens": int(logged[-1]["num_tokens"]),
        "tokens_per_second": logged[-1]["num_tokens"] / train_seconds,
        "loss": logged[-1]["loss"],
        "losses": [entry["loss"] for entry in logged],  # means of ``logging_steps`` steps
        "rows": len(trainer.train_dataset),
        "times": clock.times,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
