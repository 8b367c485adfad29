"""The same by posttrain: the data stage with every check, then the token cache that training stages read.

    python bench/own_data.py ROWS.jsonl --tokenizer DIR --cache DIR [--workers 2] [--on ray]

Both sides of the split are tokenized: as many rows as the plain side has.
"""

import argparse
import json
import sys
import time
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from flows.stages.job import Job
from flows.stages.process_settings import set_environment
from flows.stages.resources import rows_mapped
from lineage.artifact import Kind, Source
from lineage.filesystem.digest import DigestCache
from lineage.source.sources import pin
from tasks.context import Resources, TrainContext
from tasks.data.kinds import HELD_OUT, TRAIN
from tasks.data.tokens.tokenization import Tokenization
from tasks.data.tokens.tokenize_rows import load_or_make
from tasks.method import Input
from tasks.prepare_data import PrepareConversations

MAX_LENGTH = 4096  # tokens: no row is cut, as none is by the plain side


def arguments() -> argparse.Namespace:
    """What a run is told."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", help="JSON Lines of {messages}")
    parser.add_argument("--tokenizer", required=True, type=Path)
    parser.add_argument("--cache", required=True, type=Path, help="directory for all that is written")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--on", choices=("local", "ray"), default="local", help="as resources.rows")
    return parser.parse_args()


def main() -> None:
    """Digests, prepares and tokenizes, and prints the seconds of each as one JSON line."""
    args = arguments()
    set_environment()
    output, work = args.cache / "output", args.cache / "work"
    for directory in (output, work):
        directory.mkdir(parents=True)
    times = [time.perf_counter()]
    pinned = pin("rows", Source(path=args.rows), DigestCache(args.cache / "digests.json"))
    times.append(time.perf_counter())
    given = Input(
        name="source:rows", kind=Kind.ROWS, fingerprint=pinned.fingerprint, path=Path(args.rows), source=pinned.source
    )
    method, resources = PrepareConversations(held_out=0.01), Resources(cpus_per_worker=args.workers, rows=args.on)
    context = TrainContext(output_dir=output, work_dir=work, resources=resources)
    prepared = Input(name="rows", kind=Kind.CONVERSATIONS, fingerprint="0" * 64, path=output)
    tokenization = Tokenization(kind=Kind.CONVERSATIONS, max_length=MAX_LENGTH)
    with rows_mapped(Job(stage="rows", method=method, inputs={}, resources=resources, directory=args.cache)):
        metrics = method.run({"rows": given}, context)
        times.append(time.perf_counter())
        made = [
            load_or_make(tokenization, prepared, args.tokenizer, args.cache, args.workers, side=side)
            for side in (TRAIN, HELD_OUT)
        ]
    times.append(time.perf_counter())
    seconds = [round(after - before, 1) for before, after in pairwise(times)]
    said = dict(zip(("digest", "prepare", "tokenize"), seconds, strict=True))
    tokens = sum(each.stats.num_tokens for each in made)
    print(json.dumps({**metrics, "tokenized_rows": sum(map(len, made)), "tokens": tokens, **said}))


if __name__ == "__main__":
    main()
