"""Preference pairs: the right answer to a question, against an answer with one known fault."""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

from tasks.quickstart.questions import Question, Usage, asked, draw, questions, usages

_NUM_COMMON = 12  # answers of a topic
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


def _near_miss(_: Usage, question: Question, chance: random.Random) -> str:
    return chance.choice(question.wrong)


def _guess(_: Usage, question: Question, chance: random.Random) -> str:
    common = {answer: count for answer, count in _common_answers()[question.topic] if answer != question.answer}
    return chance.choices(list(common), list(common.values()))[0]


@cache
def _common_answers() -> Mapping[str, Sequence[tuple[str, int]]]:
    """By topic, with their counts: what to say without reading the signature."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for usage in usages():
        for question in questions(usage):
            counts[question.topic][question.answer] += 1
    return {topic: found.most_common(_NUM_COMMON) for topic, found in counts.items()}


# The last two have the form of a right answer.
FAULTS: Mapping[str, Fault] = {
    "evasive": _evasive,
    "repeated": _repeated,
    "off_topic": _off_topic,
    "near_miss": _near_miss,
    "guess": _guess,
}


def preferences() -> Iterator[dict[str, object]]:
    """Rows {prompt, chosen, rejected, kind, group}: a fault for each question of the other half, all in equal parts."""
    # Module by module, so that the faults are in equal parts on both sides of a split too.
    kinds = tuple(FAULTS)
    ordered = sorted(asked(1), key=lambda each: (each[0].group, draw("order", each[1].text)))
    for position, (usage, question) in enumerate(ordered):
        kind = kinds[position % len(kinds)]
        yield {
            "prompt": question.text,
            "chosen": question.answer,
            "rejected": FAULTS[kind](usage, question, random.Random(draw(kind, question.text))),
            "kind": kind,
            "group": usage.group,
        }
