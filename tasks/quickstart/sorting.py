"""A task whose answers can be verified, for reinforcement: sort five digits. Each row is a problem of its own."""

import random
from collections.abc import Iterator

_DIGITS = 5
_NUM_DEMONSTRATIONS, _NUM_PROMPTS = 6000, 6000


def demonstrations() -> Iterator[dict[str, object]]:
    """Rows {messages}: problems with their answers, none of them among the prompts."""
    for problem in _problems()[:_NUM_DEMONSTRATIONS]:
        yield {
            "messages": [
                {"role": "user", "content": problem}, {"role": "assistant", "content": answer(problem)}
            ]
        }  # fmt: skip


def prompts() -> Iterator[dict[str, object]]:
    """Rows {prompt, answer}: other problems, with what a reward function compares completions with."""
    for problem in _problems()[_NUM_DEMONSTRATIONS:]:
        yield {"prompt": problem, "answer": answer(problem)}


def alphabet() -> Iterator[dict[str, object]]:
    """Rows {text}, for a tokenizer with one token per digit and per name of a turn."""
    for text in ("user", "assistant", *map(str, range(10))):
        yield {"text": text}


def answer(problem: str) -> str:
    """The digits of a problem in ascending order."""
    return "".join(sorted(problem))


def _problems() -> list[str]:
    """Different numbers of five digits, leading zeros included, in an order that never changes."""
    count = _NUM_DEMONSTRATIONS + _NUM_PROMPTS
    return [f"{number:0{_DIGITS}}" for number in random.Random(0).sample(range(10**_DIGITS), count)]
