"""Reward functions of tests, as a user's module has them."""


def spread(completions: list[str]) -> list[float]:
    """A number between 0 and 6 that nearly every other completion changes."""
    return [float(sum(map(ord, each)) % 7) for each in completions]


def length(completions: list[str]) -> list[float]:
    """The number of characters."""
    return [float(len(each)) for each in completions]


def constant(completions: list[str]) -> list[float]:
    """1 for all."""
    return [1.0 for _ in completions]


def failing(completions: list[str]) -> list[float]:
    """Fails on every completion."""
    raise ValueError("no judge today")


def non_finite(completions: list[str], answer: list[object]) -> list[float]:
    """Not a number for prompts without an answer."""
    return [float("nan") if each is None else 1.0 for each in answer]


def vowel(completions: list[str]) -> list[float]:
    """1 for a completion with a vowel."""
    return [float(any(letter in "aeiou" for letter in each)) for each in completions]


ASKED: list[tuple[object, object]] = []  # prompts and their column ``answer``, as ``asked`` gets them


def asked(prompts: list[object], completions: list[str], answer: list[object]) -> list[float]:
    """A number that nearly every other completion changes."""
    ASKED.extend(zip(prompts, answer, strict=True))
    return spread(completions)
