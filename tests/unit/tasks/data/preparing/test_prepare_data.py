"""What the data stages accept, refuse, hold out and write."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from lineage.artifact import Kind, Source
from lineage.errors import DataError
from tasks.context import TrainContext
from tasks.method import Input, Method
from tasks.prepare_data import PrepareConversations, PreparePreferences, PrepareText

Fields = Mapping[str, object]
QUESTION = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}


def prepare(directory: Path, method: Method, rows: Sequence[Fields], out: str = "out") -> dict[str, float]:
    file = directory / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = Input(name="rows", kind=Kind.ROWS, fingerprint="", path=file, source=Source(path=str(file)))
    return dict(method.run({"rows": source}, TrainContext(output_dir=directory / out, work_dir=directory)))


def side(directory: Path, name: str, out: str = "out") -> list[dict[str, object]]:
    rows: list[dict[str, object]] = pq.read_table(directory / out / f"{name}.parquet").to_pylist()
    return rows


def numbered(count: int) -> list[Fields]:
    return [{"text": f"row {index}"} for index in range(count)]


def test_every_row_is_in_training_or_held_out_and_duplicates_are_counted(tmp_path: Path) -> None:
    metrics = prepare(tmp_path, PrepareText(held_out=0.2), [*numbered(200), *numbered(7), *numbered(3)])
    train, held_out = side(tmp_path, "train"), side(tmp_path, "held_out")
    assert metrics == {"rows": 210, "train_rows": len(train), "held_out_rows": len(held_out), "duplicates": 10}
    assert len(train) + len(held_out) == 210
    assert 20 <= len(held_out) <= 60
    assert len({row["row_id"] for row in [*train, *held_out]}) == 210
    assert not {row["text"] for row in train} & {row["text"] for row in held_out}
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == {**metrics, "ignored_columns": {}}


def test_a_row_keeps_its_side_and_its_id_when_rows_are_added(tmp_path: Path) -> None:
    prepare(tmp_path, PrepareText(held_out=0.2), numbered(100), "before")
    prepare(tmp_path, PrepareText(held_out=0.2), [{"text": "new"}, *reversed(numbered(300))], "after")
    for name in ("train", "held_out"):
        before = {str(row) for row in side(tmp_path, name, "before")}
        assert before <= {str(row) for row in side(tmp_path, name, "after")}


def test_a_group_is_held_out_together(tmp_path: Path) -> None:
    rows = [{"text": f"row {index}", "group": f"g{index % 20}"} for index in range(200)]
    prepare(tmp_path, PrepareText(held_out=0.3), rows)
    group = {row["text"]: row["group"] for row in rows}
    held_out = {group[row["text"]] for row in side(tmp_path, "held_out")}
    assert held_out
    assert not held_out & {group[row["text"]] for row in side(tmp_path, "train")}


def test_the_pairs_of_one_prompt_are_held_out_together(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{index % 30}", "chosen": f"good {index}", "rejected": "bad"} for index in range(90)]
    prepare(tmp_path, PreparePreferences(held_out=0.3), rows)
    held_out = {str(row["prompt"]) for row in side(tmp_path, "held_out")}
    assert held_out
    assert not held_out & {str(row["prompt"]) for row in side(tmp_path, "train")}


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    for out in ("first", "second"):
        prepare(tmp_path, PrepareText(held_out=0.2), numbered(25_000), out)
    digests = [
        {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in (tmp_path / out).iterdir()}
        for out in ("first", "second")
    ]
    assert digests[0] == digests[1]
    assert set(digests[0]) == {"train.parquet", "held_out.parquet", "report.json"}


@pytest.mark.parametrize("change", [{"held_out": 0.4}, {"seed": 1}])
def test_each_field_changes_the_split(tmp_path: Path, change: dict[str, float]) -> None:
    method = PrepareText(held_out=0.2)
    prepare(tmp_path, method, numbered(100), "before")
    prepare(tmp_path, replace(method, **change), numbered(100), "after")  # type: ignore[arg-type]
    assert side(tmp_path, "held_out", "before") != side(tmp_path, "held_out", "after")


def test_strings_and_messages_of_a_preference_come_out_in_one_form(tmp_path: Path) -> None:
    rows = [
        {"prompt": "q", "chosen": "a", "rejected": "b", "kind": "k"},
        {"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "b"}], "id": 7, "kind": "k"},
        *({"prompt": f"q{index}", "chosen": "a", "rejected": "b"} for index in range(30)),
    ]
    metrics = prepare(tmp_path, PreparePreferences(held_out=0.2), rows)
    found = [row for name in ("train", "held_out") for row in side(tmp_path, name) if row["prompt"] == [QUESTION]]
    assert metrics["duplicates"] == 1
    assert found[1] == {**found[0], "row_id": f"{found[0]['row_id']}-1"}
    assert found[0]["chosen"] == [ANSWER]
    assert found[0]["rejected"] == [{"role": "assistant", "content": "b"}]
    assert json.loads((tmp_path / "out" / "report.json").read_text())["ignored_columns"] == {"id": 1}


TEXT = '{"text": "..."}'
MESSAGES = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
PAIR = '{"prompt": "...", "chosen": "...", "rejected": "..."}, each a string or a list of messages'
RENAME = "add {0!r} or rename the field that holds it"
WRITE_MESSAGES = "write a list of messages"
REFUSALS: list[tuple[Method, Fields, str, str, str]] = [
    (PrepareText(), {"body": "a", "id": 1}, "no field 'text' (fields: body, id)", TEXT, RENAME.format("text")),
    (PrepareText(), {"text": None}, "text is null", TEXT, "write a string"),
    (PrepareText(), {"text": ["a"]}, "text is of type list", TEXT, "write a string"),
    (PrepareText(), {"text": " \n"}, "text is empty", TEXT, "fill it or remove the row"),
    (
        PrepareText(), {"text": "ab\ud83d"},
        "text has half a surrogate pair at character 2", "text", "write the whole character",
    ),
    (
        PrepareText(), {"text": "a", "group": 1},
        "group is of type int", "a string or null", "rows of one group are held out together",
    ),
    (
        PrepareConversations(), {"text": "a"},
        "no field 'messages' (fields: text)", MESSAGES, RENAME.format("messages"),
    ),
    (PrepareConversations(), {"messages": []}, "messages is empty", MESSAGES, WRITE_MESSAGES),
    (PrepareConversations(), {"messages": "a"}, "messages is of type str", MESSAGES, WRITE_MESSAGES),
    (
        PrepareConversations(), {"messages": ["a"]},
        "messages[0] is of type str", MESSAGES, 'write {"role": ..., "content": ...}',
    ),
    (
        PrepareConversations(), {"messages": [{"from": "user", "content": "q"}]},
        "messages[0] has no 'role' (it has: content, from)", MESSAGES, "add 'role'",
    ),
    (
        PrepareConversations(), {"messages": [QUESTION, {"role": "gpt", "content": "a"}]},
        "messages[1] has the role 'gpt'", "system, user, assistant", "rename the role or remove the row",
    ),
    (
        PrepareConversations(), {"messages": [QUESTION, {**ANSWER, "tool_calls": [1]}]},
        "messages[1] has tool_calls", '"role" and "content" alone', "remove it or the row",
    ),
    (
        PrepareConversations(), {"messages": [QUESTION, {**ANSWER, "content": " "}]},
        "messages[1] content is empty", MESSAGES, "fill it or remove the row",
    ),
    (
        PrepareConversations(), {"messages": [QUESTION]},
        "messages has no assistant turn", MESSAGES, "add the answer to learn from, or remove the row",
    ),
    (
        PreparePreferences(), {"prompt": "q", "chosen": "a"},
        "no field 'rejected' (fields: chosen, prompt)", PAIR, RENAME.format("rejected"),
    ),
    (
        PreparePreferences(), {"prompt": "q", "chosen": "a", "rejected": "a"},
        "chosen and rejected are the same", PAIR, "there is nothing to prefer: remove the row",
    ),
    (
        PreparePreferences(), {"prompt": "q", "chosen": [QUESTION, ANSWER], "rejected": "b"},
        "chosen has messages of user, assistant", "one assistant message", "move what precedes it to prompt",
    ),
    (
        PreparePreferences(), {"prompt": [QUESTION, ANSWER], "chosen": "a", "rejected": "b"},
        "prompt ends with the role 'assistant'", "a prompt that ends with a user message", "move the answer to chosen",
    ),
    (
        PreparePreferences(), {"prompt": "q", "chosen": "a", "rejected": "b", "kind": 3},
        "kind is of type int", "a string or null", "it names what is wrong with the rejected answer",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("method", "row", "found", "accepted", "mend"), REFUSALS, ids=range(len(REFUSALS)))
def test_a_bad_row_is_named_with_what_is_accepted_and_what_to_do(
    tmp_path: Path, method: Method, row: Fields, found: str, accepted: str, mend: str
) -> None:
    good = {"text": "a", "messages": [QUESTION, ANSWER], "prompt": "q", "chosen": "a", "rejected": "b"}
    with pytest.raises(DataError) as refusal:
        prepare(tmp_path, method, [good, row])
    where = f"{tmp_path}/rows.jsonl:2"
    assert str(refusal.value) == f"1 of 2 rows cannot be used:\n  {where}: {found}; accepted: {accepted}; {mend}"


def test_at_most_twenty_bad_rows_are_shown(tmp_path: Path) -> None:
    with pytest.raises(DataError) as refusal:
        prepare(tmp_path, PrepareText(), [{"text": ""}] * 25)
    lines = str(refusal.value).splitlines()
    assert (lines[0], lines[-1], len(lines)) == ("25 of 25 rows cannot be used:", "  and 5 more", 22)


def test_an_empty_side_is_refused_with_the_share_that_would_fill_it(tmp_path: Path) -> None:
    with pytest.raises(DataError) as refusal:
        prepare(tmp_path, PrepareText(held_out=0.001), numbered(5))
    *_, needed = str(refusal.value).split()
    assert str(refusal.value) == (
        f"held_out=0.001 of 5 rows leaves none to measure on; give more rows or groups, or a held_out above {needed}"
    )
    assert prepare(tmp_path, PrepareText(held_out=float(needed) + 0.001), numbered(5))["held_out_rows"] == 1
    with pytest.raises(DataError, match=r"held_out=0\.999 of 1 rows leaves none to train on"):
        prepare(tmp_path, PrepareText(held_out=0.999), numbered(1))
