"""Preference pairs: the right answer to a question of usage, against an answer with one known fault."""

import random
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby

from tasks.quickstart.instructions import Usage, answer, draw, pick, usages

_EVASIVE = (
    "I am not sure. Please look it up in the documentation.",
    "It depends on what you want to do with `{name}`.",
    "There are many ways to use `{name}`; some of them are better than others.",
    "Sorry, I cannot help with that. You could ask someone else.",
)

# A fault makes a wrong answer of a usage, another one of the same module, and a source of chance.
Fault = Callable[[Usage, Usage, random.Random], str]


def _cut_off(usage: Usage, _: Usage, chance: random.Random) -> str:
    words = usage.answer.split(" ")
    return " ".join(words[: max(1, int(len(words) * chance.uniform(0.3, 0.7)))])


def _repeated(usage: Usage, _: Usage, chance: random.Random) -> str:
    words = usage.summary.split()
    phrase = " ".join(words[: chance.randint(3, 6)])
    return answer(usage.name, usage.parameters, " ".join([phrase] * chance.randint(3, 5)))


def _scrambled(usage: Usage, _: Usage, chance: random.Random) -> str:
    words = usage.summary.split()
    while words == usage.summary.split():
        chance.shuffle(words)
    return answer(usage.name, usage.parameters, " ".join(words))


def _evasive(usage: Usage, _: Usage, chance: random.Random) -> str:
    return chance.choice(_EVASIVE).format(name=usage.name)


def _wrong_signature(usage: Usage, other: Usage, _: random.Random) -> str:
    return answer(usage.name, other.parameters, usage.summary)


def _another_function(_: Usage, other: Usage, __: random.Random) -> str:
    return other.answer


FAULTS: Mapping[str, Fault] = {
    "cut_off": _cut_off,
    "repeated": _repeated,
    "scrambled": _scrambled,
    "evasive": _evasive,
    "wrong_signature": _wrong_signature,
    "another_function": _another_function,
}


def preferences() -> Iterator[dict[str, object]]:
    """Rows {prompt, chosen, rejected, kind, group}: two faults for each usage, all faults in equal parts."""
    kinds = tuple(FAULTS)
    for position, (usage, other) in enumerate(_with_another()):
        for kind in (kinds[position % 6], kinds[(position + 3) % 6]):
            rejected = FAULTS[kind](usage, other, random.Random(draw(kind, usage.name)))
            yield {
                "prompt": usage.question,
                "chosen": usage.answer,
                "rejected": rejected,
                "kind": kind,
                "group": usage.group,
            }


def _with_another() -> Iterator[tuple[Usage, Usage]]:
    """Each usage with another one of the same module, with other parameters.

    Of the same module, because the rejected answer tells about it too: a function that is held out
    must not be told about in training.
    """
    long_enough = [usage for usage in usages() if len(set(usage.summary.split())) >= 5]
    # Module by module, so that the faults are in equal parts on both sides of a split too.
    ordered = sorted(long_enough, key=lambda usage: (usage.group, draw("order", usage.name)))
    for _, group in groupby(ordered, key=lambda usage: usage.group):
        members = {usage.name: usage for usage in group}
        for usage in members.values():
            others = [name for name in members if members[name].parameters != usage.parameters]
            if others:
                yield usage, members[pick(others, "another", usage.name)]
