"""An answer to score, and what the built-in functions of rewards share."""

import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lineage.errors import ConfigError, DataError
from tasks.reward_functions.function import RewardFunction

MAX_CHARACTERS = 100_000  # of an answer; of a longer one, the last ones are scored
SEARCH_SECONDS = 0.5  # of one regular expression in one answer
SHUFFLED, EMPTY = "shuffled", "empty"  # known-wrong answers
SHARED = frozenset({"column", "answer_tag", "partial_credit"})


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer and what it is compared with.

    Args:
        text: the completion; with ``answer_tag``, the text in the last such tag.
        row: column -> its value in the prompt's row.
        num_tokens: number of tokens of the completion, where the function counts them.
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
        score: scores an answer.
        options: the options that it reads.
        columns: the columns that it needs in the rows of prompts.
        check_row: refuses values of those columns, before the first step.
        check_options: refuses options that cannot be combined.
        counts_tokens: whether it needs a tokenizer.
        starts_processes: whether it waits for processes, so that several answers are scored at once.
        package: module and name of a package of the extra ``eval`` that it needs.
        small_is_good: as a metric.
        bounded: whether scores lie in [0, 1].
        right: a right answer to a row, as far as the row says one: a gate is tested with it.
        wrong: the known-wrong answers that it must tell from the right ones: the right ones of other rows, and none.
    """

    score: Callable[[RewardFunction, Answer], float]
    options: frozenset[str]
    columns: Callable[[RewardFunction], tuple[str, ...]] = lambda reward: ()
    check_row: Callable[[RewardFunction, Mapping[str, object]], None] = lambda reward, row: None
    check_options: Callable[[RewardFunction], None] = lambda reward: None
    counts_tokens: bool = False
    starts_processes: bool = False
    package: tuple[str, str] | None = None
    small_is_good: bool = False
    bounded: bool = True
    right: Callable[[RewardFunction, Mapping[str, object]], str | None] = lambda reward, row: None
    wrong: Callable[[RewardFunction], tuple[str, ...]] = lambda reward: (SHUFFLED, EMPTY)


def column_of(reward: RewardFunction) -> str:
    """The column that holds the right answer."""
    return reward.column or "answer"


def credit(reward: RewardFunction, share: float) -> float:
    """The partial credit of an answer of which ``share`` is right."""
    return (reward.partial_credit or 0.0) * share


def normalized(text: str) -> str:
    """NFKC, without white space around it, each run of white space as one space."""
    return " ".join(unicodedata.normalize("NFKC", text).split())


def references(value: object) -> list[str]:
    """The accepted texts of a column: one, or a list of them."""
    return [as_text(each) for each in (value if isinstance(value, list) else [value])]


def in_tag(reward: RewardFunction, text: str) -> str:
    """An answer whose scored text this is."""
    return text if reward.answer_tag is None else f"<{reward.answer_tag}>{text}</{reward.answer_tag}>"


def as_text(value: object) -> str:
    """A column's value as an answer would write it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def json_of(value: object, what: str) -> object:
    """A column's value, decoded where it is JSON text (DataError: it is text that is not JSON)."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise DataError(f"{what} is not JSON: {error}; correct the row") from error


def unfenced(text: str) -> str:
    """The last Markdown code block of an answer; without one, all of it."""
    parts = text.split("```")
    blocks = [parts[index] for index in range(1, len(parts) - 1, 2)]
    return blocks[-1].partition("\n")[2] if blocks else text


def check_tags(option: str, tags: Sequence[str]) -> None:
    """Refuses what is not a name of a tag, and a name that is there twice.

    Args:
        option: that sets them, for the message.
    """
    if len(set(tags)) < len(tags) or not all(re.fullmatch(r"[\w-]+", tag) for tag in tags):
        raise ConfigError(f"{option}={[*tags]}: different names such as think, answer are accepted; change them")


def require_pattern(pattern: str) -> None:
    """Refuses what is not a regular expression."""
    import regex

    try:
        regex.compile(pattern)
    except regex.error as error:
        raise ConfigError(f"pattern {pattern!r}: {error}; a regular expression is accepted; correct it") from error


def matches(pattern: str, text: str, *, whole: bool) -> bool:
    """Whether a pattern is found in a text, or is the whole text; False where that takes ``SEARCH_SECONDS``.

    The standard library's ``re`` cannot be stopped; ``regex`` can, and reads the same patterns.
    """
    import regex

    compiled = regex.compile(pattern)
    try:
        return bool((compiled.fullmatch if whole else compiled.search)(text, timeout=SEARCH_SECONDS, concurrent=True))
    except TimeoutError:
        return False


def _tagged(text: str, tag: str | None) -> str:
    """The text in the last pair of tags; without a tag in the configuration, all of it; without one in it, nothing."""
    if tag is None:
        return text
    before, closing, _ = text.rpartition(f"</{tag}>")
    _, opening, inside = before.rpartition(f"<{tag}>")
    return inside if closing and opening else ""
