"""Every format, from a file: read, told, converted, decoded back to the messages that its rows were made of."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lineage.artifact import Source
from tasks.data.formats.detect import detect
from tasks.data.formats.known import BY_NAME
from tasks.data.kinds import messages_of, tools_of
from tasks.data.reading.chunk import Row
from tasks.data.reading.read import read_chunks

Fields = dict[str, object]
CALLED = ({"city": "Paris", "days": 3}, {"city": "Rome", "where": {"lat": 41.9}})  # a table gives each the keys of both


def turn(role: str, content: str, **more: object) -> Fields:
    return {"role": role, "content": content, **more}


def function(arguments: object) -> Fields:
    return {"type": "function", "function": {"name": "weather", "arguments": arguments}}


TOOL = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": TOOL}]
Q, A, B = turn("user", "Grüße?"), turn("assistant", "a\n"), turn("assistant", "b")
ASKED = [turn("system", "s"), turn("user", "0"), turn("assistant", "1"), Q]


def talk(number: int) -> list[Fields]:
    """Turns with a call, unlike that of the row before."""
    return [*ASKED, turn("assistant", "", tool_calls=[function(CALLED[number])]), turn("tool", "sun"), A]


def from_value(number: int) -> list[Fields]:
    call = json.dumps({"name": "weather", "arguments": CALLED[number]})
    said = [("system", "s"), ("human", "0"), ("gpt", "1"), ("human", "Grüße?"), ("function_call", call)]
    return [{"from": who, "value": value} for who, value in [*said, ("observation", "sun"), ("gpt", "a\n")]]


def thought(number: int) -> Fields:
    return turn("assistant", f"<think>\nt{number}\n</think>\n\na")


def parts(**columns: object) -> Callable[[int], Fields]:
    return lambda _: columns


MADE: dict[str, Callable[[int], Fields]] = {  # what each row was made of
    "text": lambda number: {"text": f"Grüße {number}"},
    **dict.fromkeys(("messages", "sharegpt"), lambda number: {"messages": talk(number), "tools": TOOLS}),
    **dict.fromkeys(("prompt_completion", "alpaca"), parts(messages=[*ASKED, A])),
    "reasoning": lambda number: {"messages": [Q, thought(number)]},
    "function_calling": lambda number: {"messages": [Q, talk(number)[4]], "tools": TOOLS},
    **dict.fromkeys(
        ("preference", "implicit_preference", "oumi_preference", "sharegpt_ranking"),
        parts(prompt=ASKED, chosen=[A], rejected=[B])
    ),
    "transcript_preference": parts(prompt=ASKED, chosen=[{**A, "content": "a"}], rejected=[B]),
    "openai_preference": parts(prompt=ASKED, chosen=[A], rejected=[B], tools=TOOLS),
    "unpaired": parts(prompt=ASKED, completion=[A], label=False),
    "messages_label": lambda number: {"prompt": talk(number)[:-1], "completion": [A], "label": bool(number)},
    "prompts": parts(prompt=ASKED),
}  # fmt: skip
WRITTEN: dict[str, Callable[[int], Fields]] = {  # and how users write it
    "text": MADE["text"],
    "messages": MADE["messages"],
    "prompt_completion": parts(prompt=ASKED, completion="a\n"),
    "alpaca": parts(instruction="Grüße?", input="", output="a\n", system="s", history=[["0", "1"]]),
    "sharegpt": lambda number: {"conversations": from_value(number), "tools": json.dumps([TOOL])},
    "reasoning": lambda number: {"problem": "Grüße?", "thinking": f"t{number}", "solution": "a"},
    "function_calling": lambda number: {
        "query": "Grüße?", "tools": [TOOL], "answers": [{"name": "weather", "arguments": CALLED[number]}],
    },
    "preference": parts(prompt=ASKED, chosen="a\n", rejected="b"),
    "implicit_preference": parts(chosen=[*ASKED, A], rejected=[*ASKED, B]),
    "transcript_preference": parts(
        chosen="System: s\n\nHuman: 0\n\nAssistant: 1\n\nHuman: Grüße?\n\nAssistant: a\n",
        rejected="System: s\n\nHuman: 0\n\nAssistant: 1\n\nHuman: Grüße?\n\nAssistant: b",
    ),
    "sharegpt_ranking": parts(
        conversations=from_value(0)[:4], chosen={"from": "gpt", "value": "a\n"}, rejected={"from": "gpt", "value": "b"}
    ),
    "openai_preference": parts(
        input={"messages": ASKED, "tools": [TOOL]}, preferred_output=[A], non_preferred_output=[B]
    ),
    "oumi_preference": parts(messages=ASKED, chosen={"messages": [A]}, rejected={"messages": [B]}),
    "unpaired": parts(prompt=ASKED, response=[A], label=False),
    "messages_label": lambda number: {"messages": talk(number), "label": bool(number)},
    "prompts": parts(prompt=ASKED, answer=4),
}  # fmt: skip


def write_lines(path: Path, rows: list[Fields]) -> Path:
    path.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path.with_suffix(".jsonl")


def write_table(path: Path, rows: list[Fields]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path.with_suffix(".parquet"))  # type: ignore[no-untyped-call]
    return path.with_suffix(".parquet")


def test_every_format_is_written() -> None:
    assert WRITTEN.keys() == MADE.keys() == BY_NAME.keys()


@pytest.mark.parametrize("write", [write_lines, write_table])
@pytest.mark.parametrize("name", WRITTEN)
def test_rows_in_a_file_become_the_messages_that_they_were_made_of(
    name: str, write: Callable[[Path, list[Fields]], Path], tmp_path: Path
) -> None:
    path = write(tmp_path / "rows", [WRITTEN[name](number) for number in (0, 1)])
    entries = [entry for chunk in read_chunks(Source(path=str(path))) for entry in chunk.rows()]
    fields = [entry.fields for entry in entries if isinstance(entry, Row)]
    detected = detect(fields, str(path))
    assert detected.name == name
    for number, each in enumerate(fields):
        made = detected.convert(each)
        decoded: Fields = {
            column: messages_of(value) if isinstance(value, list) else value for column, value in made.items()
        }
        if "tools" in made:
            decoded["tools"] = tools_of(made)
        expected = MADE[name](number)
        assert {column: decoded[column] for column in expected} == expected
        assert {column for column, value in decoded.items() if value is not None} - {"columns"} == expected.keys()
    assert len(fields) == 2
