"""Preference pairs: the right answer to a question, against an answer with one known fault."""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

from tasks.quickstart.questions import TOPICS, Question, Usage, asked, draw, questions, usages

_NUM_COMMON = 12  # answers of a topic
# Of topics with few answers: a pair shows which of two is right; of any name, only that this one is wrong.
_PAIRED = frozenset(TOPICS) - {"last", "required"}

# A fault makes a wrong answer to a question on a usage, with a source of chance.
Fault = Callable[[Usage, Question, random.Random], str]


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


# Both have the form of a right answer: they are the mistakes that a policy makes after SFT.
FAULTS: Mapping[str, Fault] = {"near_miss": _near_miss, "guess": _guess}


def preferences() -> Iterator[dict[str, object]]:
    """Rows {prompt, chosen, rejected, kind, group}: faults of answers of the other half, in equal parts."""
    # Module by module, so that the faults are in equal parts on both sides of a split too.
    kinds = tuple(FAULTS)
    found = (each for each in asked(1) if each[1].topic in _PAIRED)
    ordered = sorted(found, key=lambda each: (each[0].group, draw("order", each[1].text)))
    for position, (usage, question) in enumerate(ordered):
        kind = kinds[position % len(kinds)]
        yield {
            "prompt": question.text,
            "chosen": question.answer,
            "rejected": FAULTS[kind](usage, question, random.Random(draw(kind, question.text))),
            "kind": kind,
            "group": usage.group,
        }


def unpaired() -> Iterator[dict[str, object]]:
    """Rows {prompt, completion, label, group}: the answers of the pairs, one by one."""
    for row in preferences():
        for answer, is_right in (("chosen", True), ("rejected", False)):
            yield {"prompt": row["prompt"], "completion": row[answer], "label": is_right, "group": row["group"]}
