"""What DeepSpeed reads of a checkpoint: no file of it runs code. In a process of its own, which has DeepSpeed."""

import subprocess
import sys

SCRIPT = """
import os, sys
import torch
from tasks.train.sharding import _bring_in
_bring_in(on_gpu=False)
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from lineage.errors import ArtifactError

class Payload:
    def __reduce__(self):
        return os.mkdir, (sys.argv[1] + "/ran",)

engine, path = TorchCheckpointEngine(), sys.argv[1] + "/states.pt"
own = [LossScaler(1), ZeroStageEnum.gradients, fragment_address(numel=2, start=0)]
engine.save({"weight": torch.ones(2), "own": own}, path)
assert engine.load(path)["own"][2].numel == 2
for is_zip in (False, True):
    torch.save({"module": Payload()}, path, _use_new_zipfile_serialization=is_zip)
    try:
        engine.load(path)
    except ArtifactError as error:
        print(error)
"""


def test_a_file_that_names_code_is_refused_and_not_run(tmp_path):
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.count(f"{tmp_path}/states.pt was not loaded: it names posix.mkdir, and reading") == 2
    assert not (tmp_path / "ran").exists()
