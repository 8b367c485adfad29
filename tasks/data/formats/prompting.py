"""Prompts made of several columns, and the system turn that rows are given."""

import string
from functools import lru_cache

from lineage.errors import ConfigError
from tasks.data.formats.values import BadRowError, CanonicalRow, Fields, named

_ACCEPTED = "text with named placeholders, such as '{context}\\n\\n{question}'"


@lru_cache(maxsize=8)
def placeholders(template: str) -> frozenset[str]:
    """The columns that a prompt template names.

    Raises:
        ConfigError: it names none, or does more with one than to put it in.
    """
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(f"prompt_template: {error}; accepted: {_ACCEPTED}; write {{{{ for a brace") from error
    names = [name for _, name, _, _ in parts if name is not None]
    odd = [name for name in names if not name or name.isdigit() or set(name) & set(".[]")]
    if odd or not names or any(form or conversion for _, _, form, conversion in parts):
        found = f"the placeholder {{{odd[0]}}}" if odd else "a conversion or a format" if names else "no placeholder"
        raise ConfigError(f"prompt_template: {found}; accepted: {_ACCEPTED}; name columns alone")
    return frozenset(names)


def with_prompt(fields: Fields, template: str) -> Fields:
    """A row of the user whose ``prompt`` is the template, filled from the columns that it names; these go away.

    Raises:
        BadRowError: the row lacks one of them, or it holds no text.
    """
    names = placeholders(template)
    for name in sorted(names):
        value = fields.get(name)
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            listed = ", ".join(sorted(map(str, fields))) or "none"
            found = f"{name} is {named(value)}" if name in fields else f"no field {name!r} (fields: {listed})"
            accepted, remedy = "the columns of prompt_template, as text", f"add {name!r} or change the template"
            raise BadRowError(found, accepted=accepted, remedy=remedy)
    if "prompt" in fields and "prompt" not in names:
        raise BadRowError(
            "prompt is there already", accepted="rows without prompt, where prompt_template makes it",
            remedy="put {prompt} into the template, or leave the template away",
        )  # fmt: skip
    made = template.format_map({name: fields[name] for name in names})
    return {**{name: value for name, value in fields.items() if name not in names}, "prompt": made}


def with_system(row: CanonicalRow, text: str) -> CanonicalRow:
    """A row that begins with a system turn: its own, or this one."""
    name = "messages" if "messages" in row else "prompt"
    turns = row[name]
    assert isinstance(turns, list), "rows of text have no turns"
    if turns[0]["role"] == "system":
        return row
    return {**row, name: [{"role": "system", "content": text}, *turns]}
