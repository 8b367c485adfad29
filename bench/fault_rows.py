"""Rows of a small made-up world for bench/diagnose.py: facts about thirty things, and what breaks such rows.

A model of two layers learns them in a hundred steps, and answers questions about other rows than those it has seen. An
answer begins in one of three ways, so that no loss falls to zero but by learning rows by heart.
"""

import json
import random
from collections.abc import Callable, Sequence
from itertools import chain, product
from pathlib import Path

Row = dict[str, str]
KINDS = {
    "colour": ("red", "blue", "green", "white", "black", "yellow"),
    "size": ("tiny", "small", "large", "huge"),
    "taste": ("sweet", "sour", "salty", "bitter"),
}
THINGS = [a + b for a, b in product(("ba", "lu", "mi", "to", "ke", "su"), ("ko", "ra", "ni", "pe", "do"))]
OPENINGS = ("it is", "i think it is", "surely it is")
NAMES = ("anna", "bert", "carl", "dora", "emil", "fina", "gerd", "hugo", "ines", "jana", "karl", "lena")
PLACES = ("garden", "house", "market", "forest", "harbour", "school", "street", "valley", "castle", "station")
QUESTIONS = (
    "{a} asks in the {p} : what {k} has the {t} ?",
    "tell {a} and {b} the {k} of the {t} in the {p} .",
    "in the {p} {a} saw the {t} with {b} . which {k} ?",
    "{k} of the {t} that {a} has in the {p} ?",
)


class World:
    """Facts, which are the same for every seed, and rows that a seed draws."""

    def __init__(self, seed: int) -> None:
        fixed = random.Random("facts")
        self.facts = {(thing, kind): fixed.choice(values) for thing in THINGS for kind, values in KINDS.items()}
        self.rng = random.Random(seed)

    def question(self) -> tuple[str, str, str]:
        """A question, its answer in one word, and a wrong word."""
        rng, kind, thing = self.rng, self.rng.choice(list(KINDS)), self.rng.choice(THINGS)
        text = rng.choice(QUESTIONS).format(
            k=kind, t=thing, a=rng.choice(NAMES), b=rng.choice(NAMES), p=rng.choice(PLACES)
        )
        right = self.facts[thing, kind]
        return text, right, rng.choice([value for value in chain(*KINDS.values()) if value != right])

    def said(self, word: str) -> str:
        return f"{self.rng.choice(OPENINGS)} {word} ."

    def bad(self, word: str) -> str:
        """A wrong answer, or none: that one is easy to tell from a right one."""
        return "nobody knows that ." if self.rng.random() < 0.6 else self.said(word)

    def text(self) -> Row:
        thing, kinds = self.rng.choice(THINGS), self.rng.sample(list(KINDS), 2)
        facts = " and its ".join(f"{kind} is {self.facts[thing, kind]}" for kind in kinds)
        (name, other), place = self.rng.sample(NAMES, 2), self.rng.choice(PLACES)
        return {"text": f"{name} and {other} have a {thing} in the {place} . its {facts} ."}

    def chat(self) -> Row:
        prompt, right, _ = self.question()
        return {"prompt": prompt, "completion": self.said(right)}

    def pair(self) -> Row:
        prompt, right, wrong = self.question()
        return {"prompt": prompt, "chosen": self.said(right), "rejected": self.bad(wrong)}

    def single(self) -> Row:
        prompt, right, wrong = self.question()
        label = self.rng.random() < 0.5
        return {"prompt": prompt, "completion": self.said(right) if label else self.bad(wrong), "label": label}  # type: ignore[dict-item]

    def prompt(self) -> Row:
        prompt, right, _ = self.question()
        return {"prompt": prompt, "answer": right}


COUNTS = {"text": 3000, "chat": 2600, "pair": 1800, "single": 3600, "prompt": 1500}


def few(rows: Sequence[Row], rng: random.Random) -> list[Row]:
    """Too little data."""
    return list(rows[:60])


def some(rows: Sequence[Row], rng: random.Random) -> list[Row]:
    """So many rows that a training of many epochs learns them by heart."""
    return list(rows[:150])


def repeated(rows: Sequence[Row], rng: random.Random) -> list[Row]:
    """As many rows as before, and nine of ten are copies."""
    return [row for row in rows[: len(rows) // 10] for _ in range(10)]


def shuffled(rows: Sequence[Row], rng: random.Random) -> list[Row]:
    """Every answer stands under another question."""
    answers = [row["completion"] for row in rows]
    rng.shuffle(answers)
    return [{**row, "completion": answer} for row, answer in zip(rows, answers, strict=True)]


def coin(rows: Sequence[Row], rng: random.Random) -> list[Row]:
    """Which answer of a pair is chosen, and which answer is desirable, is chance."""
    if "label" in rows[0]:
        return [{**row, "label": rng.random() < 0.5} for row in rows]  # type: ignore[dict-item]
    swaps = [rng.random() < 0.5 for _ in rows]
    return [
        {**row, "chosen": row["rejected"], "rejected": row["chosen"]} if swap else row
        for row, swap in zip(rows, swaps, strict=True)
    ]


def garbage(rows: Sequence[Row], rng: random.Random) -> list[Row]:
    """Every 40th batch of 16 rows, in order, answers in random bytes: broken rows of one file."""
    found = list(rows)
    for row in rng.sample(range(len(found)), len(found) // 12):
        letters = "".join(rng.choice("qxzjvw0123456789#%&@") for _ in range(60))
        found[row] = {**found[row], "completion": letters}
    return found


def untemplated(rows: Sequence[Row], rng: random.Random) -> list[Row]:
    """Wrong template: whole transcripts, with the marks of roles in words, are the assistant's turn."""
    return [{**row, "completion": f"USER: {row['prompt']} ASSISTANT: {row['completion']}"} for row in rows]


def easy(rows: Sequence[Row], rng: random.Random) -> list[Row]:
    """Every question has the same answer."""
    return [{**row, "completion": "it is red ."} for row in rows]


def long_questions(rows: Sequence[Row], rng: random.Random) -> list[Row]:
    """Questions of up to a hundred words: many are longer than a row may be, so that no answer is left of them."""
    filler = [f"{name} was in the {place} ." for name in NAMES for place in PLACES]
    return [{**row, "prompt": f"{' '.join(rng.choices(filler, k=rng.randrange(16)))} {row['prompt']}"} for row in rows]


BREAKS: dict[str, Callable[[Sequence[Row], random.Random], list[Row]]] = {
    each.__name__: each
    for each in (few, some, repeated, shuffled, coin, garbage, untemplated, easy, long_questions)
}  # fmt: skip


def write_rows(folder: Path, seed: int, wanted: Sequence[tuple[str, str]]) -> None:
    """Writes ``KIND.jsonl``, and ``KIND-BREAK.jsonl`` of each wanted pair of both."""
    world = World(seed)
    rows = {kind: [getattr(world, kind)() for _ in range(count)] for kind, count in COUNTS.items()}
    files = {kind: each for kind, each in rows.items()}
    for kind, name in wanted:
        files[f"{kind}-{name}"] = BREAKS[name](rows[kind], random.Random(seed))
    for name, each in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in each))
