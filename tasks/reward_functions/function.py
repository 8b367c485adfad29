"""The configuration of a reward function: a built-in one with its options, or a Python function of the user's."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt

from lineage.fingerprint import Setting
from lineage.source.source_checks import PYTHON, PythonFunction, code_of, python_function

TAKES = "scores as score(prompts, completions, **columns) -> list of numbers"


@dataclass(frozen=True, kw_only=True)
class RewardFunction(Setting):
    """One reward of a stage. An option that the chosen function does not read is refused; ``None`` is its default.

    Args:
        function: a built-in name (``tasks.reward_functions.built_in.BUILT_IN``), ``python:PACKAGE.MODULE.FUNCTION``,
            or ``python:FILE.py:FUNCTION``; None: the built-in function that the reward is named after.
        weight: factor in the sum of rewards; negative: a penalty.
        allow_code: lets ``python:FILE.py:FUNCTION`` run that file.
        column: of the prompts' rows: what answers are compared with. Default: ``answer``; ``target`` of countdown (with
            ``numbers``), ``tools`` of tool_call, ``tests`` of code, and none of json.
        answer_tag: ``answer``: only the text in the last ``<answer>...</answer>`` is scored; an answer without it
            scores 0.
        partial_credit: the most that an answer gets that is not wholly right; each function says its share.
        tolerance, relative_tolerance: of ``numeric``, absolute and as a share of the right number.
        pattern: of ``regex``, ``format`` and ``refusal``.
        tags: of ``format``, in their order.
        target_tokens, width_tokens, bound: of ``length``.
        n: of ``distinct``: words of an n-gram.
        timeout_seconds, memory_mib: of ``code``: processor time and address space of one answer's program.
    """

    function: str | None = None
    weight: float = 1.0
    allow_code: bool = False
    column: str | None = None
    answer_tag: str | None = None
    partial_credit: Annotated[float, Ge(0), Lt(1)] | None = None
    tolerance: Annotated[float, Ge(0)] | None = None
    relative_tolerance: Annotated[float, Ge(0)] | None = None
    pattern: str | None = None
    tags: tuple[str, ...] | None = None
    target_tokens: Annotated[int, Gt(0)] | None = None
    width_tokens: Annotated[int, Gt(0)] | None = None
    bound: Literal["both", "upper"] | None = None
    n: Annotated[int, Gt(0)] | None = None
    timeout_seconds: Annotated[int, Gt(0)] | None = None
    memory_mib: Annotated[int, Ge(64)] | None = None

    def __post_init__(self) -> None:
        code = self.code()
        if code:  # absolute, for a worker that was started elsewhere
            object.__setattr__(self, "function", code.absolute())

    def code(self) -> PythonFunction | None:
        """The Python function that it names; None: it is built in."""
        return python_function(self.function) if self.function and self.function.startswith(PYTHON) else None

    def options(self) -> dict[str, object]:
        """The options that are set."""
        values = {name: getattr(self, name) for name in OPTIONS}
        return {name: value for name, value in values.items() if value is not None}


Rewards = Mapping[str, RewardFunction]
_NOT_OPTIONS = ("function", "weight", "allow_code")
OPTIONS = tuple(each.name for each in fields(RewardFunction) if each.name not in _NOT_OPTIONS)


# Of built-in functions that gave other scores before.
_VERSIONS: Mapping[str, Mapping[str, int]] = {
    "numeric": {"version": 2},  # 1 took the exponent of 5 cm^2, and that of a power but 2*10^3, for the number
}


def identity_of(rewards: Rewards) -> dict[str, object]:
    """What the rewards are, for a fingerprint: of a Python file its name, as no path is part of an identity.

    The code of a Python function is not in it, as a method's is not: ``code_of_rewards`` is recorded, and compared.
    """
    return {
        key: {
            **reward.options(), **_VERSIONS.get(name := _name(key, reward), {}), "function": name,
            "weight": reward.weight,
        }
        for key, reward in rewards.items()
    }  # fmt: skip


def _name(key: str, reward: RewardFunction) -> str:
    code = reward.code()
    if code and code.file:
        return f"{PYTHON}{Path(code.file).name}:{code.name}"
    return reward.function or key


def code_of_rewards(rewards: Rewards) -> dict[str, str]:
    """Reward -> digest of the code of its Python function; built-in functions are not in it.

    Raises:
        ConfigError: there is no such code.
    """
    functions = {key: reward.code() for key, reward in rewards.items()}
    return {key: code_of(function, TAKES) for key, function in functions.items() if function}
