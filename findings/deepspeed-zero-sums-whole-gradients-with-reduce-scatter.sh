#!/usr/bin/env bash
# deepspeed 0.19.8 with torch 2.13.0: ZeRO-1 and ZeRO-2 all-reduce whole gradients where reduce_scatter is true.
#
# DeepSpeed's page of settings says that reduce_scatter has gradients averaged by reduce or reduce-scatter in place of
# all-reduce. With two workers and the other settings left at their defaults, each worker gets the sum of every
# gradient, of which it keeps half. ZeRO-2 does so in each micro batch, ZeRO-1 in the last one of a step. So four micro
# batches of ZeRO-2 exchange four times what ZeRO-1 and plain data parallelism do.
#
# Counted: elements that torch.distributed's calls for gradients get, for one weight of 10,000, on two CPU workers.
# Fails if another call, or another count, is seen.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q torch==2.13.0 numpy==2.3.4 deepspeed==0.19.8
cd "$work"
cat > count.py <<'P'
import json
import os
import socket

import torch
import torch.multiprocessing as processes

CALLS = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")


def work(rank, stage, port):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"}
    import deepspeed
    import torch.distributed as group

    counts = {}

    def count(name):
        own = getattr(group, name)

        def call(tensor, *args, **options):
            if torch.is_tensor(tensor) and tensor.numel() > 999:
                counts.setdefault(name, []).append(tensor.numel())
            return own(tensor, *args, **options)

        setattr(group, name, call)

    for name in CALLS:
        count(name)
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(100, 100, bias=False)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
        "zero_optimization": {"stage": stage, "reduce_scatter": True},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)[0]
    counts.clear()
    for _ in range(4):
        engine.backward(engine(torch.ones(1, 100)).sum())
        engine.step()
    if rank == 0:
        with open(f"{stage}.json", "w") as file:
            json.dump(counts, file)


if __name__ == "__main__":
    for stage, times in ((1, 1), (2, 4)):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        processes.spawn(work, (stage, port), nprocs=2)
        with open(f"{stage}.json") as file:
            found = json.load(file)
        print(f"ZeRO-{stage}:", found)
        assert found == {"all_reduce": [10_000] * times}
P
"$work/env/bin/python" count.py 2>/dev/null
# Seen: ZeRO-1: {'all_reduce': [10000]}
#       ZeRO-2: {'all_reduce': [10000, 10000, 10000, 10000]}
echo "seen as described"
