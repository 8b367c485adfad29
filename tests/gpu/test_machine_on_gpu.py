"""What is read of a GPU: its name and memory, the state of its driver, its peak, and the memory of a training."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from flows.operate.doctor import check_gpus
from flows.planning.adapter_choice import capacity
from flows.stages.process_settings import stage_environment
from flows.stages.resources import visible_gpus
from lineage.record.environment import hardware
from tasks.context import Resources
from tasks.train.loop.speed import measured_peak
from tests import training

ON_GPU = Resources(micro_batch_size=4, gpus_per_worker=1)


def test_the_driver_and_torch_name_the_same_gpu() -> None:
    assert check_gpus().level == "ok", check_gpus()
    assert torch.cuda.get_device_name() in hardware()["gpu"]
    assert len(visible_gpus()) == torch.cuda.device_count()
    properties = torch.cuda.get_device_properties(0)
    # Of a GPU, gaps of the allocator (5 %) and the context of CUDA (0.5 GiB) are not for a training.
    assert capacity(ON_GPU) == pytest.approx(0.95 * properties.total_memory - 2**29, rel=0.03)


def test_the_peak_in_bf16_is_that_of_its_matrix_units() -> None:
    assert measured_peak(True, "bf16") > 2 * measured_peak(True, "fp32")


def test_the_memory_of_a_training_is_its_own(tmp_path: Path) -> None:
    stage = training.method("sft", precision="bf16")
    trained = training.train(stage, training.write_inputs(tmp_path), tmp_path / "first" / "output", resources=ON_GPU)
    assert trained.reports[-1][1]["memory_gib"] < 0.1  # a model of 30,000 weights


FORKED = """
import multiprocessing
from flows.stages.launch import modules_of
from tasks.method import Training

def computes():
    import torch
    assert torch.ones(3, device="cuda").sum() == 3

if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(modules_of([Training]))
    process = context.Process(target=computes)
    process.start()
    process.join()
    raise SystemExit(process.exitcode)
"""


def test_processes_of_the_fork_server_can_use_the_gpu(tmp_path: Path) -> None:
    if find_spec("torchao"):
        pytest.skip("torchao initializes CUDA: stages with a GPU then start in a fresh process")
    (tmp_path / "forked.py").write_text(FORKED)
    done = subprocess.run(
        [sys.executable, tmp_path / "forked.py"], env={**os.environ, **stage_environment()}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
