"""Log-probabilities and rewards of models, in batches of rows of similar length.

Shapes: B rows in a batch, T tokens of the longest, K positions whose logits are needed.
"""

import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from lineage.filesystem.digest import DigestCache
from lineage.filesystem.files import atomic_write
from lineage.filesystem.lock import take_for_work
from lineage.fingerprint import digest_json
from tasks.data.kinds import IGNORED
from tasks.model.positions import fix_length, reads_padding
from tasks.train.evaluation import BATCH_LOGITS, BATCH_TOKENS

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

    from tasks.context import TrainContext
    from tasks.model.vision import Vision

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Batches:
    """How rows are divided into batches, and the batches over workers: those of one worker are those of several.

    Args:
        rows, tokens: of a batch, at most; tokens include padding; None: any number.
        rank, world_size: of this worker; each computes its own batches, and all get all results.
        count: is called with the number of rows of each batch, by any worker, once it is computed.
    """

    rows: int | None = None
    tokens: int | None = None
    rank: int = 0
    world_size: int = 1
    count: Callable[[int], None] = lambda rows: None

    @staticmethod
    def of(ctx: "TrainContext") -> "Batches":
        """Those of a stage: ``micro_batch_size`` rows, or by tokens where it is ``auto``."""
        rows = ctx.resources.micro_batch_size
        return Batches(
            rows=None if rows == "auto" else rows, tokens=BATCH_TOKENS if rows == "auto" else None,
            rank=ctx.rank, world_size=ctx.world_size,
        )  # fmt: skip

    def counted(self, part: Callable[[str, int, int], None], what: str, rows: int) -> "Batches":
        """The same, reporting how many of that many rows are done."""
        done = 0

        def count(more: int) -> None:
            nonlocal done
            done = min(rows, done + more)
            part(what, done, rows)

        return replace(self, count=count)

    def size(self, longest: int, max_tokens: int | None) -> int:
        """Rows of the batch of a row and others that are no longer."""
        limits = [limit // longest for limit in (self.tokens, max_tokens) if limit]
        return max(1, min([*limits, *([self.rows] if self.rows else [])]))


class Loading:
    """A model that is loaded at its first use: what is known of it may need none."""

    def __init__(self, load: "Callable[[], PreTrainedModel]") -> None:
        self._load = load
        self._model: PreTrainedModel | None = None

    def __call__(self) -> "PreTrainedModel":
        self._model = self._model or self._load()
        return self._model


CACHE_FOLDER = "scores"  # in the store's cache
_LOCK_SECONDS = 10.0  # less than workers wait for each other


@dataclass(frozen=True, kw_only=True)
class Cache:
    """What models gave to rows, for all runs and sweeps of a store: nothing is measured twice.

    Args:
        folder: of the store's cache; None: nothing is kept.
        settings: what besides the model and the rows decides the result, to its last bit.
        batches: of the stage; the first worker reads and writes.
    """

    folder: Path | None
    settings: Mapping[str, object]
    batches: Batches

    def found(self, weights: str, what: str, rows: object, compute: Callable[[], object]) -> object:
        """A value of JSON, computed where it is not known; where another process is at it, its value is waited for.

        Args:
            weights: digest of the model.
            what: is measured.
            rows: that it is measured on, as JSON.
        """
        if self.folder is None:
            return compute()
        key = digest_json({"weights": weights, "what": what, "rows": rows, "settings": self.settings})
        path = self.folder / CACHE_FOLDER / key[:2] / f"{key}.json"
        with ExitStack() as held:
            is_free, known = False, None
            while known is None and not is_free:
                known, is_free = self._known_or_taken(path, held)
            if known is not None:
                return known
            value = compute()
            if self.batches.rank == 0:
                atomic_write(path, json.dumps(value))
                _lock_of(path).unlink(missing_ok=True)
            return value

    def _known_or_taken(self, path: Path, held: ExitStack) -> tuple[object, bool]:
        """What is known, and whether this stage may compute it; on all workers."""
        found: list[object] = [self._read(path) if self.batches.rank == 0 else None, False]
        if self.batches.rank == 0 and found[0] is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            is_free = take_for_work(_lock_of(path), held, _LOCK_SECONDS)
            found = [self._read(path), is_free]
        if self.batches.world_size > 1:
            import torch

            torch.distributed.broadcast_object_list(found, src=0)
        return found[0], bool(found[1])

    def with_images(self, rows: object, vision: "Vision | None", places: Sequence[Sequence[int]]) -> object:
        """Rows, as JSON, with the images that they have.

        Args:
            places: of each row's images among those of ``vision``.
        """
        if vision is None or self.folder is None:
            return rows
        images = vision.key(DigestCache(self.folder / "digests.json"))
        return {"rows": rows, "places": [[*each] for each in places], **images}

    def alone(self, **settings: object) -> "Cache":
        """Of the first worker alone, for what no model computes."""
        return replace(self, settings=settings, batches=Batches())

    def _read(self, path: Path) -> object:
        try:
            value: object = json.loads(path.read_text(encoding="utf-8"))
            os.utime(path.parent)  # `gc` reads it as the time of last use
        except (OSError, ValueError):  # another process deletes it, or the disk was full
            return None
        return value


def _lock_of(path: Path) -> Path:
    return path.with_suffix(".lock")


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A row to score.

    Args:
        input_ids: at least one token.
        mask: 1 for each token that counts, 0 for the others; the first token has no context and never counts.
        row_id: of the prepared row.
        group: rows of one group are not independent of each other.
        images: the places of its images.
        domain: the label of the row; None: it has none.
    """

    input_ids: Sequence[int]
    mask: Sequence[int]
    row_id: str = ""
    group: str = ""
    images: Sequence[int] = ()
    domain: str | None = None

    @staticmethod
    def answer(
        prompt: Sequence[int],
        answer: Sequence[int],
        row_id: str = "",
        group: str = "",
        trained: Sequence[int] = (),
        images: Sequence[int] = (),
    ) -> "Scored":
        """A prompt with its answer, whose tokens count; ``trained``: its mask, empty: all of them."""
        mask = [0] * len(prompt) + list(trained or [1] * len(answer))
        return Scored(input_ids=[*prompt, *answer], mask=mask, row_id=row_id, group=group, images=images)

    @property
    def num_tokens(self) -> int:
        return sum(self.mask[1:])

    @property
    def first(self) -> int:
        """Position of the first token that counts."""
        return next((index for index, counts in enumerate(self.mask) if index and counts), len(self.mask) - 1)


def logps(
    model: "PreTrainedModel", rows: Sequence[Scored], batch_size: int | Batches, vision: "Vision | None" = None
) -> list[float]:
    """Log-probability of each row's masked tokens given all before them, summed, in nats; in order of the rows."""
    import torch

    lengths = [len(row.input_ids) for row in rows]
    max_tokens = BATCH_LOGITS // model.config.get_text_config().vocab_size
    with torch.inference_mode(), without_router_loss(model):
        return in_batches(
            lambda batch: _batch_logps(model, [rows[index] for index in batch], vision),
            lengths,
            batch_size,
            max_tokens,
            model,
        )


def _batch_logps(model: "PreTrainedModel", rows: Sequence[Scored], vision: "Vision | None") -> list[float]:
    import torch

    if vision and any(row.images for row in rows):
        return _logps_with_images(model, rows, vision)
    ids_BT, attention_BT = padded([row.input_ids for row in rows], model.device, left=True)
    mask_BT, _ = padded([[0, *row.mask[1:]] for row in rows], model.device, left=True)
    # Padding on the left aligns the ends: logits are needed from the first position that predicts a counted token.
    keep = max(len(row.input_ids) - row.first for row in rows)
    # A model that reads padding gets none.
    is_plain = reads_padding(model.config.get_text_config().to_dict())
    positions = {} if is_plain else {"position_ids": (attention_BT.cumsum(1) - 1).clamp(min=0)}
    kept = {"logits_to_keep": keep + 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    outputs = model(input_ids=ids_BT, attention_mask=attention_BT, use_cache=False, **positions, **kept)
    logits_BKV = outputs.logits[:, -keep - 1 : -1]
    targets_BK, mask_BK = ids_BT[:, -keep:], mask_BT[:, -keep:]
    logps_BK = -torch.nn.functional.cross_entropy(
        logits_BKV.float().flatten(0, 1), targets_BK.flatten(), reduction="none"
    ).view_as(targets_BK)
    return [float(total) for total in (logps_BK.double() * mask_BK).sum(1)]


def _logps_with_images(model: "PreTrainedModel", rows: Sequence[Scored], vision: "Vision") -> list[float]:
    """The same where the model itself finds the positions of images, from rows padded on the right as in training."""
    import torch

    ids_BT, attention_BT = padded([row.input_ids for row in rows], model.device, left=False)
    mask_BT, _ = padded([[0, *row.mask[1:]] for row in rows], model.device, left=False)
    images = vision.inputs([row.images for row in rows], ids_BT)
    logits_BTV = model(input_ids=ids_BT, attention_mask=attention_BT, use_cache=False, **images).logits[:, :-1]
    logps_BT = -torch.nn.functional.cross_entropy(
        logits_BTV.float().flatten(0, 1), ids_BT.where(mask_BT == 1, IGNORED)[:, 1:].flatten(), reduction="none"
    ).view_as(ids_BT[:, 1:])
    return [float(total) for total in logps_BT.double().sum(1)]


def rewards(
    model: "PreTrainedModel", rows: Sequence[Sequence[int]], batch_size: int | Batches, vision: "Vision | None" = None,
    images: Sequence[Sequence[int]] = (),
) -> list[float]:  # fmt: skip
    """The reward model's score of each tokenized conversation, in order.

    Args:
        images: the places of each one's images among those of ``vision``.
    """
    import torch

    from tasks.train.losses.rewards import sequence_scores

    def scores(batch: Sequence[int]) -> list[float]:
        ids_BT, attention_BT = padded([rows[index] for index in batch], model.device, left=False)
        seen = vision.inputs([images[index] for index in batch], ids_BT) if vision else {}
        found: list[float] = sequence_scores(model, ids_BT, attention_BT, **seen).tolist()
        return found

    with torch.inference_mode():
        return in_batches(scores, [len(row) for row in rows], batch_size)


@contextmanager
def without_router_loss(model: "PreTrainedModel") -> Iterator[None]:
    """Switches off the router loss of a mixture of experts, which fails in generation."""
    config = model.config.get_text_config()
    own = getattr(config, "output_router_logits", None)
    if own:
        config.output_router_logits = False
    try:
        yield
    finally:
        if own:
            config.output_router_logits = own


@contextmanager
def generating(model: "PreTrainedModel", *, longest: int | None = None, **settings: object) -> Iterator[None]:
    """Replaces the model's generation config, from which ``generate`` takes all that its arguments leave out.

    In training mode a gradient checkpoint would switch the cache off, and an adapter's dropout would add noise.

    Args:
        longest: tokens of prompt and answer for ``fix_length``, unless a training has set it.
    """
    import torch
    from transformers import GenerationConfig

    from tasks.train.sharding import is_divided

    own, was_training = model.generation_config, model.training
    # Buffers of gathered layers would be tensors of inference, in which a training cannot gather them.
    without_gradients = torch.no_grad() if is_divided(model) else torch.inference_mode()
    model.generation_config = GenerationConfig(**settings)
    model.eval()
    before = fix_length(model, None)
    fix_length(model, before or longest)
    try:
        with without_gradients, without_router_loss(model):
            yield
    finally:
        fix_length(model, before)
        model.generation_config = own
        model.train(was_training)


def in_batches(
    compute: Callable[[Sequence[int]], Sequence[Result]],
    lengths: Sequence[int],
    batch_size: int | Batches,
    max_tokens: int | None = None,
    model: "PreTrainedModel | None" = None,
) -> list[Result]:
    """The result of each row, in order; computed in batches, the longest rows first, so that there is little padding.

    Several workers take the batches in turn, so that each result has the bits that one worker would compute.

    Args:
        compute: the results of the rows of these indices.
        batch_size: rows of a batch at most, computed by this process alone; or how workers divide them.
        max_tokens: of a batch including padding; a longer row is a batch of its own.
        model: that reads the rows, padded on the left; where padding changes a row, a batch has rows of one length.
    """
    equal = model is not None and reads_padding(model.config.get_text_config().to_dict())
    batches = Batches(rows=batch_size) if isinstance(batch_size, int) else batch_size
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    found, start, number = dict[int, Result](), 0, 0
    while start < len(order):
        batch = order[start : start + batches.size(lengths[order[start]], max_tokens)]
        batch = [index for index in batch if not equal or lengths[index] == lengths[batch[0]]]
        if number % batches.world_size == batches.rank:
            found.update(zip(batch, compute(batch), strict=True))
        start, number = start + len(batch), number + 1
        batches.count(len(batch))
    found = _of_all_workers(found, batches)
    return [found[index] for index in range(len(lengths))]


def _of_all_workers(own: dict[int, Result], batches: Batches) -> dict[int, Result]:
    if batches.world_size == 1:
        return own
    import torch

    parts: list[dict[int, Result]] = [own] * batches.world_size
    torch.distributed.all_gather_object(parts, own)
    return {index: result for part in parts for index, result in part.items()}


def padded(
    rows: Sequence[Sequence[int]], device: "torch.device", *, left: bool, pad: int = 0
) -> "tuple[Tensor, Tensor]":
    """Padded rows as a tensor, and its attention mask."""
    import torch

    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), pad, dtype=torch.long)
    attention = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        where = slice(longest - len(row), longest) if left else slice(0, len(row))
        ids[index, where] = torch.tensor(row, dtype=torch.long)
        attention[index, where] = 1
    return ids.to(device), attention.to(device)
