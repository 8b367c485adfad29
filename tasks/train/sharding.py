"""ZeRO-2 through DeepSpeed: gradients and optimizer state are divided over the workers.

Rajbhandari et al. 2020, arXiv:1910.02054, section 5. Every worker holds the whole weights, in fp32 as under plain data
parallelism, so ZeRO-2 trains the same model up to the order of additions.
"""

import contextlib
import os
import pickle
import re
import sys
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from lineage.checkpoints import Checkpoint, Checkpoints
from lineage.errors import ArtifactError, ConfigError

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments

    from tasks.context import Resources, TrainContext
    from tasks.recipe import TrainingRecipe

_BUCKET_ELEMENTS = 50_000_000  # gradients in one all-reduce: 200 MB


def zero_args(method: "TrainingRecipe", ctx: "TrainContext") -> dict[str, object]:
    """The trainer's arguments for ZeRO; empty without it.

    Raises:
        ConfigError: the checkpoint to resume from was written by another number of workers, and cannot be read.
    """
    resources = ctx.resources
    if ctx.resume_from:
        require_readable(Checkpoints.at(ctx.resume_from), resources)
    if not resources.zero_stage:
        leave_out_deepspeed()
        return {}
    _bring_in(on_gpu=resources.gpus_per_worker > 0)
    # With bf16=True the trainer would have DeepSpeed keep the weights themselves in bf16.
    return {"deepspeed": zero_config(method, resources), "bf16": False}


def zero_config(method: "TrainingRecipe", resources: "Resources") -> dict[str, object]:
    """DeepSpeed's configuration. Nothing is "auto": transformers compares each number with the trainer's."""
    return {
        "train_batch_size": method.global_batch_size,
        "train_micro_batch_size_per_gpu": resources.micro_batch_size,
        "gradient_accumulation_steps": resources.accumulation_steps(method.global_batch_size),
        "gradient_clipping": method.max_grad_norm,
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},
        # Autocast over fp32 weights, as without ZeRO; all-reduces stay in fp32 (no module is listed).
        "torch_autocast": {
            "enabled": method.precision == "bf16", "dtype": "bfloat16", "lower_precision_safe_modules": [],
        },
        "zero_optimization": {
            "stage": resources.zero_stage,
            "overlap_comm": False,  # deterministic
            "reduce_bucket_size": _BUCKET_ELEMENTS,
            "allgather_bucket_size": _BUCKET_ELEMENTS,
        },
    }  # fmt: skip


def require_readable(checkpoint: Checkpoint, resources: "Resources") -> None:
    """Requires that the workers can resume from a checkpoint: each reads its own part of ZeRO's optimizer state.

    Raises:
        ConfigError: their number or ``zero_stage`` is not that of the workers that wrote it.
    """
    wrote, reads = ((each.num_workers, each.zero_stage) for each in (checkpoint, resources))
    if wrote != reads and (checkpoint.zero_stage or resources.zero_stage):
        raise ConfigError(
            f"its checkpoint of step {checkpoint.step} was written with num_workers={wrote[0]} and "
            f"zero_stage={wrote[1]}, and num_workers={reads[0]} with zero_stage={reads[1]} cannot resume from it: "
            "ZeRO's optimizer state is read in the parts that it was written in; "
            f"set num_workers={wrote[0]} and zero_stage={wrote[1]}"
        )


def autocast(args: "TrainingArguments") -> AbstractContextManager[None]:
    """Autocast for a model that is not called through DeepSpeed's engine, which casts only its own model."""
    if not isinstance(args.deepspeed, dict) or not args.deepspeed["torch_autocast"]["enabled"]:
        return contextlib.nullcontext()
    import torch

    cast: AbstractContextManager[None] = torch.autocast(args.device.type, dtype=torch.bfloat16)
    return cast


def name_accumulation(trainer: "Trainer") -> None:
    """Sets accelerate's accumulation to that of DeepSpeed's configuration: else it warns that they differ."""
    if trainer.args.deepspeed:
        trainer.accelerator.gradient_accumulation_steps = trainer.args.gradient_accumulation_steps


def leave_out_deepspeed() -> None:
    """Hides DeepSpeed from accelerate, which would import it (1.4 s) for a type check alone.

    ``None`` in ``sys.modules`` is Python's documented way to block an import.
    """
    sys.modules.setdefault("deepspeed", None)  # type: ignore[arg-type]


def _bring_in(*, on_gpu: bool) -> None:
    """Imports DeepSpeed without compiling its operators: ZeRO-2 needs none of them."""
    if not on_gpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    TorchCheckpointEngine.load = _load_plain  # its own method unpickles anything
    # All-reduces for inference through shared memory: compiling them takes 80 s at the start of a process group.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _load_plain(engine: object, path: str, map_location: object = None) -> object:
    """Loads a DeepSpeed checkpoint: only tensors, plain data, and the three classes that its own files contain.

    Raises:
        ArtifactError: the file names anything else, whose code could run when it is read.
    """
    import torch
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    try:
        with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
            return torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise ArtifactError(
            f"{path} was not loaded: it names {named[1] if named else 'what is no tensor'}, and reading that could run "
            "code; tensors and plain data, as DeepSpeed writes them, are accepted; restore the file, or start again "
            "with restart=[STAGE]"
        ) from None
