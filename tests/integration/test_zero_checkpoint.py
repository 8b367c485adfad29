"""What DeepSpeed reads of a checkpoint: no file of it runs code. In a process of its own, which has DeepSpeed."""

import multiprocessing
import os
import sys
from pathlib import Path

import pytest
import torch

from lineage.errors import ArtifactError


class Payload:
    """Makes a directory when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.folder / "ran"),)


def test_a_file_that_names_code_is_refused_and_not_run(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_load_in_deepspeed, args=(tmp_path,))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert not (tmp_path / "ran").exists()


def _load_in_deepspeed(folder: Path) -> None:
    sys.modules.pop("deepspeed", None)
    from tasks.train.sharding import _bring_in

    _bring_in(on_gpu=False)
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    engine, path = TorchCheckpointEngine(), str(folder / "states.pt")
    own = [LossScaler(1), ZeroStageEnum.gradients, fragment_address(numel=2, start=0)]
    engine.save({"weight": torch.ones(2), "own": own}, path)
    assert engine.load(path)["own"][2].numel == 2
    for is_zip in (False, True):
        torch.save({"module": Payload(folder)}, path, _use_new_zipfile_serialization=is_zip)
        with pytest.raises(ArtifactError, match=r"states\.pt was not loaded: it names posix\.mkdir, and reading"):
            engine.load(path)
