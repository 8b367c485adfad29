"""Rewards for the text of an answer: exact, numeric, regex, format, length."""

import math
import re
from collections import deque
from collections.abc import Mapping

from lineage.errors import ConfigError, DataError
from tasks.reward_functions.answer import (
    SHARED,
    Answer,
    BuiltIn,
    as_text,
    column_of,
    credit,
    matches,
    normalized,
    require_pattern,
)
from tasks.reward_functions.function import RewardFunction

RELATIVE_TOLERANCE = 1e-9  # default: rounding of floats
_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]{1,40})\}\{([^{}]{1,40})\}")  # of LaTeX
_PLAIN = r"(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3})?"
_NUMBER = re.compile(rf"(?<![\w.])(?:(?<![\)\]])(?P<sign>[-+]))?\$?(?P<over>{_PLAIN})(?:\s?/\s?(?P<under>{_PLAIN}))?"
                     r"(?P<percent>\s?\\?%)?")  # fmt: skip
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?(?:[eE][-+]?\d{1,3})?")
_TAGS = ("think", "answer")


def _exact(reward: RewardFunction, answer: Answer) -> float:
    """1 for an answer equal to the column: after NFKC, without white space around it, single spaces within.

    Case and punctuation count. Partial credit: the share of characters that agree, each at its own place.
    """
    found, right = normalized(answer.text), normalized(as_text(answer.row[column_of(reward)]))
    if found == right:
        return 1.0
    same = sum(one == other for one, other in zip(found, right, strict=False))
    return credit(reward, same / max(len(found), len(right)))


def _require_plain(reward: RewardFunction, row: Mapping[str, object]) -> None:
    name = column_of(reward)
    if not isinstance(row[name], str | int | float) or as_text(row[name]).strip() == "":
        raise DataError(f"{name} is {row[name]!r}; text or a number is accepted; mend the row, or set column")


def _numeric(reward: RewardFunction, answer: Answer) -> float:
    """1 where the last number of an answer is that of the column, within a tolerance.

    Numbers may have thousands separators, a fraction (3/4, or LaTeX's), an exponent or a percent sign (12% is 0.12).
    Partial credit falls with the relative error, and is 0 from an error of 100 % on.
    """
    found, right = last_number(answer.text), last_number(as_text(answer.row[column_of(reward)]))
    assert right is not None
    if found is None:
        return 0.0
    relative = RELATIVE_TOLERANCE if reward.relative_tolerance is None else reward.relative_tolerance
    error = abs(found - right)
    if error <= max(reward.tolerance or 0.0, relative * abs(right)):
        return 1.0
    return credit(reward, max(0.0, 1 - error / abs(right)) if right else 0.0)


def _require_number(reward: RewardFunction, row: Mapping[str, object]) -> None:
    name = column_of(reward)
    if isinstance(row[name], bool) or last_number(as_text(row[name])) is None:
        raise DataError(f"{name} is {row[name]!r}, without a number; mend the row, or set column")


def last_number(text: str) -> float | None:
    """The last number of a text; None: it has none that is finite."""
    found = deque(_NUMBER.finditer(_FRACTION.sub(r"\1/\2", text.replace("\u2212", "-"))), maxlen=1)
    return _number_of(found[0]) if found else None


def _number_of(found: re.Match[str]) -> float | None:
    value = _plain_number(found["over"])
    if found["under"]:
        under = _plain_number(found["under"])
        value = value / under if under else math.inf
    value = (-value if found["sign"] == "-" else value) / (100 if found["percent"] else 1)
    return value if math.isfinite(value) else None


def _plain_number(text: str) -> float:
    """A number without its sign; commas that separate no thousands separate numbers, of which the last counts."""
    text = text.rstrip(",")
    return float(text.replace(",", "") if _THOUSANDS.fullmatch(text) else text.rpartition(",")[2])


def _regex(reward: RewardFunction, answer: Answer) -> float:
    """1 where the pattern, or that of the column, is found in the answer. A search of more than 0.5 s finds nothing."""
    pattern = reward.pattern if reward.pattern is not None else str(answer.row[column_of(reward)])
    return float(matches(pattern, answer.text, whole=False))


def _check_regex(reward: RewardFunction) -> None:
    if reward.pattern is not None:
        if reward.column is not None:
            raise ConfigError(f"pattern and column={reward.column}: one of them holds the pattern; remove the other")
        require_pattern(reward.pattern)


def _require_regex(reward: RewardFunction, row: Mapping[str, object]) -> None:
    if reward.pattern is None:
        name = column_of(reward)
        try:
            require_pattern(str(row[name]) if isinstance(row[name], str) else "(")
        except ConfigError as error:
            raise DataError(f"{name} is {row[name]!r}: {error}") from error


def _format(reward: RewardFunction, answer: Answer) -> float:
    """1 for an answer that is its tags in order, each with text in it, and nothing else; or wholly matches ``pattern``.

    Partial credit: the share of opening and closing tags that are there exactly once.
    """
    if reward.pattern is not None:
        return float(matches(reward.pattern, answer.text, whole=True))
    rest, names = answer.text.strip(), reward.tags or _TAGS
    tags = [tag for name in names for tag in (f"<{name}>", f"</{name}>")]
    once = [answer.text.count(tag) == 1 for tag in tags]
    for index, tag in enumerate(tags):
        before, found, rest = rest.partition(tag)
        inside = index % 2 == 1
        if not found or bool(before.strip()) != inside:
            return credit(reward, sum(once) / len(once))
    return 1.0 if all(once) and not rest.strip() else credit(reward, sum(once) / len(once))


def _check_format(reward: RewardFunction) -> None:
    if reward.pattern is not None:
        for name in ("tags", "partial_credit"):
            if getattr(reward, name) is not None:
                raise ConfigError(f"pattern with {name}={getattr(reward, name)}: {name} is of tags; remove one of them")
        require_pattern(reward.pattern)
    elif reward.tags == () or any(not re.fullmatch(r"[\w-]+", tag) for tag in reward.tags or ()):
        raise ConfigError(f"tags={list(reward.tags or ())}: names such as [think, answer] are accepted; change them")


def _length(reward: RewardFunction, answer: Answer) -> float:
    """1 at ``target_tokens``, falling on a line to 0 at ``width_tokens`` from it (default: the target itself).

    ``bound``: ``both`` (default), or ``upper``: 1 for every answer that is not longer.
    """
    assert reward.target_tokens
    over = answer.num_tokens - reward.target_tokens
    distance = max(0, over) if reward.bound == "upper" else abs(over)
    return max(0.0, 1 - distance / (reward.width_tokens or reward.target_tokens))


def _check_length(reward: RewardFunction) -> None:
    if reward.target_tokens is None:
        raise ConfigError("target_tokens is not set: the number of tokens that an answer should have; set it")


TEXTS: Mapping[str, BuiltIn] = {
    "exact": BuiltIn(
        score=_exact, options=SHARED, columns=lambda reward: (column_of(reward),), check_row=_require_plain
    ),
    "numeric": BuiltIn(
        score=_numeric, options=SHARED | {"tolerance", "relative_tolerance"},
        columns=lambda reward: (column_of(reward),), check_row=_require_number,
    ),
    "regex": BuiltIn(
        score=_regex, options=frozenset({"column", "answer_tag", "pattern"}), check_options=_check_regex,
        columns=lambda reward: () if reward.pattern is not None else (column_of(reward),), check_row=_require_regex,
    ),
    "format": BuiltIn(
        score=_format, options=frozenset({"tags", "pattern", "partial_credit"}), check_options=_check_format
    ),
    "length": BuiltIn(
        score=_length, options=frozenset({"target_tokens", "width_tokens", "bound"}), check_options=_check_length,
        counts_tokens=True,
    ),
}  # fmt: skip
