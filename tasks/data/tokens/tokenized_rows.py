"""What a trainer is given, and the account of what it is not given: shown before the first step."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lineage.errors import DataError
from tasks.data.kinds import LABEL_NAMES, RowKind
from tasks.data.tokens.account import Account
from tasks.data.tokens.chunks import FILLS_NO_CHUNK

if TYPE_CHECKING:
    from datasets import Dataset

    from tasks.recipe import Input

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TokenizedRows:
    """The tokens of prepared rows, on disk, and what became of every row.

    Args:
        examples: what a trainer is given, in the order of the rows that came in: rows, chunks or packs.
    """

    kind: RowKind
    account: Account
    examples: "Dataset"

    @property
    def metrics(self) -> dict[str, float]:
        return self.account.metrics

    @property
    def columns(self) -> dict[str, list[list[int]]]:
        """All tokens, in memory."""
        found: dict[str, list[list[int]]] = self.examples[:]
        return found

    def dataset(self, order: Sequence[int]) -> "Dataset":
        """The rows in the order of training, as a trainer is given those of their kind."""
        return self.kind.examples(self.examples.select(order))

    def __len__(self) -> int:
        return self.account.num_examples

    def require_like(self, previous_percent: float | None, stage: str = "STAGE") -> None:
        """That the share of trained tokens is like that of the last run: where it halves, a mask or a template broke.

        Prompts have no such share: their answers are generated.

        Args:
            previous_percent: of the last run; None: there is none.
        Raises:
            DataError: it is less than half of what it was.
        """
        percent = self.account.trained_percent
        if not self.account.gets_loss:
            return
        if previous_percent is not None and percent < previous_percent / 2:
            raise DataError(
                f"{percent:.3g} % of the tokens get loss, and the last run trained {previous_percent:.3g} %; at least "
                "half of the last run's share is accepted; look at the samples in the log, and mend the rows, the chat "
                f"template or max_length; or accept it: accept_label_drop=[{stage}]"
            )


def show(result: TokenizedRows, rows: "Input", max_length: int) -> None:
    """Logs what is trained and what is not, before the first step.

    Raises:
        DataError: nothing would be trained.
    """
    account = result.account
    if not len(result):
        raise _nothing_to_train(account, rows.name, max_length)
    shares = " ".join(f"{name}={value:g}" for name, value in account.metrics.items())
    lengths = " ".join(f"length_{name}={value}" for name, value in account.quantiles.items())
    logger.info("rows_of=%s max_length=%d %s %s", rows.name, max_length, shares, lengths)
    if account.cut.count:
        logger.warning("rows_cut=%d max_length=%d row_ids=%s", account.cut.count, max_length, account.cut)
    if account.prompts_cut.count:
        logger.warning("prompts_cut=%d row_ids=%s", account.prompts_cut.count, account.prompts_cut)
    for reason, named in account.dropped.items():
        logger.warning("rows_dropped=%d reason=%s row_ids=%s", named.count, reason, named)
    if account.labels and len(account.labels) < len(LABEL_NAMES):
        logger.warning("rows_of=%s labels=%s: every answer is %s", rows.name, account.labels, *account.labels)
    for sample in account.samples:
        logger.info("sample (trained tokens in ⟦ ⟧): %s", sample)


def _nothing_to_train(account: Account, name: str, max_length: int) -> DataError:
    if FILLS_NO_CHUNK in account.dropped:
        return DataError(
            f"all texts of {name!r} together are {account.length} tokens, less than one chunk of "
            f"max_length={max_length}; lower max_length, or give more text"
        )
    if not account.gets_loss:
        return DataError(
            f"no prompt of {name!r} fits max_length={max_length}: all {account.num_rows} were left out; raise "
            "max_length or max_prompt_length, or set too_long=cut_prompt"
        )
    return DataError(
        f"no row of {name!r} has a trained token within max_length={max_length}: all {account.num_rows} rows "
        "were left out; raise max_length, or check that the rows have answers that fit it"
    )
