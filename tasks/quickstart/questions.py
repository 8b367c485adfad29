"""Questions on a function, method or class whose only right answer follows from the signature that they show."""

import ast
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from tasks.quickstart.documentation import documents

_MAX_SIGNATURE = 100  # characters, so that a row stays below 128 tokens
_MAX_LISTED = 3  # parameters that one answer names
_KINDS = {"class": "a class", "function": "a function", "method": "a method"}
_TYPES = ("bool", "float", "int", "str", "tuple")
_DEFAULTS = ("None", "True", "False", "0", "1", "''")  # the most common ones
_OTHER_NAMES = ("name", "x", "data", "path", "value", "key", "file", "mode", "size", "encoding", "timeout", "flags")
_PLAIN_DEFAULT = re.compile(r"-?\w[\w.]*|'[\w.-]*'|\(\)")  # one that needs no comma, space or bracket


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter; ``default`` as the signature writes it, None where there is none."""

    name: str
    default: str | None

    @property
    def required(self) -> bool:
        return self.default is None and not self.name.startswith("*")

    @property
    def type_name(self) -> str | None:
        """Of the default, where it is a literal of a common type."""
        try:
            found = type(ast.literal_eval(self.default or "")).__name__
        except (ValueError, SyntaxError):
            return None
        return found if found in _TYPES else None


@dataclass(frozen=True, kw_only=True)
class Usage:
    """A function, method or class with its signature.

    Args:
        group: the top-level module that owns it.
        kind: ``function``, ``method`` or ``class``.
        name: with its module and class.
    """

    group: str
    kind: str
    name: str
    parameters: tuple[Parameter, ...]

    @property
    def call(self) -> str:
        """As questions show it. Without spaces, a name is the same token here, in a question and in an answer."""
        shown = (p.name if p.default is None else f"{p.name}={p.default}" for p in self.parameters)
        return f"{self.name}({','.join(shown)})"


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question with its only right answer, and wrong answers of the same form."""

    topic: str
    text: str
    answer: str
    wrong: tuple[str, ...]


# A question, its right answer, and wrong ones, among which the right one may be too.
Asked = tuple[str, str, Sequence[str]]


def draw(*parts: str) -> int:
    """A number that depends on nothing but its arguments: the same on every machine and in every process."""
    return int.from_bytes(hashlib.sha256("\n".join(parts).encode()).digest()[:8])


@cache
def usages() -> tuple[Usage, ...]:
    """Every function, method and class whose signature is short and consists of plain parameters."""
    found = (
        Usage(group=each.group, kind=each.kind, name=each.name, parameters=tuple(map(_parameter, each.parameters)))
        for each in documents()
        if each.kind in _KINDS and each.parameters is not None
    )
    return tuple(usage for usage in found if len(usage.call) <= _MAX_SIGNATURE and all(map(_plain, usage.parameters)))


def _parameter(shown: str) -> Parameter:
    name, equals, default = shown.partition("=")
    return Parameter(name=name, default=default if equals else None)


def _plain(parameter: Parameter) -> bool:
    return parameter.default is None or _PLAIN_DEFAULT.fullmatch(parameter.default) is not None


def questions(usage: Usage) -> list[Question]:
    """One question of each topic that its signature answers."""
    found = []
    for topic, ask in TOPICS.items():
        if asked := ask(usage):
            text, answer, wrong = asked
            others = tuple(each for each in dict.fromkeys(wrong) if each != answer)
            found.append(Question(topic=topic, text=text, answer=answer, wrong=others))
    return found


def _count(usage: Usage) -> Asked:
    def answer(count: int) -> str:
        return f"It takes {count or 'no'} parameter{'' if count == 1 else 's'}."

    number = len(usage.parameters)
    return f"How many parameters does `{usage.call}` take?", answer(number), list(map(answer, _near(number)))


def _kind(usage: Usage) -> Asked:
    answers = {kind: f"It is {shown}." for kind, shown in _KINDS.items()}
    return f"Is `{usage.call}` a class, a function or a method?", answers[usage.kind], list(answers.values())


def _optional(usage: Usage) -> Asked | None:
    def answer(count: int) -> str:
        return f"{count or 'No'} parameter{'s have' if count > 1 else ' has'} a default."

    if len(usage.parameters) < 2:
        return None
    number = sum(parameter.default is not None for parameter in usage.parameters)
    wrong = list(map(answer, _near(number)))
    return f"How many parameters of `{usage.call}` have a default?", answer(number), wrong


def _near(number: int) -> tuple[int, int]:
    """Two wrong counts; for 0 there is a second one too, or most pairs of "no" and "1" would prefer "no"."""
    return (number - 1, number + 1) if number else (1, 2)


def _alone(usage: Usage) -> Asked | None:
    if all(parameter.default is None for parameter in usage.parameters):
        return None
    answers = ("Yes, no argument is needed.", "No, an argument is needed.")
    needs = any(parameter.required for parameter in usage.parameters)
    return f"Can `{usage.call}` be called without an argument?", answers[needs], answers


def _takes(usage: Usage) -> Asked | None:
    names = [parameter.name.lstrip("*") for parameter in usage.parameters]
    yes = draw("takes", usage.name) % 2 == 0
    among = names if yes else [name for name in _OTHER_NAMES if name not in names]
    if not names:
        return None
    name = among[draw("name", usage.name) % len(among)]
    answers = ("No, it does not.", "Yes, it does.")
    return f"Does `{usage.call}` take `{name}`?", answers[yes], answers


def _last(usage: Usage) -> Asked | None:
    names = [parameter.name for parameter in usage.parameters]
    if len(names) < 2:
        return None
    answers = [f"The last parameter is `{name}`." for name in names]
    return f"What is the last parameter of `{usage.call}`?", answers[-1], answers


def _required(usage: Usage) -> Asked | None:
    required = [parameter.name for parameter in usage.parameters if parameter.required]
    others = [parameter.name for parameter in usage.parameters if not parameter.required]
    if not usage.parameters or len(required) > _MAX_LISTED or any(name.startswith("*") for name in others):
        return None
    wrong = [required[:-1], required[1:], [*required, *others[:1]], others]
    return (
        f"Which arguments does `{usage.call}` need?",
        _needs(required),
        [_needs(names) for names in wrong if len(names) <= _MAX_LISTED],
    )


def _needs(names: Sequence[str]) -> str:
    return f"It needs {' and '.join(f'`{name}`' for name in names) or 'nothing'}."


def _default(usage: Usage) -> Asked | None:
    optional = [(parameter.name, parameter.default) for parameter in usage.parameters if parameter.default is not None]
    if not optional:
        return None
    optional = [each for each in optional if each[1] != "None"] or optional  # else most of the answers were None
    name, default = optional[draw("default", usage.name) % len(optional)]
    others = [value for _, value in optional if value != default] or list(_DEFAULTS)

    wrong = [f"It is `{value}`." for value in others]
    return f"What is the default of `{name}` in `{usage.call}`?", f"It is `{default}`.", wrong


def _type(usage: Usage) -> Asked | None:
    typed = [(parameter.name, parameter.type_name) for parameter in usage.parameters if parameter.type_name]
    if not typed:
        return None
    name, right = typed[draw("type", usage.name) % len(typed)]
    answers = {each: f"Its type is `{each}`." for each in _TYPES}
    return f"Of which type is the default of `{name}` in `{usage.call}`?", answers[str(right)], list(answers.values())


TOPICS: Mapping[str, Callable[[Usage], Asked | None]] = {
    "count": _count,
    "kind": _kind,
    "optional": _optional,
    "alone": _alone,
    "takes": _takes,
    "last": _last,
    "required": _required,
    "default": _default,
    "type": _type,
}
# Percent of the questions that are asked; of the other topics all: so that no topic is most of the rows. What copies
# any name is asked least: a model of the demo's size learns it last.
_ASKED = {"count": 50, "kind": 55, "takes": 70, "last": 50, "required": 40}


def facts(usage: Usage) -> str:
    """What its documentation says of a signature, in sentences that need no question."""
    sentences = [each.answer for each in questions(usage) if each.topic in _STATED]
    for parameter in usage.parameters:
        if parameter.default is not None:
            sentences.append(f"`{parameter.name}` is `{parameter.default}` by default.")
        if parameter.type_name:
            sentences.append(f"The type of `{parameter.name}` is `{parameter.type_name}`.")
    return " ".join(sorted(sentences, key=lambda each: draw("fact", usage.name, each)))


_STATED = ("count", "kind", "optional", "alone", "last", "required")


def asked(half: int) -> Iterator[tuple[Usage, Question]]:
    """Half of the questions (0 or 1): what one half asks the other does not."""
    for usage in usages():
        for question in questions(usage):
            chance = draw("asked", question.text)
            if chance % 100 < _ASKED.get(question.topic, 100) and chance // 100 % 2 == half:
                yield usage, question
