"""The demonstration sets of LLaMA-Factory, where they lie beside the repository: real shapes, real flaws."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tasks.data.formats.detect import detect
from tasks.data.formats.turns import BadRowError
from tasks.data.kinds import messages_of, tools_of
from tasks.data.preparing.convert_rows import remarks

SETS = Path(__file__).parents[6] / "shared" / "data" / "llamafactory-demo"
Rows = list[dict[str, object]]


def read(name: str) -> Rows:
    file = SETS / name
    if not file.exists():
        pytest.skip(f"no {file}")
    text = file.read_text()
    rows: Rows = json.loads(text) if file.suffix == ".json" else [json.loads(line) for line in text.splitlines()]
    return rows


@pytest.mark.parametrize(
    ("name", "format", "flaws"),
    [
        ("c4_demo.jsonl", "text", {"replacement characters U+FFFD": 4}),
        ("alpaca_en_demo.json", "alpaca", {}),
        ("dpo_en_demo.json", "sharegpt_ranking", {"control characters": 2, "byte order marks U+FEFF": 1}),
        ("kto_en_demo.json", "messages_label", {"control characters": 1, "role marks in an answer": 2}),
        ("glaive_toolcall_en_demo.json", "sharegpt", {}),
    ],
)
def test_every_row_is_read(name: str, format: str, flaws: dict[str, int]) -> None:
    rows = read(name)
    detected = detect(rows, name)
    assert detected.name == format
    assert detected.evidence.endswith(f": {len(rows)} of {len(rows)} rows looked at")
    made = [detected.convert(row) for row in rows]
    assert Counter(overrides for row in made for overrides in remarks(row)) == flaws
    assert all(detected.read_columns(row) == row.keys() for row in rows)


def test_calls_and_tools_say_what_the_set_says() -> None:
    rows = read("glaive_toolcall_en_demo.json")
    detected = detect(rows, "glaive")
    calls = 0
    for row in rows:
        made = detected.convert(row)
        given = json.loads(str(row["tools"]))
        assert (tools_of(made) or []) == [{"type": "function", "function": tool} for tool in given]
        for turn, message in zip(row["conversations"], messages_of(made["messages"]), strict=True):  # type: ignore[call-overload]
            if turn["from"] == "function_call":
                calls += 1
                (call,) = message["tool_calls"]  # type: ignore[misc]
                assert call == {"type": "function", "function": json.loads(turn["value"])}
            else:
                assert message["content"] == turn["value"]
    assert calls > 100


def test_rows_with_images_are_named() -> None:
    rows = read("mllm_demo.json")
    detected = detect(rows, "mllm")
    for row in rows:
        with pytest.raises(BadRowError, match=r"^the row has images; accepted: text, and images"):
            detected.convert(row)
