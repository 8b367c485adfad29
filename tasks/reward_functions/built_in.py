"""The built-in reward functions. Each gives 1 to a right answer, and 0 to a wrong one unless it gives partial credit.

For the text of an answer: exact, numeric, f1, rouge_l, bleu, regex, format, length, tokens, refusal, distinct. For one
in a formal language: json, tool_call, countdown.

An answer may be anything: empty, very long, or written to break the function. No function raises on an answer, or
takes more than a fixed time for it.
"""

import ast
import json
import math
import operator
import re
import unicodedata
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING

import orjson

from lineage.errors import ConfigError, DataError
from tasks.reward_functions.answer import (
    EMPTY,
    SHARED,
    Answer,
    BuiltIn,
    as_text,
    check_tags,
    column_of,
    credit,
    in_tag,
    json_of,
    matches,
    normalized,
    references,
    require_pattern,
    unfenced,
)
from tasks.reward_functions.code import CODE
from tasks.reward_functions.function import RewardFunction

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import ValidationError

RELATIVE_TOLERANCE = 1e-9  # default: rounding of floats
_LIKE_ASCII = str.maketrans("\u2212\uff0d\u2044\uff0c\uff0e\uff05", "--/,.%")  # minus, fraction slash; the wide - , . %
# Of LaTeX, with a whole number before it: 1\frac{1}{2} is 3/2.
_FRACTION = re.compile(
    r"(?:(?<![\d.,])(\d{1,15}) ?)?\\[dt]?frac\s?(?:\{([^{}]{1,40})\}|(\d))(?:\{([^{}]{1,40})\}|(\d))"
)
_VULGAR = re.compile(r"(?<![\d.,])(\d{0,15})([\u00bc-\u00be\u2150-\u215e])")  # such as ½ and 1½
# Of thousands: in code, in LaTeX, and spaces that no line is broken at.
_SEPARATOR = re.compile(r"(?<=\d)(?:_|\{,\}|,\\!|\\,|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))")
_SUPERSCRIPTS = str.maketrans("⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "+-0123456789")
_RAISED = re.compile(r"(?<=\d)[⁺⁻]?[⁰¹²³⁴-⁹]{1,3}")
_EXPONENT = r"\s?\^\s?(?:\{\s?([-+]?\d{1,3})\s?\}|([-+]?\d{1,3}))"
_POWER_OF_TEN = re.compile(r"(?<=\d)\s?(?:\\times|\\cdot|[\u00d7\u00b7\u22c5*xX])\s?10" + _EXPONENT)
_POWER = re.compile(r"(?<![\d.,^{])(\d{1,15}(?:\.\d{1,15})?)" + _EXPONENT)
_OF_UNIT = re.compile(r"(?<=[^\W\d_])\}?" + _EXPONENT)  # no number: that of cm^2, \text{cm}^{2} or x^3
_PLAIN = r"(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3})?"
_NUMBER = re.compile(rf"(?<![\w.])(?:(?<![\)\]])(?P<sign>[-+]))?\$?(?:(?P<whole>\d{{1,15}}) (?=\d{{1,15}}\s?/\s?\d))?"
                     rf"(?P<over>{_PLAIN})(?:\s?/\s?(?P<under>{_PLAIN}))?(?P<percent>\s?\\?%)?")  # fmt: skip
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
        raise DataError(f"{name} is {row[name]!r}; text or a number is accepted; correct the row, or set column")


def _numeric(reward: RewardFunction, answer: Answer) -> float:
    """1 where the last number of an answer is that of the column, within a tolerance.

    Numbers may have thousands separators (1,000, 1_000 or LaTeX's 1{,}000), a fraction (3/4, 1 3/4, ½ or LaTeX's), an
    exponent (1e3, 2*10^3, 2^10) or a percent sign (12% is 0.12). An exponent of a unit is left out: 5 cm^2 is 5.
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
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, str | int | float) or last_number(str(value)) is None:
        raise DataError(
            f"{name} is {value!r}, without a number; a number, or text with one, is accepted; correct the "
            "row, or set column"
        )


def last_number(text: str) -> float | None:
    """The last number of a text; None: it has none that is finite."""
    text = _SEPARATOR.sub("", text.translate(_LIKE_ASCII))
    text = _RAISED.sub(lambda found: "^" + found[0].translate(_SUPERSCRIPTS), _FRACTION.sub(_slashed, text))
    text = _OF_UNIT.sub("", _POWER.sub(_power, _POWER_OF_TEN.sub(r"e\1\2", text)))
    text = _VULGAR.sub(lambda found: repr(int(found[1] or 0) + unicodedata.numeric(found[2])), text)
    found = deque(_NUMBER.finditer(text), maxlen=1)
    return _number_of(found[0]) if found else None


def _power(found: re.Match[str]) -> str:
    """A power of a number as a number; as it is where it is none that is finite."""
    try:
        return repr(float(found[1]) ** int(found[2] or found[3]))
    except ArithmeticError:
        return found[0]


def _slashed(found: re.Match[str]) -> str:
    """A fraction of LaTeX with a slash; its sign goes before it."""
    whole, over, under = found[1], (found[2] or found[3]).strip(), (found[4] or found[5]).strip()
    if under.startswith("-"):
        over, under = over.removeprefix("-") if over.startswith("-") else f"-{over}", under.removeprefix("-")
    return f"{whole} {over}/{under}" if whole else f"{over}/{under}"


def _number_of(found: re.Match[str]) -> float | None:
    value = _plain_number(found["over"])
    if found["under"]:
        under = _plain_number(found["under"])
        is_mixed = found["whole"] and value < under
        value = value / under if under else math.inf
        value += float(found["whole"]) if is_mixed else 0
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


def _right_format(reward: RewardFunction, row: Mapping[str, object]) -> str | None:
    return None if reward.pattern is not None else "".join(f"<{tag}>x</{tag}>" for tag in reward.tags or _TAGS)


def _check_format(reward: RewardFunction) -> None:
    if reward.pattern is not None:
        for name in ("tags", "partial_credit"):
            if getattr(reward, name) is not None:
                raise ConfigError(f"pattern with {name}={getattr(reward, name)}: {name} is of tags; remove one of them")
        require_pattern(reward.pattern)
    elif reward.tags == ():
        raise ConfigError("tags=[]: names such as [think, answer] are accepted; change them")
    else:
        check_tags("tags", reward.tags or _TAGS)


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


# One word; each sign of a script without spaces is one.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]|[^\W_\u3040-\u30ff\u3400-\u9fff]+")
_ARTICLES = frozenset({"a", "an", "the"})
_MAX_WORDS = 2_000  # of an answer: ROUGE-L takes the square of it
_REFUSAL = (
    r"(?i)^.{0,100}?\b(i can(no|')?t|i cannot|i am (unable|not able)|i'm (unable|not able)|i (won't|will not)|"
    r"i('m| am) sorry,? but|i must decline|as an ai( language model)?\b)"
)


def words_of(text: str) -> list[str]:
    """The words of a text without case and punctuation, in any script."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())[:_MAX_WORDS]


def _f1(reward: RewardFunction, answer: Answer) -> float:
    """The F1 of words, without case, punctuation and a, an, the; of several accepted answers the best.

    An accepted answer of these three alone keeps them.

    Rajpurkar et al. 2016, arXiv:1606.05250, section 5.
    """

    def one(right: list[str]) -> float:
        dropped = frozenset() if _ARTICLES.issuperset(right) else _ARTICLES  # an answer may be the letter A
        expected, answered = (Counter(word for word in each if word not in dropped) for each in (right, found))
        shared = (expected & answered).total()
        return 2 * shared / (expected.total() + answered.total()) if shared else 0.0

    found = words_of(answer.text)
    return max(one(words_of(each)) for each in references(answer.row[column_of(reward)]))


class _Words:
    """Tokenizer of rouge-score, whose own drops every letter that is not in ASCII."""

    def tokenize(self, text: str) -> list[str]:
        return words_of(text)


def _rouge_l(reward: RewardFunction, answer: Answer) -> float:
    """The F1 of the longest common subsequence of words (Lin 2004), by rouge-score; of several answers the best."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"], tokenizer=_Words())
    right = references(answer.row[column_of(reward)])
    return max(float(scorer.score(each, answer.text)["rougeL"].fmeasure) for each in right)


def _bleu(reward: RewardFunction, answer: Answer) -> float:
    """Sentence BLEU from 0 to 1, by sacrebleu: n-grams up to the length of a short answer, smoothed.

    Its mean over rows is not the BLEU of a corpus.
    """
    from sacrebleu import sentence_bleu

    score = sentence_bleu(answer.text, references(answer.row[column_of(reward)]), use_effective_order=True).score
    return min(1.0, float(score) / 100)


def _require_texts(reward: RewardFunction, row: Mapping[str, object]) -> None:
    name = column_of(reward)
    value = row[name]
    found = value if isinstance(value, list) else [value]
    if not found or not all(isinstance(each, str | int | float) and words_of(as_text(each)) for each in found):
        raise DataError(f"{name} is {row[name]!r}; text with a word, or a list of such texts, is accepted; correct the "
                        "row, or set column")  # fmt: skip


def _right_text(reward: RewardFunction, row: Mapping[str, object]) -> str | None:
    return in_tag(reward, references(row[column_of(reward)])[0])


def _refusal(reward: RewardFunction, answer: Answer) -> float:
    """1 for an answer that refuses: within its first 100 characters as "I can't", "I'm sorry, but", or the pattern."""
    plain = answer.text.replace("\u2019", "'")
    return float(matches(reward.pattern if reward.pattern is not None else _REFUSAL, plain, whole=False))


def _check_refusal(reward: RewardFunction) -> None:
    if reward.pattern is not None:
        require_pattern(reward.pattern)


def _distinct(reward: RewardFunction, answer: Answer) -> float:
    """The share of an answer's n-grams of words (``n``: 2) that differ; 0 for an answer that has none.

    Li et al. 2016, arXiv:1510.03055, within one answer.
    """
    words, n = words_of(answer.text), reward.n or 2
    grams = [tuple(words[at : at + n]) for at in range(len(words) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0


_COLUMN = frozenset({"column", "answer_tag"})


TEXTS: Mapping[str, BuiltIn] = {
    "exact": BuiltIn(
        score=_exact, options=SHARED, columns=lambda reward: (column_of(reward),), check_row=_require_plain,
        right=_right_text,
    ),
    "numeric": BuiltIn(
        score=_numeric, options=SHARED | {"tolerance", "relative_tolerance"},
        columns=lambda reward: (column_of(reward),), check_row=_require_number, right=_right_text,
    ),
    "f1": BuiltIn(
        score=_f1, options=_COLUMN, columns=lambda reward: (column_of(reward),), check_row=_require_texts,
        right=_right_text,
    ),
    "rouge_l": BuiltIn(
        score=_rouge_l, options=_COLUMN, columns=lambda reward: (column_of(reward),), check_row=_require_texts,
        right=_right_text, package=("rouge_score", "rouge-score"),
    ),
    "bleu": BuiltIn(
        score=_bleu, options=_COLUMN, columns=lambda reward: (column_of(reward),), check_row=_require_texts,
        right=_right_text, package=("sacrebleu", "sacrebleu"),
    ),
    "regex": BuiltIn(
        score=_regex, options=frozenset({"column", "answer_tag", "pattern"}), check_options=_check_regex,
        columns=lambda reward: () if reward.pattern is not None else (column_of(reward),), check_row=_require_regex,
        wrong=lambda reward: (EMPTY,),
    ),
    "format": BuiltIn(
        score=_format, options=frozenset({"tags", "pattern", "partial_credit"}), check_options=_check_format,
        right=_right_format, wrong=lambda reward: (EMPTY,),
    ),
    "length": BuiltIn(
        score=_length, options=frozenset({"target_tokens", "width_tokens", "bound"}), check_options=_check_length,
        counts_tokens=True, wrong=lambda reward: (),
    ),
    "tokens": BuiltIn(
        score=lambda reward, answer: float(answer.num_tokens), options=frozenset(), counts_tokens=True,
        small_is_good=True, bounded=False, wrong=lambda reward: (),
    ),
    "refusal": BuiltIn(
        score=_refusal, options=frozenset({"pattern"}), check_options=_check_refusal, small_is_good=True,
        wrong=lambda reward: (),
    ),
    "distinct": BuiltIn(score=_distinct, options=frozenset({"n"}), wrong=lambda reward: (EMPTY,)),
}  # fmt: skip


_TOOLS, _TARGET, _NUMBERS = "tools", "target", "numbers"  # columns
_MAX_EXPRESSION = 500  # characters
_OPERATORS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip
_NOTHING = object()  # no value


def _json(reward: RewardFunction, answer: Answer) -> float:
    """1 for valid JSON, alone or in a code block, that has the keys or fits the JSON Schema of the column.

    Without ``column`` any valid JSON scores 1. Partial credit: the share of the keys (of a schema, of its required
    ones) that are there; of a schema without required keys, half.
    """
    value = _parsed(unfenced(answer.text))
    if value is _NOTHING:
        return 0.0
    if reward.column is None:
        return 1.0
    wanted = json_of(answer.row[reward.column], reward.column)
    if isinstance(wanted, list):
        keys, fits = wanted, True
    else:
        assert isinstance(wanted, dict)
        keys, fits = wanted.get("required", []), _fits(wanted, value)
    there = [isinstance(value, dict) and key in value for key in keys]
    if all(there) and fits:
        return 1.0
    return credit(reward, sum(there) / len(there) if there else 0.5)


def _check_json(reward: RewardFunction, row: Mapping[str, object]) -> None:
    if reward.column is None:
        return
    wanted = json_of(row[reward.column], reward.column)
    if isinstance(wanted, list) and wanted and all(isinstance(key, str) for key in wanted):
        return
    if not isinstance(wanted, dict):
        raise DataError(f"{reward.column} is {wanted!r}; a list of keys or a JSON Schema is accepted; correct the row")
    _require_schema(wanted, reward.column)


def _parsed(text: str) -> object:
    """The value of JSON text; ``_NOTHING`` where it is not JSON. Depth is limited, NaN is refused."""
    try:
        return orjson.loads(text.strip())
    except ValueError:
        return _NOTHING


def _require_schema(schema: Mapping[str, object], what: str) -> None:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError

    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise DataError(f"{what} is not a JSON Schema: {error.message}; correct the row") from error


def _fits(schema: Mapping[str, object], value: object) -> bool:
    try:
        return bool(_validator(json.dumps(schema)).is_valid(value))
    except Exception:  # an unresolvable reference, or a number beyond the range of floats
        return False


@lru_cache(maxsize=1024)
def _validator(schema: str) -> "Draft202012Validator":
    """jsonschema's validator, with keywords of its own where the library takes any time for an answer."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend
    from referencing import Registry

    bounded = extend(Draft202012Validator, {"pattern": _pattern, "uniqueItems": _unique_items})
    validator: Draft202012Validator = bounded(json.loads(schema), registry=Registry())  # no reference is fetched
    return validator


def _pattern(validator: object, pattern: str, value: object, schema: object) -> "Iterator[ValidationError]":
    from jsonschema.exceptions import ValidationError

    if isinstance(value, str) and not matches(pattern, value, whole=False):
        yield ValidationError(f"does not match {pattern!r}")


def _unique_items(validator: object, unique: bool, value: object, schema: object) -> "Iterator[ValidationError]":
    from jsonschema.exceptions import ValidationError

    if unique and isinstance(value, list) and len(set(map(_canonical, value))) < len(value):
        yield ValidationError("has equal items")


def _canonical(value: object) -> str:
    """Text that two values of JSON share where they are equal: 1 is 1.0, and true is not 1."""
    if isinstance(value, dict):
        return f"{{{','.join(f'{json.dumps(key)}:{_canonical(value[key])}' for key in sorted(value))}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_canonical, value))}]"
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value)


def _tool_call(reward: RewardFunction, answer: Answer) -> float:
    """1 for at least one call, all of declared tools with arguments that fit their parameters.

    A call is ``{"name": ..., "arguments": {...}}`` in ``<tool_call>`` tags; without tags the answer is one call, or a
    list of calls. Partial credit: of each call half for a declared name, half for arguments that fit, on the mean.
    """
    after = (text.partition("</tool_call>") for text in answer.text.split("<tool_call>")[1:])
    found = [text for text, closing, _ in after if closing]
    values = [_parsed(text) for text in found or [unfenced(answer.text)]]
    if not found and isinstance(values[0], list):
        values = values[0]
    column = reward.column or _TOOLS
    tools = _parameters(answer.row[column], column)
    shares = [_share(value, tools) for value in values]
    if not shares:
        return 0.0
    share = sum(shares) / len(shares)
    return 1.0 if share == 1 else credit(reward, share)


def _share(call: object, tools: Mapping[str, Mapping[str, object]]) -> float:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or call["name"] not in tools:
        return 0.0
    arguments = call.get("arguments", {})
    right = isinstance(arguments, dict) and _fits(tools[call["name"]], arguments)
    return 1.0 if right and call.keys() <= {"name", "arguments", "id", "type"} else 0.5


def _parameters(value: object, what: str) -> Mapping[str, Mapping[str, object]]:
    """Name of a declared tool -> the JSON Schema of its arguments (DataError: the column holds no tools)."""
    tools = json_of(value, what)
    if not isinstance(tools, list) or not tools:
        raise DataError(
            f"{what} is {tools!r}; a list of tools in OpenAI's form is accepted; correct the row, or set column"
        )
    found: dict[str, Mapping[str, object]] = {}
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(f"{what} has a tool {tool!r} without a name; OpenAI's form is accepted; correct the row")
        parameters = function.get("parameters") or {}
        if not isinstance(parameters, dict):
            raise DataError(f"{what}: the parameters of {function['name']} are not a JSON Schema; correct the row")
        found[function["name"]] = parameters
    return found


def _check_tools(reward: RewardFunction, row: Mapping[str, object]) -> None:
    name = reward.column or _TOOLS
    for tool, parameters in _parameters(row[name], name).items():
        _require_schema(parameters, f"{name}: the parameters of {tool}")


def _example(schema: Mapping[str, object]) -> object:
    """A value for a plain JSON Schema; it need not fit another one."""
    for key in ("const", "default", "examples", "enum"):
        if key in schema:
            value = schema[key]
            return value[0] if key in ("examples", "enum") and isinstance(value, list) and value else value
    kind = schema.get("type")
    if kind == "object" or "properties" in schema or "required" in schema:
        known, required = schema.get("properties"), schema.get("required")
        parts = known if isinstance(known, dict) else {}
        names = required if isinstance(required, list) else []
        return {name: _example(part) if isinstance(part := parts.get(name), dict) else "x" for name in names}
    plain: Mapping[object, object] = {"array": [], "number": 1, "integer": 1, "boolean": True, "null": None}
    return plain.get(kind, "x")


def _right_json(reward: RewardFunction, row: Mapping[str, object]) -> str | None:
    wanted = json_of(row[reward.column], reward.column) if reward.column else []
    if isinstance(wanted, list):
        return in_tag(reward, json.dumps(dict.fromkeys(wanted, 1)))
    assert isinstance(wanted, dict)
    value = _example(wanted)
    return in_tag(reward, json.dumps(value)) if _fits(wanted, value) else None


def _right_call(reward: RewardFunction, row: Mapping[str, object]) -> str | None:
    column = reward.column or _TOOLS
    for name, parameters in _parameters(row[column], column).items():
        arguments = _example({"type": "object", **parameters})
        if _fits(parameters, arguments):
            return in_tag(reward, json.dumps({"name": name, "arguments": arguments}))
    return None


def _countdown(reward: RewardFunction, answer: Answer) -> float:
    """1 for an expression that gives the target and uses each of the ``numbers`` once.

    The last line with text counts; what stands after an equals sign is not read. Only numbers, + - * / and parentheses
    are expressions. Partial credit: for an expression that uses the numbers so and gives another value.
    """
    lines = [line for line in answer.text.splitlines() if line.strip()]
    text = lines[-1].partition("=")[0].strip() if lines else ""
    numbers, target = answer.row[_NUMBERS], answer.row[reward.column or _TARGET]
    found = evaluated(text)
    if found is None:
        return 0.0
    value, used = found
    assert isinstance(numbers, list)
    if Counter(used) != Counter(numbers):
        return 0.0
    return 1.0 if value == Fraction(str(target)) else credit(reward, 1.0)


def evaluated(text: str) -> tuple[Fraction, list[int]] | None:
    """Value of an arithmetic expression and the numbers in it; None: it is none. Nothing is executed."""
    plain = text.replace("\u00d7", "*").replace("\u00f7", "/").replace("\u2212", "-")
    if len(plain) > _MAX_EXPRESSION or not re.fullmatch(r"[\d+\-*/() ]+", plain, re.ASCII):
        return None
    used: list[int] = []
    try:
        return _value(ast.parse(plain, mode="eval").body, used), used
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr, used: list[int]) -> Fraction:
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, used), _value(node.right, used))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, used)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    raise ValueError("no arithmetic")


def _check_countdown(reward: RewardFunction, row: Mapping[str, object]) -> None:
    numbers, name = row[_NUMBERS], reward.column or _TARGET
    if not isinstance(numbers, list) or not numbers or not all(type(each) is int for each in numbers):
        raise DataError(f"{_NUMBERS} is {numbers!r}; a list of whole numbers is accepted; correct the row")
    target = row[name]
    if isinstance(target, bool) or not re.fullmatch(r"-?\d{1,30}(\.\d{1,30})?", str(target)):
        raise DataError(f"{name} is {target!r}; a number is accepted; correct the row, or set column")


STRUCTURED: Mapping[str, BuiltIn] = {
    "json": BuiltIn(
        score=_json, options=SHARED, columns=lambda reward: (reward.column,) if reward.column else (),
        check_row=_check_json, right=_right_json, wrong=lambda reward: (EMPTY,),
    ),
    "tool_call": BuiltIn(
        score=_tool_call, options=SHARED, columns=lambda reward: (reward.column or _TOOLS,), check_row=_check_tools,
        right=_right_call, wrong=lambda reward: (EMPTY,),
    ),
    "countdown": BuiltIn(
        score=_countdown, options=SHARED, columns=lambda reward: (_NUMBERS, reward.column or _TARGET),
        check_row=_check_countdown,
    ),
}  # fmt: skip


BUILT_IN: Mapping[str, BuiltIn] = {**TEXTS, **STRUCTURED, **CODE}
