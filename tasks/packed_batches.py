"""Micro batches for the packed forward: TRL's collators, with the layout of the real tokens added."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from tasks.packed_forward import is_packable, pack

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

Example = dict[str, list[int]]
Batch = dict[str, "Tensor"]
Collator = Callable[[list[Example]], Batch]


class PackedCollator:
    """Collates like ``collate``, then adds where the real tokens stand.

    Args:
        pairs: the second half of a batch answers what the first half answers; common first tokens are kept once.
    """

    def __init__(self, collate: Collator, *, pairs: bool = False) -> None:
        self.collate = collate
        self.pairs = pairs

    def __call__(self, examples: list[Example]) -> Batch:
        batch = self.collate(examples)
        shared = common_tokens(batch["input_ids"], batch["attention_mask"]) if self.pairs else None
        return {**batch, **pack(batch["attention_mask"], shared)}


def unpacked(collate: Collator) -> Collator:
    """Collates the rows of packs, each as a row of its own: a row that is not in the grid of another cannot see it."""

    def rows(example: Example) -> Iterator[Example]:
        place = 0
        for length in example["seq_lengths"]:
            yield {name: example[name][place : place + length] for name in ("input_ids", "labels")}
            place += length

    return lambda examples: collate([row for example in examples for row in rows(example)])


def common_tokens(ids_RL: "Tensor", attention_RL: "Tensor") -> "Tensor":
    """Per row, how many first tokens equal those of the row R/2 before it; 0 in the first half."""
    half = len(ids_RL) // 2
    equal = (ids_RL[:half] == ids_RL[half:]) & attention_RL[:half].bool() & attention_RL[half:].bool()
    shared_R = ids_RL.new_zeros(len(ids_RL))
    shared_R[half:] = equal.long().cumprod(1).sum(1)
    return shared_R


def collator_for(model: "PreTrainedModel", collate: Collator, *, pairs: bool = False) -> Collator:
    """``collate``, packed where the model's architecture is known to give the same numbers packed."""
    return PackedCollator(collate, pairs=pairs) if is_packable(model) else collate
