"""Rewards for answers in a formal language: json, tool_call, countdown."""

import ast
import json
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING

import orjson

from lineage.errors import DataError
from tasks.reward_functions.answer import SHARED, Answer, BuiltIn, credit, json_of, unfenced
from tasks.reward_functions.function import RewardFunction

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator

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
        raise DataError(f"{reward.column} is {wanted!r}; a list of keys or a JSON Schema is accepted; mend the row")
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
        raise DataError(f"{what} is not a JSON Schema: {error.message}; mend the row") from error


def _fits(schema: Mapping[str, object], value: object) -> bool:
    try:
        return bool(_validator(json.dumps(schema)).is_valid(value))
    except Exception:  # a reference that cannot be resolved, or a number beyond the range of floats
        return False


@lru_cache(maxsize=1024)
def _validator(schema: str) -> "Draft202012Validator":
    from jsonschema import Draft202012Validator
    from referencing import Registry

    return Draft202012Validator(json.loads(schema), registry=Registry())  # which fetches no reference


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
    tools = _parameters(answer.row[_column_of_tools(reward)], _column_of_tools(reward))
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


def _column_of_tools(reward: RewardFunction) -> str:
    return reward.column or _TOOLS


def _parameters(value: object, what: str) -> Mapping[str, Mapping[str, object]]:
    """Name of a declared tool -> the JSON Schema of its arguments.

    Raises:
        DataError: the column holds no tools.
    """
    tools = json_of(value, what)
    if not isinstance(tools, list) or not tools:
        raise DataError(
            f"{what} is {tools!r}; a list of tools in OpenAI's form is accepted; mend the row, or set column"
        )
    found: dict[str, Mapping[str, object]] = {}
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(f"{what} has a tool {tool!r} without a name; OpenAI's form is accepted; mend the row")
        parameters = function.get("parameters") or {}
        if not isinstance(parameters, dict):
            raise DataError(f"{what}: the parameters of {function['name']} are no JSON Schema; mend the row")
        found[function["name"]] = parameters
    return found


def _check_tools(reward: RewardFunction, row: Mapping[str, object]) -> None:
    name = _column_of_tools(reward)
    for tool, parameters in _parameters(row[name], name).items():
        _require_schema(parameters, f"{name}: the parameters of {tool}")


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
        raise DataError(f"{_NUMBERS} is {numbers!r}; a list of whole numbers is accepted; mend the row")
    target = row[name]
    if isinstance(target, bool) or not re.fullmatch(r"-?\d{1,30}(\.\d{1,30})?", str(target)):
        raise DataError(f"{name} is {target!r}; a number is accepted; mend the row, or set column")


STRUCTURED: Mapping[str, BuiltIn] = {
    "json": BuiltIn(
        score=_json, options=SHARED, columns=lambda reward: (reward.column,) if reward.column else (),
        check_row=_check_json,
    ),
    "tool_call": BuiltIn(
        score=_tool_call, options=SHARED, columns=lambda reward: (_column_of_tools(reward),), check_row=_check_tools
    ),
    "countdown": BuiltIn(
        score=_countdown, options=SHARED, columns=lambda reward: (_NUMBERS, reward.column or _TARGET),
        check_row=_check_countdown,
    ),
}  # fmt: skip
