"""Multiple choices: their columns, and the turns that they become."""

import re
from collections.abc import Mapping

from tasks.data.formats.turns import (
    THOUGHTS,
    BadRowError,
    CanonicalRow,
    Fields,
    answer,
    is_nothing,
    named,
    one_of,
    prompt,
    required,
    text,
    text_of,
    with_thought_column,
)

# Columns of a multiple choice: the text before the question, the question, the choices and the right one.
CONTEXTS = ("context", "passage", "article")
QUESTIONS = ("question", "question_stem", "problem", "query", "ctx")
CHOICES = ("choices", "options", "endings")
_LETTERS = (*"ABCDEF", *map("op{}".format, "abcd"), *map("choice_{}".format, range(1, 7)))  # called by the last letter
RIGHT_CHOICE = ("answerKey", "answer_key", "answer_idx", "answer_index", "correct", "cop", "answer", "label")
CHOICE_COLUMNS = {
    **dict.fromkeys((*CONTEXTS, *QUESTIONS, *CHOICES, *_LETTERS), "the user's turn"),
    **dict.fromkeys(RIGHT_CHOICE, "the assistant's turn"),
}
_MARK = re.compile(r"\s*\(?([A-Z])[).:]\s*(.*)", re.DOTALL)  # A) one
_MARKED = re.compile(r"\(?(\w{1,2})(?:[).:]\s*(.*))?", re.DOTALL)  # a, (A) or A. one


def recognize_choices(fields: Fields) -> tuple[str, ...]:
    """The columns of a multiple choice, whose choices are a list, an object or columns of their own."""
    named_ = [next((name for name in names if name in fields), "") for names in (QUESTIONS, RIGHT_CHOICE)]
    shown = [name for name in CHOICES if name in fields][:1] or [name for name in _LETTERS if name in fields]
    thoughts = [name for name in THOUGHTS if name in fields]
    return (*named_, *shown, *thoughts) if all(named_) and len(_choices(fields)) > 1 else ()


def _choices(fields: Fields) -> dict[str, str | int | float]:
    """Label -> choice; empty: there are none."""
    value = next((fields[name] for name in CHOICES if not is_nothing(fields.get(name))), None)
    if value is None:
        value = {name[-1].upper(): fields[name] for name in _LETTERS if not is_nothing(fields.get(name))}
    if isinstance(value, Mapping) and all(isinstance(value.get(name), list) for name in ("label", "text")):
        value = dict(zip(map(str, value["label"]), value["text"], strict=False))
    if isinstance(value, list) and all(isinstance(each, Mapping) and "label" in each for each in value):
        value = {str(each["label"]): each.get("text") for each in value}
    if isinstance(value, list) and len(value) <= 26:  # the letters
        marks = [_MARK.fullmatch(each) if isinstance(each, str) else None for each in value]
        letters = [chr(ord("A") + at) for at in range(len(value))]
        if all(mark and mark[1] == letter for mark, letter in zip(marks, letters, strict=True)):
            value = [mark[2] for mark in marks if mark]
        value = dict(zip(letters, value, strict=True))
    # Tables have null for a choice that other rows have; names of more than two characters are those of settings.
    known = value if isinstance(value, Mapping) else {}
    found = {str(label): each for label, each in known.items() if each is not None}
    is_text = all(isinstance(each, str | int | float) and not isinstance(each, bool) for each in found.values())
    return found if is_text and all(len(label) < 3 for label in found) else {}


def multiple_choice(fields: Fields) -> CanonicalRow:
    """The question with its choices, each after its label; the answer is the right one with its label."""
    choices = _choices(fields)
    if len(choices) < 2:
        raise BadRowError(f"{one_of(fields, CHOICES)} holds no choices", "no choices")
    name = next((name for name in RIGHT_CHOICE if not is_nothing(fields.get(name))), RIGHT_CHOICE[-2])
    label = _right(required(fields, name, "no answer"), name, choices)
    before = [text(fields[each], each, "empty prompt") for each in CONTEXTS if not is_nothing(fields.get(each))]
    shown = "\n".join(f"{each}. {choice}" for each, choice in choices.items())
    asked = "\n\n".join([*before, text_of(fields, "empty prompt", *QUESTIONS), shown])
    answered = answer(f"{label}. {choices[label]}", name)
    return {"messages": prompt(asked, "question") + with_thought_column(answered, fields)}


def _right(right: object, name: str, choices: Mapping[str, str | int | float]) -> str:
    """The label of the right choice, which a row gives by its label, its index or its text."""
    right = int(right) if isinstance(right, float) and right.is_integer() else right  # a table's, beside nulls
    wanted, labels = str(right).strip(), list(choices)
    if isinstance(right, bool) or not isinstance(right, str | int) or not wanted:
        raise BadRowError(f"{name} is {named(right)}", "no answer")
    if wanted in choices:
        return wanted
    found = labels[int(wanted) :][:1] if re.fullmatch(r"\d{1,3}", wanted) and not labels[0].isdecimal() else []
    if found and isinstance(right, int) and all(isinstance(each, str) for each in choices.values()):
        return found[0]
    found += [label for label, choice in choices.items() if str(choice).strip() == wanted][:1]
    if mark := _MARKED.fullmatch(wanted):
        found += [
            label for label, choice in choices.items()
            if label.lower() == mark[1].lower() and mark[2] in (None, "", str(choice).strip())
        ]  # fmt: skip
    if len({*found}) == 1:
        return found[0]
    why = f"may be {' or '.join(found)}" if found else f"is none of the choices {', '.join(labels)}"
    remedy = "write its letter; columns.prompt=QUESTION columns.completion=ANSWER reads the rows without their choices"
    if wanted == str(len(labels)):
        remedy = "if indexes begin at 1, the other rows are wrong too: write letters"
    raise BadRowError(f"{name} is {named(right)}, which {why}", "no answer", remedy=remedy)
