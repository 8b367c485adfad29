"""Log-probabilities of the reference, computed once before the first step and kept in the store's cache.

A sweep over ``beta`` or the loss then computes the reference once, and a training has no reference in memory.
"""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
from datasets import Dataset, concatenate_datasets
from safetensors.torch import load_file, save_file

from lineage.filesystem.cached import cached
from lineage.filesystem.digest import DigestCache
from lineage.fingerprint import digest_json, short
from lineage.store import REFERENCE_LOGPS
from tasks.data.images import Images
from tasks.data.kinds import PLACES, TRAINED
from tasks.evaluate.scoring import Scored, logps
from tasks.model.vision import Vision
from tasks.train.loop.heartbeat import Phase

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from tasks.context import TrainContext
    from tasks.recipe import Inputs, TrainingRecipe

logger = logging.getLogger(__name__)

COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")  # TRL's names
_FILE = "logps.safetensors"
_VERSION = 1  # raise it when the same model and rows give other numbers than before
_ROWS, _BATCH = 64, 16  # rows per heartbeat and per forward pass: fixed, so that execution settings have no effect
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def with_reference(
    examples: Dataset, method: "TrainingRecipe", inputs: "Inputs", ctx: "TrainContext", model: "PreTrainedModel"
) -> Dataset:
    """The examples, pairs of answers, with the reference's log-probability of each answer in ``COLUMNS``.

    Args:
        model: the reference; it is left in evaluation mode.
    """
    images: Images | None = getattr(method, "images", None)
    vision = Vision.of(inputs["policy"].path, inputs[type(method).reads.slot].path, images)

    def compute(directory: Path) -> None:
        save_file(_compute(examples, method, ctx, model, vision), directory / _FILE)

    if ctx.cache_dir is None:
        with TemporaryDirectory() as scratch:
            compute(Path(scratch))
            return concatenate_datasets([examples, _read(Path(scratch))], axis=1)
    digests = DigestCache(ctx.cache_dir / "tokens" / "digests.json")
    seen = {"images": vision.key(digests)} if vision else {}
    entry = ctx.cache_dir / REFERENCE_LOGPS / short(_key(examples, method, inputs, ctx, seen))
    ctx.mark(None, Phase.FETCHING)  # so that a worker that waits for another one does not count as hung
    with cached(entry, compute) as is_new:
        logger.info("reference=%s logps=%s state=%s", inputs["policy"].name, entry, "made" if is_new else "reused")
        ctx.mark(None, Phase.LOADING)
        return concatenate_datasets([examples, _read(entry)], axis=1)


def _read(entry: Path) -> Dataset:
    return Dataset.from_dict({name: each.tolist() for name, each in load_file(entry / _FILE).items()})


def _key(
    examples: Dataset, method: "TrainingRecipe", inputs: "Inputs", ctx: "TrainContext", seen: Mapping[str, object]
) -> str:
    """Digest of everything that determines the numbers: tokens, images, model, and arithmetic."""
    tokens = hashlib.sha256()
    for batch in examples.with_format("arrow").iter(_ROWS):
        for name in ("prompt_ids", "chosen_ids", "rejected_ids", f"chosen_{TRAINED}", f"rejected_{TRAINED}", PLACES):
            column = batch[name].combine_chunks() if name in batch.column_names else None
            if column is None or (name.endswith(TRAINED) and not len(column.flatten())):
                continue  # all tokens are trained
            tokens.update(column.value_lengths().to_numpy().tobytes() + column.flatten().to_numpy().tobytes())
    policy = inputs["policy"]
    decides = {
        "tokens": tokens.hexdigest(),
        **seen,
        "policy": policy.fingerprint,
        "adapter_in": method.adapter_in,
        "quantization": asdict(method.quantization) if method.quantization else None,
        "precision": method.precision,
        "weights": ctx.resources.frozen_dtype(method.precision),
        "attention": ctx.resources.attention,
        "device": ctx.resources.device,
        "libraries": {name: version(name) for name in ("torch", "transformers")},
        "version": _VERSION,
    }
    return digest_json(decides)


def _masks(batch: Mapping[str, list[list[int]]], side: str) -> list[list[int]]:
    """The mask of each answer of a side; tokens of earlier versions have none."""
    return batch.get(f"{side}_{TRAINED}") or [[] for _ in batch["prompt_ids"]]


def _compute(
    examples: Dataset, method: "TrainingRecipe", ctx: "TrainContext", model: "PreTrainedModel", vision: Vision | None
) -> "dict[str, Tensor]":
    device = torch.device(ctx.resources.device)
    model.to(device).eval()
    dtype = _AUTOCAST.get(method.precision)
    found: dict[str, list[float]] = {name: [] for name in COLUMNS}
    with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
        for batch in examples.iter(_ROWS):
            ctx.mark(None, Phase.LOADING)
            images = batch.get(PLACES) or [[] for _ in batch["prompt_ids"]]
            rows = [
                Scored.answer(prompt, answer, trained=mask, images=places)
                for side in ("chosen", "rejected")
                for prompt, answer, mask, places in zip(
                    batch["prompt_ids"], batch[f"{side}_ids"], _masks(batch, side), images, strict=True
                )
            ]
            sums = logps(model, rows, _BATCH, vision)
            for name, part in zip(COLUMNS, (sums[: len(rows) // 2], sums[len(rows) // 2 :]), strict=True):
                found[name] += part
    return {name: torch.tensor(each, dtype=torch.float64) for name, each in found.items()}
