"""Prompts made from a template, and system turns given to rows."""

import pytest

from lineage.errors import ConfigError
from tasks.data.formats.prompting import placeholders, with_prompt, with_system
from tasks.data.formats.values import BadRowError

Q = {"role": "user", "content": "q"}
A = {"role": "assistant", "content": "a"}


def test_a_template_takes_its_columns_and_leaves_the_others() -> None:
    row = {"context": "c {x}", "question": "q", "year": 1999, "answer": "a"}
    made = with_prompt(row, "{context}\n\n{question} ({year}) {{}}")
    assert made == {"answer": "a", "prompt": "c {x}\n\nq (1999) {}"}
    assert row.keys() == {"context", "question", "year", "answer"}
    assert with_prompt({"prompt": "q"}, "Say: {prompt}") == {"prompt": "Say: q"}


@pytest.mark.parametrize(
    ("row", "found", "mend"),
    [
        ({"b": "q"}, "no field 'a' (fields: b)", "add 'a' or change the template"),
        ({}, "no field 'a' (fields: none)", "add 'a' or change the template"),
        ({"a": None}, "a is null", "add 'a' or change the template"),
        ({"a": ["q"]}, "a is a list", "add 'a' or change the template"),
        ({"a": True}, "a is the boolean true", "add 'a' or change the template"),
    ],
)
def test_a_row_without_a_text_for_a_placeholder_is_refused(row: dict[str, object], found: str, mend: str) -> None:
    with pytest.raises(BadRowError) as refusal:
        with_prompt(row, "{a}")
    assert str(refusal.value) == f"{found}; accepted: the columns of prompt_template, as text; {mend}"


def test_a_prompt_that_a_template_would_overwrite_is_refused() -> None:
    with pytest.raises(BadRowError) as refusal:
        with_prompt({"a": "q", "prompt": "p"}, "{a}")
    assert str(refusal.value) == (
        "prompt is there already; accepted: rows without prompt, where prompt_template makes it; "
        "put {prompt} into the template, or leave the template away"
    )


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("no", "no placeholder"),
        ("{}", "the placeholder {}"),
        ("{0}", "the placeholder {0}"),
        ("{a.b}", "the placeholder {a.b}"),
        ("{a[0]}", "the placeholder {a[0]}"),
        ("{a!r}", "a conversion or a format"),
        ("{a:>10}", "a conversion or a format"),
    ],
)
def test_a_template_names_columns_alone(template: str, found: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        placeholders(template)
    assert str(refusal.value) == (
        f"prompt_template: {found}; accepted: text with named placeholders, such as '{{context}}\\n\\n{{question}}'; "
        "name columns alone"
    )


def test_a_template_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^prompt_template: .*; accepted: .*; write \{\{ for a brace$"):
        placeholders("{a")
    assert placeholders("{b}{a}{b}") == {"a", "b"}
    assert with_prompt({"my column": "q"}, "{my column}") == {"prompt": "q"}


@pytest.mark.parametrize("name", ["messages", "prompt"])
def test_rows_without_a_system_turn_are_given_one(name: str) -> None:
    system = {"role": "system", "content": "s"}
    row: dict[str, object] = {name: [Q, A], "tools": "[]"}
    assert with_system(row, "s") == {name: [system, Q, A], "tools": "[]"}
    assert row[name] == [Q, A]
    own = {name: [{**system, "content": "own"}, Q]}
    assert with_system(own, "s") == own
