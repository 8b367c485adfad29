#!/usr/bin/env bash
# peft 0.21.2 and torch 2.13.0: LoRA on a model that fully_shard divided has the wrong shape, by the name of the mesh.
#
# PEFT takes a sharded weight for one of tensor parallelism, unless its device mesh has no name or only a dimension
# named "fsdp". On a mesh with names of the user's own, such as ("dp_replicate", "dp_shard") for hybrid sharding,
# lora_B gets the rows of one worker: half of them on two workers. get_peft_model says nothing; the first forward fails.
#
# Fails if a shape, or what the forward does, changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q torch==2.13.0 peft==0.21.2 transformers==5.24.0
cd "$work"
cat > train.py <<'P'
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 6, bias=False)

    def forward(self, x):
        return self.lin(x)


def adapted(names):
    mesh = init_device_mesh("cpu", (1, 2)[-len(names) :], mesh_dim_names=names) if names else None
    model = Model()
    fully_shard(model.lin, mesh=mesh)
    fully_shard(model, mesh=mesh)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["lin"]))
    shape = tuple(adapted.base_model.model.lin.lora_B["default"].weight.shape)
    try:
        adapted(torch.ones(1, 8))
    except RuntimeError as error:
        return shape, "fails: " + str(error).split(" (")[0]
    return shape, "works"


def work(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    found = {names: adapted(names) for names in (None, ("fsdp",), ("dp_shard",), ("dp_replicate", "dp_shard"))}
    if rank == 0:
        for names, (shape, forward) in found.items():
            print(names, shape, forward)
        assert found[None] == found["fsdp",] == ((6, 2), "works")
        for names in (("dp_shard",), ("dp_replicate", "dp_shard")):
            assert found[names][0] == (3, 2) and found[names][1] == "fails: The size of tensor a"
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(work, args=(os.path.abspath("store"),), nprocs=2)
P
"$work/env/bin/python" train.py
# Seen:
# None (6, 2) works
# ('fsdp',) (6, 2) works
# ('dp_shard',) (3, 2) fails: The size of tensor a
# ('dp_replicate', 'dp_shard') (3, 2) fails: The size of tensor a
echo "seen as described"
