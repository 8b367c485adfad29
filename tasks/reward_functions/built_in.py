"""The built-in reward functions. Each gives 1 to a right answer, and 0 to a wrong one unless it gives partial credit.

An answer may be anything: empty, very long, or made to break its judge. No function raises on an answer, or needs
more than a fixed time for it.
"""

import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lineage.errors import DataError
from tasks.reward_functions.function import RewardFunction

_SHARED = frozenset({"column", "answer_tag", "partial_credit"})
MAX_CHARACTERS = 100_000  # of an answer; a longer one is scored on its last ones


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer and what it is compared with.

    Args:
        text: the completion; with ``answer_tag``, the text in that tag.
        row: column -> its value in the prompt's row.
        num_tokens: of the completion, where the function counts tokens.
    """

    text: str
    row: Mapping[str, object]
    num_tokens: int = 0

    @staticmethod
    def of(completion: str, row: Mapping[str, object], reward: RewardFunction, num_tokens: int = 0) -> "Answer":
        return Answer(text=_tagged(completion[-MAX_CHARACTERS:], reward.answer_tag), row=row, num_tokens=num_tokens)


@dataclass(frozen=True, kw_only=True)
class BuiltIn:
    """One built-in function.

    Args:
        score: of an answer.
        options: those that it reads.
        columns: those that it needs in the rows of prompts.
        check_row: refuses values of those columns, before the first step.
        check_options: refuses options that do not go together.
        counts_tokens: whether it needs a tokenizer.
        starts_processes: whether it waits for processes, so that several answers are scored at once.
    """

    score: Callable[[RewardFunction, Answer], float]
    options: frozenset[str]
    columns: Callable[[RewardFunction], tuple[str, ...]] = lambda reward: ()
    check_row: Callable[[RewardFunction, Mapping[str, object]], None] = lambda reward, row: None
    check_options: Callable[[RewardFunction], None] = lambda reward: None
    counts_tokens: bool = False
    starts_processes: bool = False


def column_of(reward: RewardFunction) -> str:
    """The column that holds the right answer."""
    return reward.column or "answer"


def _exact(reward: RewardFunction, answer: Answer) -> float:
    """Equal to the column, after Unicode NFKC, without white space around it, and with single spaces within.

    Case and punctuation count. Partial credit: the share of characters that agree, each at its own place.
    """
    found, right = normalized(answer.text), normalized(as_text(answer.row[column_of(reward)]))
    if found == right:
        return 1.0
    same = sum(one == other for one, other in zip(found, right, strict=False))
    return credit(reward, same / max(len(found), len(right)))


def credit(reward: RewardFunction, share: float) -> float:
    """Of an answer that is not wholly right."""
    return (reward.partial_credit or 0.0) * share


def normalized(text: str) -> str:
    """NFKC, without white space around it, each run of white space as one space."""
    return " ".join(unicodedata.normalize("NFKC", text).split())


def as_text(value: object) -> str:
    """A column's value as an answer would write it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _require_plain(reward: RewardFunction, row: Mapping[str, object]) -> None:
    name = column_of(reward)
    if not isinstance(row[name], str | int | float):
        raise DataError(f"{name} is {row[name]!r}; text or a number is accepted; mend the row, or set column")


def _tagged(text: str, tag: str | None) -> str:
    """The text in the last pair of tags; without a tag in the configuration, all of it; without one in it, nothing."""
    if tag is None:
        return text
    before, closing, _ = text.rpartition(f"</{tag}>")
    _, opening, inside = before.rpartition(f"<{tag}>")
    return inside if closing and opening else ""


BUILT_IN: Mapping[str, BuiltIn] = {
    "exact": BuiltIn(
        score=_exact, options=_SHARED, columns=lambda reward: (column_of(reward),), check_row=_require_plain
    )
}
