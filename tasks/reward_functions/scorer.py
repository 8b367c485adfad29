"""Scores answers with the reward functions of a stage, and checks what they return."""

import inspect
import math
import numbers
import os
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from lineage.errors import ConfigError, DataError, PipelineError
from lineage.source.source_checks import PYTHON, PythonFunction, code_of
from tasks.data.reading.python_rows import load_function, place_of_error
from tasks.reward_functions.answer import Answer, BuiltIn, check_tags
from tasks.reward_functions.built_in import BUILT_IN
from tasks.reward_functions.function import TAKES, RewardFunction, Rewards

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, object]
Columns = Mapping[str, Sequence[object]]
Score = Callable[[Sequence[Sequence[Message]], Sequence[str], Columns], object]
# Rewards of TRL, ms-swift and Open R1 -> ours.
PEERS: Mapping[str, str] = {
    **dict.fromkeys(("accuracy", "accuracy_reward", "math"), "numeric, or exact for an answer that is not a number"),
    **dict.fromkeys(("reasoning_accuracy_reward",), "numeric with answer_tag"),
    **dict.fromkeys(("think_format_reward", "format_reward", "tag_count", "tag_count_reward"), "format with tags"),
    **dict.fromkeys(("react_format",), "tool_call, or regex"),
    **dict.fromkeys(("cosine", "cosine_scaled", "get_cosine_scaled_reward"), "numeric and length, each with a weight"),
    **dict.fromkeys(
        ("soft_overlong", "soft_overlong_punishment", "get_soft_overlong_punishment", "len_reward", "length_reward"),
        "length with target_tokens and bound: upper",
    ),
    **dict.fromkeys(("soft_20tokens_completions",), "length with target_tokens=20"),
    **dict.fromkeys(
        ("repetition", "repetition_penalty", "repetition_penalty_reward", "get_repetition_penalty_reward"),
        "a function of yours, python:PACKAGE.MODULE.FUNCTION; sampling.repetition_penalty changes the sampling",
    ),
    **dict.fromkeys(("json_schema", "json_format"), "json"),
    **dict.fromkeys(("code_reward", "code_accuracy", "ioi_code_reward"), "code"),
}  # fmt: skip
_ACCEPTED = "a list with one finite number per completion is accepted"
_MAX_REWARD = 1e15  # trainings compute in fp32, where the variance of numbers beyond 1e19 is infinite
INSTALL = "pip install 'posttrain[eval]'"
_GIVEN = ("prompts", "completions")  # arguments of a user's function, beside the columns


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """One reward function, ready to score.

    Args:
        name: its key in the configuration.
        where: the field of the configuration, for messages.
        weight: factor in the sum of rewards.
        columns: the columns of the prompts' rows that it needs.
        score: scores a batch; what it returns is checked.
        check: checks the values of those columns in the rows of all prompts.
    """

    name: str
    weight: float
    columns: tuple[str, ...]
    score: Score
    check: Callable[[Columns], None] = lambda columns: None
    where: str = "rewards"
    takes_columns: bool = True  # whether it can know the right answer

    def __call__(
        self, prompts: Sequence[Sequence[Message]], completions: Sequence[str], columns: Columns
    ) -> list[float]:
        """The score of each completion.

        Args:
            prompts: messages, one list per completion.
            columns: column of the prompts' rows -> a value per completion.

        Raises:
            PipelineError: the function raises, or returns anything but finite numbers, or one so large that its
                variance is infinite in fp32; names row, function and value.
        """
        _require_columns(self, columns)
        scores = self.score(prompts, completions, columns)
        found = scores.tolist() if hasattr(scores, "tolist") else scores
        if not isinstance(found, list | tuple) or len(found) != len(completions):
            shown = f"{len(found)} values" if isinstance(found, list | tuple) else reprlib.repr(found)
            raise PipelineError(
                f"{self.where}.{self.name} returned {shown} for {len(completions)} completions; {_ACCEPTED}; correct "
                "the function"
            )
        for row, value in enumerate(found):
            if not _is_finite(value):
                raise PipelineError(
                    f"{self.where}.{self.name} returned {reprlib.repr(value)} for row {row} ({_shown(prompts[row])}, "
                    f"completion {reprlib.repr(completions[row])}); {_ACCEPTED}; correct the function"
                )
            if abs(value) * max(1.0, abs(self.weight)) > _MAX_REWARD:
                raise PipelineError(
                    f"{self.where}.{self.name} returned {reprlib.repr(value)} for row {row} ({_shown(prompts[row])}, "
                    f"completion {reprlib.repr(completions[row])}), with weight={self.weight:g}; numbers up to "
                    f"{_MAX_REWARD:g} are accepted, also times the weight; scale them in the function"
                )
        return [float(value) for value in found]


def scorers(rewards: Rewards, tokenizer: "PreTrainedTokenizerBase | None" = None, of: str = "rewards") -> list[Scorer]:
    """The reward functions of a configuration, in its order. Python functions are imported here.

    Args:
        tokenizer: the policy's, for functions that count tokens.
        of: the field of the configuration, for messages.

    Raises:
        ConfigError: as ``check_rewards``; or a function counts tokens, and there is no tokenizer.
        DataError: a Python function cannot be imported, or cannot be called with prompts and completions.
    """
    check_rewards(rewards, of)
    return [
        _python(key, reward, code, of) if (code := reward.code()) else _built_in(key, reward, tokenizer, of)
        for key, reward in rewards.items()
    ]


def check_rewards(rewards: Rewards, of: str = "rewards") -> None:
    """Checks a stage's rewards without running any of them.

    Raises:
        ConfigError: a name, an option or a Python function that does not exist, or an option that it does not read.
    """
    for key, reward in rewards.items():
        where = f"{of}.{key}"
        if not math.isfinite(reward.weight):
            raise ConfigError(f"{where}.weight={reward.weight}: a finite number is accepted; change it")
        name, options = reward.function or key, reward.options()
        if key in BUILT_IN and name != key:
            raise ConfigError(f"{where}.function={name}: {key} is the name of a built-in function; rename the reward")
        if name.startswith(PYTHON):
            if options:
                raise ConfigError(
                    f"{where}.{next(iter(options))}: options are of built-in functions, and {name} reads none; remove "
                    "it, or write it into the function"
                )
            _check_code(where, reward)
            continue
        known = BUILT_IN.get(name)
        if known is None:
            here = f"; here it is {PEERS[name]}" if name in PEERS else ""
            raise ConfigError(
                f"{where}: there is no reward function {name}{here}; accepted: {', '.join(BUILT_IN)}, "
                "python:PACKAGE.MODULE.FUNCTION, and python:FILE.py:FUNCTION with allow_code: true; set "
                f"{where}.function"
            )
        if reward.allow_code:
            raise ConfigError(
                f"{where}.allow_code=true: {name} is built in; it is for python:FILE.py:FUNCTION; remove allow_code"
            )
        unread = sorted(options.keys() - known.options)
        if unread:
            raise ConfigError(
                f"{where}.{unread[0]}={options[unread[0]]}: {name} does not read it; {name} reads "
                f"{', '.join(sorted(known.options))}; remove it, or choose another function"
            )
        try:
            check_tags("answer_tag", [reward.answer_tag] if reward.answer_tag is not None else [])
            _require_package(name, known)
            known.check_options(reward)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error


def _require_package(name: str, known: BuiltIn) -> None:
    if known.package and not find_spec(known.package[0]):
        raise ConfigError(
            f"{name} needs the package {known.package[1]}, which is not installed; install it ({INSTALL}), or choose "
            "another function"
        )


def _check_code(where: str, reward: RewardFunction) -> None:
    try:
        function = reward.code()
        assert function
        if function.file and not reward.allow_code:
            raise ConfigError(
                f"{reward.function} would run that file; set {where}.allow_code=true to let it run, or name a function "
                "of a module, as python:PACKAGE.MODULE.FUNCTION"
            )
        if reward.allow_code and not function.file:
            raise ConfigError(
                f"allow_code=true: {reward.function} is of a module; allow_code is for python:FILE.py:FUNCTION; remove "
                "it"
            )
        code_of(function, TAKES)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def check_columns(found: Sequence[Scorer], columns: Columns) -> None:
    """Checks the rows of all prompts before the first step.

    Raises:
        DataError: a column is missing, or its value in a row is not what the function accepts.
    """
    for scorer in found:
        _require_columns(scorer, columns)
        scorer.check(columns)


def _built_in(key: str, reward: RewardFunction, tokenizer: "PreTrainedTokenizerBase | None", of: str) -> Scorer:
    function = BUILT_IN[reward.function or key]
    names = function.columns(reward)
    if function.counts_tokens and tokenizer is None:
        raise ConfigError(
            f"{of}.{key}: {reward.function or key} counts tokens, and no tokenizer was given; pass the policy's"
        )

    def score(prompts: Sequence[Sequence[Message]], completions: Sequence[str], columns: Columns) -> list[float]:
        def of_row(row: int) -> float:
            text, num_tokens = completions[row], 0
            if function.counts_tokens and tokenizer is not None:
                num_tokens = len(tokenizer(text, add_special_tokens=False)["input_ids"])
            answer = Answer.of(text, {name: columns[name][row] for name in names}, reward, num_tokens)
            try:
                return function.score(reward, answer)
            except Exception as error:
                kind = type(error) if isinstance(error, PipelineError) else PipelineError
                where = f"{_shown(prompts[row])}, completion {reprlib.repr(answer.text)}"
                raise kind(f"{of}.{key}: row {row} ({where}): {error}") from error

        if not function.starts_processes:
            return list(map(of_row, range(len(completions))))
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            return list(pool.map(of_row, range(len(completions))))

    def check(columns: Columns) -> None:
        for row, values in enumerate(zip(*(columns[name] for name in names), strict=True)):
            try:
                function.check_row(reward, dict(zip(names, values, strict=True)))
            except DataError as error:
                raise DataError(f"{of}.{key}: row {row} of the prompts: {error}") from error

    return Scorer(name=key, weight=reward.weight, columns=names, score=score, check=check, where=of)


def _require_columns(scorer: Scorer, columns: Collection[str]) -> None:
    missing = [name for name in scorer.columns if name not in columns]
    if missing:
        raise DataError(
            f"{scorer.where}.{scorer.name}: the prompts have no column {missing[0]}; they have: "
            f"{', '.join(sorted(columns)) or 'none'}; add it to the rows, or set {scorer.where}.{scorer.name}.column"
        )


def _python(key: str, reward: RewardFunction, function: PythonFunction, of: str) -> Scorer:
    """A user's function, which needs the columns that it requires."""
    path = str(reward.function)
    loaded = load_function(function, path, "a function that returns a list with one finite number per completion")
    if inspect.iscoroutinefunction(loaded):
        raise DataError(f"{of}.{key}: {path} is async; a plain function is accepted; write it with def")
    parameters = inspect.signature(loaded).parameters
    takes_all = any(each.kind == each.VAR_KEYWORD for each in parameters.values())
    by_place = [each.name for each in parameters.values() if each.kind == each.POSITIONAL_ONLY]
    unnamed = [name for name in _GIVEN if not takes_all and name not in parameters]
    if by_place or "completions" in unnamed:
        raise DataError(
            f"{of}.{key}: {path}{inspect.signature(loaded)} cannot be called as score(prompts=, completions=, "
            "**columns); a function that takes completions by name is accepted; rename its arguments"
        )
    named = [each for each in parameters.values() if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    needed = tuple(each.name for each in named if each.default is each.empty and each.name not in _GIVEN)

    def score(prompts: Sequence[Sequence[Message]], completions: Sequence[str], columns: Columns) -> object:
        arguments = {**columns, "prompts": prompts, "completions": completions}
        wanted = {name: each for name, each in arguments.items() if takes_all or name in parameters}
        try:
            return loaded(**deepcopy(wanted))  # what it changes in place, others read
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            row = _failing_row(loaded, arguments, takes_all, len(completions))
            where = "" if row is None else f" for row {row} ({_shown(prompts[row])}, {reprlib.repr(completions[row])})"
            raise PipelineError(
                f"{of}.{key}: {path}: {place_of_error(error, function)}{type(error).__name__}: {error}{where}; "
                "correct the function"
            ) from error

    return Scorer(
        name=key,
        weight=reward.weight,
        columns=needed,
        score=score,
        where=of,
        takes_columns=takes_all or bool(set(parameters) - {*_GIVEN}),
    )


def _failing_row(
    function: Callable[..., object], arguments: Mapping[str, Sequence[object]], takes_all: bool, num_rows: int
) -> int | None:
    """The first row that makes the function raise by itself; None: the function raises only on the batch."""
    names = arguments if takes_all else [name for name in arguments if name in inspect.signature(function).parameters]
    for row in range(num_rows):
        try:
            function(**{name: [arguments[name][row]] for name in names})
        except (Exception, SystemExit):
            return row
    return None


def _is_finite(value: object) -> bool:
    """Whether a value is a number that a float can hold: a larger whole number is none."""
    try:
        return isinstance(value, numbers.Real) and math.isfinite(float(value))
    except OverflowError:
        return False


def _shown(prompt: Sequence[Message]) -> str:
    return f"prompt {reprlib.repr(str(prompt[-1]['content']))}" if prompt else "no prompt"
