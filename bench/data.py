"""Rows into tokens: what the data stage and the token cache do, beside plain datasets and transformers.

    python bench/data.py [--megabytes 1000] [--workers 2] [--keep DIR] [--only ours ours-ray plain plain-unbatched]

Conversations are drawn from the quickstart's rows: the same bytes for the same size. Each side is a process of its own,
with the same tokenizer and as many workers; ours makes every check, search for near duplicates included. Memory is that
of the whole tree of processes, looked at every 0.2 s: resident, and proportional (a page that n processes share counts
1/n in each); and the most that one process held.
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.measure import MB, measure

HERE = Path(__file__).parent
COPY, NEAR_COPY = 1 / 200, 1 / 100  # shares of the lines
SIDES = ("ours", "ours-ray", "plain", "plain-unbatched")
RECENT = 1000  # lines that copies are drawn from


def arguments() -> argparse.Namespace:
    """Arguments of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="leave rows and outputs here, and take the rows from here")
    parser.add_argument("--only", nargs="+", choices=SIDES, default=SIDES)
    return parser.parse_args()


def conversations(size: int) -> Iterator[bytes]:
    """JSON lines of {messages}, about ``size`` bytes in all; some lines are copies of a recent one, or nearly."""
    from tasks.quickstart import quickstart_rows

    draw = random.Random(0)
    pairs = [row["messages"] for row in quickstart_rows("instructions")]
    recent: deque[list[dict[str, str]]] = deque(maxlen=RECENT)
    written = 0
    while written < size:
        chance = draw.random()
        if recent and chance < COPY:
            messages = draw.choice(recent)
        elif recent and chance < COPY + NEAR_COPY:
            messages = changed(draw, draw.choice(recent))
        else:
            messages = [message for _ in range(draw.randint(2, 8)) for message in draw.choice(pairs)]
        line = json.dumps({"messages": messages}, ensure_ascii=False).encode() + b"\n"
        recent.append(messages)
        written += len(line)
        yield line


def changed(draw: random.Random, messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """The same with one word of its last answer changed, and one of a question."""
    last, question = len(messages) - 1, 2 * draw.randrange(len(messages) // 2)
    near = [dict(message) for message in messages]
    for place in (last, question):
        words = near[place]["content"].split(" ")
        words[draw.randrange(len(words))] = f"word{draw.randrange(1000)}"
        near[place]["content"] = " ".join(words)
    return near


def write_tokenizer(directory: Path) -> None:
    """The quickstart's: a byte-level BPE of 4,096 tokens."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from tasks.base_model import train_tokenizer
    from tasks.quickstart import quickstart_rows

    directory.mkdir(parents=True)
    corpus = directory / "corpus.parquet"
    pq.write_table(pa.table({"text": [row["text"] for row in quickstart_rows("corpus")]}), corpus)
    train_tokenizer(corpus, 4096).save_pretrained(directory)
    corpus.unlink()


def run_side(side: str, rows: Path, tokenizer: Path, folder: Path, workers: int) -> dict[str, object]:
    """Runs one side: seconds, CPU seconds and memory."""
    script, *extra = {
        "ours": ("own_data.py",), "ours-ray": ("own_data.py", "--on", "ray"),
        "plain": ("plain_data.py",), "plain-unbatched": ("plain_data.py", "--unbatched"),
    }[side]  # fmt: skip
    command = [
        sys.executable, str(HERE / script), str(rows), "--tokenizer", str(tokenizer), "--cache", str(folder / side),
        "--workers", str(workers), *extra,
    ]  # fmt: skip
    shutil.rmtree(folder / side, ignore_errors=True)  # of an earlier run: it would be reused
    found = measure(command, folder / f"{side}.log", HERE.parent)
    return {
        "side": side, "wall": found.seconds, "cpu": found.cpu, "resident": found.resident,
        "proportional": found.proportional, "one": found.one, "said": json.loads(found.output.splitlines()[-1]),
    }  # fmt: skip


def report(size: int, workers: int, results: list[dict]) -> str:
    """The figures as a Markdown table; ratios are of throughput, to the plain side."""
    plain = next((each["wall"] for each in results if each["side"] == "plain"), None)
    lines = [
        f"{size / MB:.0f} MB of JSON lines, {workers} workers, {os.cpu_count()} CPUs; "
        f"load at the end {os.getloadavg()[0]:.1f}", "",
        "| side | seconds | MB/s | times plain | CPU s | peak RSS, tree | peak PSS, tree | peak, one process |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for each in results:
        ratio = f"{plain / each['wall']:.2f}" if plain else ""
        memory = " | ".join(f"{each[name] / MB:,.0f} MB" for name in ("resident", "proportional", "one"))
        speed = size / MB / each["wall"]
        lines.append(f"| {each['side']} | {each['wall']:.1f} | {speed:.1f} | {ratio} | {each['cpu']:.1f} | {memory} |")
    return "\n".join([*lines, "", *(f"{each['side']}: {json.dumps(each['said'])}" for each in results)])


def main() -> None:
    """Writes the rows, runs each side, prints the comparison."""
    args = arguments()
    with tempfile.TemporaryDirectory(prefix="posttrain-bench-") as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        rows, tokenizer = folder / f"rows-{args.megabytes}.jsonl", folder / "tokenizer"
        if not rows.exists():
            with rows.open("wb") as file:
                file.writelines(conversations(args.megabytes * int(MB)))
        if not tokenizer.exists():
            write_tokenizer(tokenizer)
        results = [run_side(side, rows, tokenizer, folder, args.workers) for side in args.only]
        if len({each["said"]["tokens"] for each in results}) > 1:
            sys.exit(f"the sides made other numbers of tokens: {[each['said'] for each in results]}")
        print(report(rows.stat().st_size, args.workers, results))


if __name__ == "__main__":
    main()
