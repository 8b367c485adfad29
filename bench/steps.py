"""What the server costs: a step by `posttrain steps serve` and the SDK, beside the same session in this process.

    python bench/steps.py [--model DIR] [--hidden-size 576] [--layers 5] [--rows 16] [--tokens 512] [--steps 3]

The model is random, with the width of SmolLM2-135M, narrower MLPs and 300 tokens. It has 5 of its 30 layers, so that
all takes 107 s of CPU time: steps are shorter, and the server's share is larger; ``--layers 30 --steps 2`` takes 4
minutes. Sides take turns, so that other work on the machine falls on both. A step is one backward call on all rows, and
one step; seconds are medians.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests import tiny
from tests.steps_server import Served, find


def arguments() -> argparse.Namespace:
    """Arguments of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a directory with a model; default: one with random weights")
    parser.add_argument("--hidden-size", type=int, default=576)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=512, help="of a row")
    parser.add_argument("--steps", type=int, default=3, help="of each side that are measured, after one that is not")
    return parser.parse_args()


def seconds(step: Callable[[], object]) -> float:
    """The seconds of a call."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main() -> None:
    """Prints medians and the share that the server adds."""
    from posttrain.steps import Client, Row
    from tasks.context import TrainContext
    from tasks.steps import Steps
    from tasks.train.steps.session import Session

    args, folder = arguments(), Path(tempfile.mkdtemp())
    model = args.model or folder / "policy"
    if args.model is None:
        tiny.write_policy(model, hidden_size=args.hidden_size, num_layers=args.layers)
    settings = {"learning_rate": 1e-4, "max_length": args.tokens}
    tokens = [[(7 * row + place) % 250 for place in range(args.tokens + 1)] for row in range(args.rows)]
    weights = [1 / (args.rows * args.tokens)] * args.tokens
    rows = [Row(tokens=each[:-1], target_tokens=each[1:], weights=weights) for each in tokens]
    ctx = TrainContext(output_dir=folder / "output", work_dir=folder / "work")
    with Served(folder / "steps").running() as served:
        here = Session(Steps(**settings), find(str(model)), ctx)
        there = Client(served.url, served.key).session(str(model), **settings)

        def in_process() -> object:
            return here.backward(rows), here.step()

        def served_step() -> object:
            return there.call("backward", data=rows), there.call("step")

        times: dict[str, list[float]] = {"in process": [], "served": []}
        for number in range(args.steps + 1):
            for name, step in (("in process", in_process), ("served", served_step)):
                taken = seconds(step)
                if number:
                    times[name].append(taken)
    medians = {name: statistics.median(each) for name, each in times.items()}
    overhead = 100 * (medians["served"] / medians["in process"] - 1)
    print(json.dumps({"seconds": medians, "overhead_percent": round(overhead, 1), "all": times}, indent=1))


if __name__ == "__main__":
    main()
