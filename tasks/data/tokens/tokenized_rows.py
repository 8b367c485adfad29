"""What a trainer is given, and the account of what it is not given: shown before the first step."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lineage.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from tasks.method import Input

logger = logging.getLogger(__name__)
NUM_SAMPLES = 3
Columns = dict[str, list[list[int]]]


@dataclass(kw_only=True)
class TokenizedRows:
    """What a trainer is given, and what became of every row.

    Args:
        num_rows: rows that came in.
        columns: token lists, one entry per row that is trained on (per chunk, for raw text).
        samples: texts of the first rows as they are trained, the trained part in ⟦ ⟧.
        cut, dropped: row_ids of rows that lost their end, and of rows that are not trained on.
        num_tokens, num_trained: tokens in ``columns``, and those among them that are trained.
    """

    num_rows: int
    columns: Columns
    samples: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    num_tokens: int = 0
    num_trained: int = 0

    @property
    def metrics(self) -> dict[str, float]:
        return {
            "rows": float(self.num_rows),
            "rows_cut": float(len(self.cut)),
            "rows_dropped": float(len(self.dropped)),
            "trained_tokens_percent": 100.0 * self.num_trained / max(self.num_tokens, 1),
        }

    def dataset(self, order: Sequence[int]) -> "Dataset":
        """The rows in the order of training."""
        from datasets import Dataset

        return Dataset.from_dict(self.columns).select(order)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))


def marked(tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int], trained: Sequence[bool]) -> str:
    """The decoded text with every trained stretch in ⟦ ⟧."""
    text, place = "", 0
    while place < len(ids):
        end = place
        while end < len(ids) and trained[end] == trained[place]:
            end += 1
        piece = tokenizer.decode(ids[place:end])
        text += f"⟦{piece}⟧" if trained[place] else piece
        place = end
    return text


def show(result: TokenizedRows, rows: "Input", max_length: int) -> None:
    """Logs what is trained and what is not, before the first step.

    Raises:
        DataError: nothing would be trained.
    """
    if not len(result):
        raise DataError(
            f"no row of {rows.name!r} has a trained token within max_length={max_length}: all {result.num_rows} rows "
            "were left out; raise max_length, or check that the rows have answers that fit it"
        )
    shares = " ".join(f"{name}={value:g}" for name, value in result.metrics.items())
    logger.info("rows_of=%s max_length=%d %s", rows.name, max_length, shares)
    if result.cut:
        logger.warning("rows_cut=%d max_length=%d row_ids=%s", len(result.cut), max_length, ",".join(result.cut))
    if result.dropped:
        logger.warning(
            "rows_dropped=%d reason=nothing_to_train row_ids=%s", len(result.dropped), ",".join(result.dropped)
        )
    for sample in result.samples:
        logger.info("sample (trained tokens in ⟦ ⟧): %s", sample)
