"""Preference pairs: the right answer to a question, against an answer with one known fault."""

import random
from collections.abc import Callable, Iterator, Mapping

from tasks.quickstart.questions import Question, Usage, asked, draw, questions

_EVASIVE = (
    "I am not sure. Please look it up in the documentation.",
    "It depends on what you want to do.",
    "There are many ways to use it; some of them are better than others.",
    "Sorry, I cannot help with that.",
)

# A fault makes a wrong answer to a question on a usage, with a source of chance.
Fault = Callable[[Usage, Question, random.Random], str]


def _evasive(_: Usage, __: Question, chance: random.Random) -> str:
    return chance.choice(_EVASIVE)


def _repeated(_: Usage, question: Question, chance: random.Random) -> str:
    words = question.answer.rstrip(".").split()
    return " ".join([*words, *words[-chance.randint(1, 2) :] * chance.randint(2, 6)])


def _off_topic(usage: Usage, question: Question, chance: random.Random) -> str:
    return chance.choice([each.answer for each in questions(usage) if each.topic != question.topic])


def _wrong(_: Usage, question: Question, chance: random.Random) -> str:
    return chance.choice(question.wrong)


# The first three are easy to tell from a right answer; the last has its form, and is as frequent as two others.
FAULTS: Mapping[str, Fault] = {"evasive": _evasive, "repeated": _repeated, "off_topic": _off_topic, "wrong": _wrong}
_ORDER = ("wrong", "evasive", "off_topic", "wrong", "repeated")


def preferences() -> Iterator[dict[str, object]]:
    """Rows {prompt, chosen, rejected, kind, group}: one fault for each question of the other half."""
    # Module by module, so that the faults are in equal parts on both sides of a split too.
    ordered = sorted(asked(1), key=lambda each: (each[0].group, draw("order", each[1].text)))
    for position, (usage, question) in enumerate(ordered):
        kind = _ORDER[position % len(_ORDER)]
        yield {
            "prompt": question.text,
            "chosen": question.answer,
            "rejected": FAULTS[kind](usage, question, random.Random(draw(kind, question.text))),
            "kind": kind,
            "group": usage.group,
        }
