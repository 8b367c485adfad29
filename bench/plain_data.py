"""Rendering and tokenizing rows of conversations as the documentation of datasets and transformers has it.

    python bench/plain_data.py ROWS.jsonl --tokenizer DIR --cache DIR [--workers 2] [--unbatched]

What comes of it lies in the cache of datasets. Nothing of posttrain is imported, and nothing is checked.
"""

import argparse
import json
import time
from itertools import pairwise

from datasets import load_dataset
from transformers import AutoTokenizer


def arguments() -> argparse.Namespace:
    """What a run is told."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", help="JSON Lines of {messages}")
    parser.add_argument("--tokenizer", required=True, help="directory of the tokenizer, with its chat template")
    parser.add_argument("--cache", required=True, help="directory for the cache of datasets")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--unbatched", action="store_true", help="tokenize one row at a time")
    return parser.parse_args()


def main() -> None:
    """Reads, renders and tokenizes, and prints the seconds of each as one JSON line."""
    args = arguments()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    times = [time.perf_counter()]
    rows = load_dataset("json", data_files=args.rows, split="train", cache_dir=args.cache)
    times.append(time.perf_counter())
    rows = rows.map(
        lambda row: {"text": tokenizer.apply_chat_template(row["messages"], tokenize=False)}, num_proc=args.workers
    )
    times.append(time.perf_counter())
    rows = rows.map(
        lambda each: tokenizer(each["text"], add_special_tokens=False),
        batched=not args.unbatched,
        num_proc=args.workers,
        remove_columns=rows.column_names,
    )
    times.append(time.perf_counter())
    seconds = [round(after - before, 1) for before, after in pairwise(times)]
    tokens = sum(len(ids) for batch in rows.with_format("arrow").iter(1000) for ids in batch["input_ids"])
    print(
        json.dumps(
            {"rows": len(rows), "tokens": tokens, **dict(zip(("read", "render", "tokenize"), seconds, strict=True))}
        )
    )


if __name__ == "__main__":
    main()
