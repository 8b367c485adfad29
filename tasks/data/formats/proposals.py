"""Prompts from templates; guesses how rows that no format fits are read, by the names of their columns."""

import re
import shlex
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from lineage.artifact import Kind
from lineage.errors import ConfigError
from tasks.data.formats.choices import CHOICES, CONTEXTS, QUESTIONS, RIGHT_CHOICE, recognize_choices
from tasks.data.formats.turns import BadRowError, Fields, named

# Kind of rows -> the source of that pipeline.
JOB_SOURCES: Mapping[Kind, str] = {
    Kind.CONVERSATIONS: "instructions", Kind.TEXT: "corpus", Kind.PREFERENCES: "preferences",
    Kind.UNPAIRED: "unpaired", Kind.PROMPTS: "prompts",
}  # fmt: skip
# Kind of rows -> the shipped pipeline that reads nothing else.
JOBS: Mapping[Kind, str] = {
    Kind.CONVERSATIONS: "sft", Kind.TEXT: "cpt", Kind.PREFERENCES: "dpo", Kind.UNPAIRED: "kto", Kind.PROMPTS: "grpo",
}  # fmt: skip
JOB_HELD_OUT = 0.1  # that these pipelines set
# Names that columns often have, the usual ones first.
_ASKED = ("prompt", "question", "query", "problem", "instruction", "input", "user", "human", "source", "document",
          "article", "text", "q", "inputs", "request", "post", "dialogue", "sql_prompt")  # fmt: skip
_ANSWERED = ("completion", "answer", "answers", "response", "responses", "solution", "output", "assistant", "gpt",
             "target", "summary", "reply", "a", "targets", "bot",
             "highlights", "label_text", "generated_solution", "final_answer", "correct_answer", "best_answer",
             "long_answer", "sql", "mc1_targets")  # fmt: skip
_CONTEXT = ("context", "passage", "background", "paragraph", "evidence", "table", "code", "support", "definition",
            "sql_context")  # fmt: skip
# Of a multiple choice: texts before the question, questions, and right choices, by other names than formats have.
_BEFORE = ("premise", "flores_passage", "support", "background", "paragraph")
_WHICH = (*QUESTIONS, "stem", "goal", "sentence", *_ASKED)
_RIGHT = (*RIGHT_CHOICE, "correct_answer_num", *_ANSWERED)
_LETTERS = "ABCDEF"
_MARKED = re.compile(r"(.*?)(?:[ _-]?([0-9A-F])|[ _-]([a-f]))")  # sol1, option_2, answerC, choice_a
_CHOSEN = ("chosen", "response_j", "chosen_response", "chosen_messages", "preferred", "good", "better", "accepted",
           "winner", "response_chosen")  # fmt: skip
_REJECTED = ("rejected", "response_k", "rejected_response", "rejected_messages", "dispreferred", "bad", "worse",
             "declined", "loser", "response_rejected")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Guess:
    """How rows that no format fits are read: our names -> their columns, and a template of prompts."""

    columns: Mapping[str, str]
    template: str | None = None

    @property
    def overrides(self) -> list[str]:
        """Of ``posttrain data``."""
        template = [f"prompt_template={self.template}"] if self.template else []
        return [*(f"columns.{ours}={theirs}" for ours, theirs in self.columns.items()), *template]

    def settings(self, source: str, stage: str) -> str:
        """The overrides of a pipeline, to paste."""
        renames = ", ".join(f"{ours}: {_quoted(theirs)}" for ours, theirs in self.columns.items())
        words = [f"'sources.{source}.columns={{{renames}}}'"] if renames else []
        words += [f"\"stages.{stage}.method.prompt_template='{self.template}'\""] if self.template else []
        return " ".join(words)


def guess(rows: Sequence[Fields], kind: Kind | None, *, with_context: bool = True) -> Guess | None:
    """How rows can be read, by the names of their columns; None: these are unusual.

    Args:
        kind: what is made of them; prompts keep the answer as the column that reward functions compare with.
        with_context: whether a column of contexts joins the prompt, which a template of the user's decides.
    """
    if kind != Kind.PROMPTS and (choosing := _choosing(rows)):
        return Guess(columns=choosing)
    paths = dict.fromkeys(path for row in rows for name, value in row.items() for path in _paths(str(name), value))
    values = {path: [inside(row, path) for row in rows] for path in paths}
    # Bad rows among good ones, such as those with an empty answer, hide no column.
    read = {path: [_is_scalar(each) or bool(each and _is_read(each)) for each in values[path]] for path in paths}
    good = {path: sum(each) for path, each in read.items()}
    texts = [path for path in paths if good[path] >= len(rows) / 2]
    several = {path for path in texts if any(_is_first_of_several(row, path) for row in rows)}
    turns = {
        path: key
        for path in texts
        if path not in several and (key := next(filter(None, map(_key_of_turns, values[path])), None))
    }
    by_name = {path.partition(".")[0].lower().replace("-", "_").replace(" ", "_"): path for path in reversed(texts)}

    def first(names: Sequence[str]) -> str | None:
        return next((by_name[name] for name in names if name in by_name), None)

    pair = {"chosen": first(_CHOSEN), "rejected": first(_REJECTED)}
    answers = pair if all(pair.values()) else {"completion": first(_ANSWERED)}
    taken = set(answers.values())
    # A context is the prompt where nothing else is.
    asked = next(
        (by_name[name] for name in (*_ASKED, *_CONTEXT) if by_name.get(name) not in (None, *taken, *several)), None
    )
    context, name = first([each for each in _CONTEXT if by_name.get(each) != asked]), "prompt"
    if asked is None and turns and taken == turns.keys():  # conversations that begin alike
        asked, name, answers = answers["chosen"], "chosen", {"rejected": answers["rejected"]}
    elif asked is None or None in taken:
        if len(turns) != 1:
            return None
        answers, taken = {}, set()
        ((asked, name),) = turns.items()
    assert asked is not None
    is_together = any(map(all, zip(*(read[path] for path in (asked, *answers.values()) if path), strict=True)))
    if kind == Kind.PROMPTS:
        answers = {"answer": answers["completion"]} if "completion" in answers else {}
    renamed = {ours: theirs for ours, theirs in {name: asked, **answers}.items() if ours != theirs}
    template = None
    if context and not all(isinstance(each, str) for each in values[context]):  # a template needs it in each row
        context = None
    if with_context and context and "." not in context + asked and asked not in turns:
        template = f"{{{context}}} {{{asked}}}"
        renamed.pop("prompt", None)
    if not is_together or not (renamed or template):  # no row has both, or the names are no help
        return None
    return Guess(columns={ours: theirs for ours, theirs in renamed.items() if theirs}, template=template)


def _choosing(rows: Sequence[Fields]) -> dict[str, str]:
    """Our names -> columns of a multiple choice, or paths into them; empty: no choices, or names that are read."""
    places = dict.fromkeys(place for row in rows for place in _places(row))

    def first(names: Sequence[str], *shapes: type) -> str | None:
        fitting = [place for place in places if sum(isinstance(inside(row, place), shapes) for row in rows) > half]
        return next((at for name in names for at in fitting if at.rpartition(".")[2].lower() == name.lower()), None)

    half = len(rows) / 2
    found = {
        "context": None if first(CONTEXTS, str) else first(_BEFORE, str), "question": first(_WHICH, str),
        "choices": first(CHOICES, list, Mapping),
        "answer": first(_RIGHT, str, int, float),
    }  # fmt: skip
    columns = {ours: place for ours, place in found.items() if place}
    if not found["choices"] and found["answer"]:
        columns |= _choices_in_columns(rows, found["answer"])
    choices = [{**row, **{ours: inside(row, place) for ours, place in columns.items()}} for row in rows]
    read = {*QUESTIONS, *CHOICES, *RIGHT_CHOICE}
    is_read = sum(bool(recognize_choices(each)) for each in choices) > half
    return {ours: place for ours, place in columns.items() if place not in read} if is_read else {}


def _choices_in_columns(rows: Sequence[Fields], answer: str) -> dict[str, str]:
    """Our names of choices -> numbered columns: ``sol1`` and ``sol2``; empty: none, or unclear which one is right.

    Letters where the answer is a letter, a text or an index from 0, ``choice_1`` and so on where it counts from 1.
    """
    families = dict[str, dict[str, str]]()
    for name in dict.fromkeys(str(name) for row in rows for name in row):
        if mark := _MARKED.fullmatch(name):
            families.setdefault(mark[1], {})[(mark[2] or mark[3]).upper()] = name
    known = [row for row in rows if str(inside(row, answer)) not in ("None", "", "-1")]  # a test split hides them
    for family in families.values() if known else ():
        marks, count = sorted(family), len(family)
        if count < 2 or "".join(marks) not in [each[:count] for each in ("012345", "123456", _LETTERS)]:
            continue
        texts = {str(inside(row, answer)).strip().upper() for row in known}
        is_text = all(inside(row, answer) in [row.get(name) for name in family.values()] for row in known)
        if is_text or texts <= {*_LETTERS[:count]} or ("0" in texts <= {*map(str, range(count))}):
            return {letter: family[mark] for letter, mark in zip(_LETTERS, marks, strict=False)}
        if str(count) in texts <= {*map(str, range(1, count + 1))}:
            return {f"choice_{at}": family[mark] for at, mark in enumerate(marks, 1)}
    return {}


def _places(value: Mapping[str, object], outer: str = "") -> Iterator[str]:
    """The columns of a row and the paths into objects, but those of choices."""
    for name, each in value.items():
        yield f"{outer}{name}"
        if isinstance(each, Mapping) and name not in CHOICES:
            yield from _places(each, f"{outer}{name}.")


def _paths(name: str, value: object) -> Iterator[str]:
    """A column of texts or turns, or the places of the first texts inside it: ``answers.text.0``."""
    if _is_read(value) or (_is_scalar(value) and "." not in name):
        yield name
    elif isinstance(value, list | tuple) and value:
        yield from _paths(f"{name}.0", value[0])
    elif isinstance(value, Mapping):
        for part, each in value.items():
            yield from _paths(f"{name}.{part}", each)


def _is_first_of_several(row: Fields, path: str) -> bool:
    """Whether a path takes the first item of a list that has others."""
    parts = path.split(".")
    lists = [inside(row, ".".join(parts[:at])) for at, part in enumerate(parts) if part == "0"]
    return any(isinstance(each, list | tuple) and len(each) > 1 for each in lists)


def how_to_name(rows: Sequence[Fields], columns: Sequence[str], kind: Kind | None, place: str) -> str:
    """What to set where no format fits, by an example with the rows' own columns, those of texts first."""
    if columns and not any(value is not None for fields in rows for value in fields.values()):
        return "fill them: they are null in all rows looked at"
    if len(columns) == 1 or kind == Kind.TEXT:
        ours: tuple[str, ...] = ("text",)
    else:
        ours = ("chosen", "rejected") if kind == Kind.PREFERENCES else ("prompt", "completion")
    texts = [name for name in columns if any(isinstance(fields.get(name), str) for fields in rows)]
    pairs = zip(ours, [*texts, *(name for name in columns if name not in texts)], strict=False)
    what = "it" if len(columns) == 1 else "columns"
    way = f"name {what}, such as {shlex.join(f'columns.{each}={name}' for each, name in pairs)}"
    is_table = re.search(r"\.[ct]sv\b", place)
    return f"if its first line names no columns, write one above it that does; else {way}" if is_table else way


def inner_rows(rows: Sequence[Fields], place: str) -> str:
    """What to do where each row has a list of rows or of conversations; empty: none has.

    Args:
        place: path of the source.
    """
    for name in dict.fromkeys(str(name) for row in rows for name in row):
        lists = [value for row in rows if isinstance(value := row.get(name), list | tuple) and value]
        first = lists[0][0] if lists else None
        if len(lists) < len(rows) / 2 or max(map(len, lists)) < 2 or _key_of_turns(lists[0]):
            continue
        wrapped = f" | {{{key}: .}}" if (key := _key_of_turns(first)) else ""
        if isinstance(first, Mapping) or key:
            part = f".{name}[]" if name.isidentifier() else f'."{name}"[]'
            items = f".[]{part}" if _is_array(place) else part
            made = f"jq -c {shlex.quote(items + wrapped)} {shlex.quote(place)} > rows.jsonl"
            return f"the rows are in the list {name!r}; make a row of each item: {made}"
    return ""


def _is_array(place: str) -> bool:
    """Whether a file is one JSON array."""
    try:
        with open(place, encoding="utf-8-sig", errors="replace") as file:
            return file.read(100).lstrip().startswith("[")
    except (OSError, ValueError):
        return False


def _is_scalar(value: object) -> bool:
    return isinstance(value, int | float)


def as_text(name: str | None, value: object) -> object:
    """A number, or yes or no, as text, where the user has named its column as the prompt or the completion."""
    if name not in ("prompt", "completion") or not _is_scalar(value) or value != value:  # no NaN
        return value
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _is_read(value: object) -> bool:
    return isinstance(value, str) or _key_of_turns(value) is not None


def _key_of_turns(value: object) -> str | None:
    """The column of a format that holds turns like these; None: they are none."""
    first = value[0] if isinstance(value, list | tuple) and value else None
    keys = first.keys() if isinstance(first, Mapping) else ()
    return "messages" if {"role", "content"} <= {*keys} else "conversations" if {"from", "value"} <= {*keys} else None


def inside(fields: Mapping[str, object], path: str) -> object:
    """A value of a row by the name of its column, or by a path into it; None: there is none."""
    if path in fields:
        return fields[path]
    found: object = fields
    for part in path.split("."):
        if isinstance(found, Mapping):
            found = found.get(part)
        elif isinstance(found, list | tuple) and part.isdecimal() and int(part) < len(found):
            found = found[int(part)]
        else:
            return None
    return found


def with_inner(fields: Mapping[str, object], columns: Mapping[str, str]) -> Mapping[str, object]:
    """A row with a column for each path into one that ``columns`` names, in place of the columns that hold them."""
    paths = [path for path in columns.values() if "." in path and path not in fields]
    found = {path: value for path in paths if (value := inside(fields, path)) is not None}
    if not found:
        return fields
    outer = {path.partition(".")[0] for path in paths}
    return {**{name: value for name, value in fields.items() if name not in outer}, **found}


def _quoted(name: str) -> str:
    return name if name.replace("_", "").isalnum() else f'"{name}"'


def bare(name: str) -> str:
    """The name of a column without what its writing adds: systemprompt of System-Prompt."""
    return re.sub(r"[\W_]", "", name).lower()


def renamed_row(fields: Fields, columns: Mapping[str, str]) -> Fields:
    """A row with its columns renamed to the formats' names."""
    fields, ours = with_inner(fields, columns), {theirs: name for name, theirs in columns.items()}
    renamed = {ours.get(name, name): as_text(ours.get(name), value) for name, value in fields.items()}
    if len(renamed) < len(fields):
        ((twice, _),) = Counter(ours.get(name, name) for name in fields).most_common(1)
        raise BadRowError(f"columns makes two columns {twice!r} of this row", accepted="one column of a name")
    return renamed


def inverted_hint(field: str, ours: str, theirs: str) -> str:
    """What to set, where ``columns`` maps the wrong way round."""
    text = f"{field}.{ours}={theirs}"
    quoted = f'"{text}"' if set(text) & set(" '\"$&|;()<>*?") else text
    return f"columns maps our name to the rows' column: set {quoted}"


_TEMPLATE = "text with named placeholders, such as '{context}\\n\\n{question}'"


@lru_cache(maxsize=8)
def placeholders(template: str) -> frozenset[str]:
    """The columns in a prompt template (ConfigError: it has no placeholder, or one with a conversion or format)."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(f"prompt_template: {error}; accepted: {_TEMPLATE}; write {{{{ for a brace") from error
    names = [name for _, name, _, _ in parts if name is not None]
    odd = [name for name in names if not name or name.isdigit() or set(name) & set(".[]")]
    if odd or not names or any(form or conversion for _, _, form, conversion in parts):
        found = f"the placeholder {{{odd[0]}}}" if odd else "a conversion or a format" if names else "no placeholder"
        raise ConfigError(f"prompt_template: {found}; accepted: {_TEMPLATE}; name columns alone")
    return frozenset(names)


def with_prompt(fields: Fields, template: str) -> Fields:
    """A row with ``prompt`` filled from the template, in place of the columns that the template names.

    Raises:
        BadRowError: the row lacks one of them, or it holds no text.
    """
    names, accepted = placeholders(template), "the columns of prompt_template, as text, and no other prompt"
    for name in sorted(names):
        value = fields.get(name)
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            listed = ", ".join(sorted(map(str, fields))) or "none"
            found = f"{name} is {named(value)}" if name in fields else f"no field {name!r} (fields: {listed})"
            raise BadRowError(found, accepted=accepted, remedy="add it, or change the template")
    if "prompt" in fields and "prompt" not in names:
        raise BadRowError("prompt is there already", accepted=accepted, remedy="put {prompt} into the template")
    made = template.format_map({name: fields[name] for name in names})
    return {**{name: value for name, value in fields.items() if name not in names}, "prompt": made}
