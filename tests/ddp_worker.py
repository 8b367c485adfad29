"""One rank that trains methods data-parallel: ``python -m tests.ddp_worker ROOT OUTPUT NAME...``, started by a test."""

import json
import os
import sys
from pathlib import Path

import torch

from tasks.context import Metrics, Resources, TrainContext
from tests import training


def main() -> None:
    root, output = Path(sys.argv[1]), Path(sys.argv[2])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    losses: dict[str, list[float]] = {name: [] for name in sys.argv[3:]}
    for name, reported in losses.items():

        def report(step: int, metrics: Metrics, reported: list[float] = reported) -> None:
            reported.append(training.trajectory(metrics))

        stage = training.method(name)
        ctx = TrainContext(
            output_dir=output / name,
            work_dir=output / f"work{rank}",
            resources=Resources(num_workers=world_size, micro_batch_size=2),
            rank=rank,
            world_size=world_size,
            report=report,
        )
        stage.run(training.inputs(root, stage), ctx)
    (output / f"losses{rank}.json").write_text(json.dumps(losses))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
