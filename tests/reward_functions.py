"""Reward functions of tests, as a user's module has them."""


def vowel(completions: list[str]) -> list[float]:
    """1 for a completion with a vowel."""
    return [float(any(letter in "aeiou" for letter in each)) for each in completions]
