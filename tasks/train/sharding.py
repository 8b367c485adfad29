"""ZeRO-2 through DeepSpeed: gradients and optimizer state are divided over the workers (Rajbhandari et al. 2020).

arXiv:1910.02054, section 5. Every worker holds the whole weights, in fp32 as under plain data parallelism, so that
it trains the same model up to the order of additions.
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

_BUCKET_ELEMENTS = 50_000_000  # of gradients that are added up over the workers in one call: 200 MB


def zero_args(method: "TrainingRecipe", ctx: "TrainContext") -> dict[str, object]:
    """The trainer's arguments that say who divides what: nothing without ZeRO.

    Raises:
        ConfigError: the checkpoint to go on from is of other workers, and cannot be read.
    """
    resources = ctx.resources
    if ctx.resume_from:
        require_readable(Checkpoints.at(ctx.resume_from), resources)
    if not resources.zero_stage:
        leave_out_deepspeed()
        return {}
    _bring_in(on_gpu=resources.gpus_per_worker > 0)
    # Of bf16 the trainer must know nothing: it would have DeepSpeed keep the weights themselves in bf16.
    return {"deepspeed": zero_config(method, resources), "bf16": False}


def zero_config(method: "TrainingRecipe", resources: "Resources") -> dict[str, object]:
    """DeepSpeed's own configuration. Nothing is "auto": transformers compares each number with the trainer's."""
    return {
        "train_batch_size": method.global_batch_size,
        "train_micro_batch_size_per_gpu": resources.micro_batch_size,
        "gradient_accumulation_steps": resources.accumulation_steps(method.global_batch_size),
        "gradient_clipping": method.max_grad_norm,
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},
        # Autocast over fp32 weights, as without ZeRO; what the workers add up stays in fp32 (no module is listed).
        "torch_autocast": {
            "enabled": method.precision == "bf16", "dtype": "bfloat16", "lower_precision_safe_modules": [],
        },
        "zero_optimization": {
            "stage": resources.zero_stage,
            "overlap_comm": False,  # additions in one order
            "reduce_bucket_size": _BUCKET_ELEMENTS,
            "allgather_bucket_size": _BUCKET_ELEMENTS,
        },
    }  # fmt: skip


def require_readable(checkpoint: Checkpoint, resources: "Resources") -> None:
    """That the workers can go on from a checkpoint: each holds its own part of ZeRO's optimizer state.

    Raises:
        ConfigError: they are not those that wrote it.
    """
    wrote, reads = ((each.num_workers, each.zero_stage) for each in (checkpoint, resources))
    if wrote != reads and (checkpoint.zero_stage or resources.zero_stage):
        raise ConfigError(
            f"its checkpoint of step {checkpoint.step} was written with num_workers={wrote[0]} and "
            f"zero_stage={wrote[1]}, and num_workers={reads[0]} with zero_stage={reads[1]} cannot go on from it: "
            "ZeRO's optimizer state is read in the parts that it was written in; "
            f"state num_workers={wrote[0]} and zero_stage={wrote[1]}"
        )


def autocast(args: "TrainingArguments") -> AbstractContextManager[None]:
    """For a model that is called beside DeepSpeed's engine, which casts only what goes through it."""
    if not isinstance(args.deepspeed, dict) or not args.deepspeed["torch_autocast"]["enabled"]:
        return contextlib.nullcontext()
    import torch

    cast: AbstractContextManager[None] = torch.autocast(args.device.type, dtype=torch.bfloat16)
    return cast


def name_accumulation(trainer: "Trainer") -> None:
    """Tells accelerate what DeepSpeed's configuration says: it would take it from there, and warn that they differ."""
    if trainer.args.deepspeed:
        trainer.accelerator.gradient_accumulation_steps = trainer.args.gradient_accumulation_steps


def leave_out_deepspeed() -> None:
    """Lets accelerate take DeepSpeed for absent: it imports what it finds (1.4 s), only to ask for a type.

    ``None`` is what Python documents for a module that is not to be imported.
    """
    sys.modules.setdefault("deepspeed", None)  # type: ignore[arg-type]


def _bring_in(*, on_gpu: bool) -> None:
    """Imports DeepSpeed so that it compiles nothing: of its own operators ZeRO-2 needs none."""
    if not on_gpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    TorchCheckpointEngine.load = _load_plain  # its own unpickles whatever the file names
    # All-reduces of inference through shared memory: 80 s of a C++ compiler at the start of a process group.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _load_plain(engine: object, path: str, map_location: object = None) -> object:
    """What DeepSpeed reads of a checkpoint: tensors, plain data, and the three classes that its own files hold.

    Raises:
        ArtifactError: the file names anything else, which reading it could run.
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
            "code; tensors and plain data, as DeepSpeed writes them, are accepted; restore the file, or begin again "
            "with restart=[STAGE]"
        ) from None
