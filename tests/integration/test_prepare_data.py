"""What the data stages accept, take, refuse, hold out and write."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from lineage.artifact import Kind, Source
from lineage.errors import ConfigError, DataError
from tasks.context import TrainContext
from tasks.data.formats.detect import WITHOUT_LOSS
from tasks.data.kinds import messages_of
from tasks.method import Input, Method
from tasks.prepare_data import PrepareConversations, PreparePreferences, PreparePrompts, PrepareText, PrepareUnpaired
from tests import tiny
from tests.prepared import SIDES, Fields, numbered, prepare, report, side, texts

QUESTION = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
PAIR = {"prompt": "q", "chosen": "a", "rejected": "b"}
METHOD = PrepareText(held_out=0.2)
NO_TEXT: Fields = {"text": ""}


def of_rows(directory: Path, out: str = "out") -> dict:
    """What the report says of the slot of rows."""
    return report(directory, out)["sources"]["rows"]  # type: ignore[index]


def rejects(directory: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (directory / "out" / "rejects.jsonl").read_text().splitlines()]


def test_every_row_is_in_training_or_held_out_and_duplicates_are_counted(tmp_path: Path) -> None:
    metrics = prepare(tmp_path, METHOD, [*numbered(200), *numbered(7), *numbered(3)])
    train, held_out = side(tmp_path, "train"), side(tmp_path, "held_out")
    assert metrics == {
        "rows": 210, "train_rows": len(train), "held_out_rows": len(held_out), "duplicates": 10, "dropped": 0,
        "near_duplicate_rows": 0, "leaked_rows": 0,
    }  # fmt: skip
    assert len(train) + len(held_out) == 210
    assert 20 <= len(held_out) <= 60
    assert len({row["row_id"] for row in [*train, *held_out]}) == 210
    assert not {row["text"] for row in train} & {row["text"] for row in held_out}
    assert metrics.items() <= report(tmp_path).items()
    assert {file.name for file in tmp_path.iterdir()} == {"out", "rows.jsonl"}  # nothing is left in the scratch


@pytest.mark.parametrize("held_out", [0.1, 50])
def test_no_row_changes_its_side_or_its_id_as_a_set_grows(tmp_path: Path, held_out: float) -> None:
    for count in (500, 550, 990):
        prepare(tmp_path, PrepareText(held_out=held_out), [{"text": "new"}, *reversed(numbered(count))], str(count))
    before, *grown = (
        {name: {str(row) for row in side(tmp_path, name, out)} for name in SIDES} for out in ("500", "550", "990")
    )
    for after in grown:
        assert not before["held_out"] & after["train"]
        assert not before["train"] & after["held_out"]
        assert before["train"] <= after["train"]
        assert held_out == 50 or before["held_out"] <= after["held_out"]


def test_a_count_holds_out_as_many_rows_and_leaves_as_many_between_the_sides(tmp_path: Path) -> None:
    metrics = prepare(tmp_path, PrepareText(held_out=50), numbered(1000))
    assert metrics["held_out_rows"] == 50
    assert 20 <= metrics["dropped"] <= 90  # as many as fall between t and 2 t
    assert metrics["rows"] == 1000 - metrics["dropped"] == 50 + metrics["train_rows"]
    [(why, count)] = of_rows(tmp_path)["dropped"].items()
    assert why.startswith("on neither side, since held_out is a count") and count == metrics["dropped"]
    prepare(tmp_path, PrepareText(held_out=50), numbered(5000), "grown")
    assert not set(texts(tmp_path, "train")) & set(texts(tmp_path, "held_out", "grown"))  # however much it grows
    grouped = [{"text": f"row {index}", "group": f"g{index % 50}"} for index in range(500)]
    assert prepare(tmp_path, PrepareText(held_out=25), grouped, "grouped")["held_out_rows"] == 30  # whole groups


def test_labels_are_kept_beside_a_row_and_are_no_part_of_it(tmp_path: Path) -> None:
    rows = [{**row, "topic": topic} for row, topic in zip(numbered(4), ("law", 7, None, ""), strict=True)]
    prepare(tmp_path, METHOD, rows)
    prepare(tmp_path, METHOD, rows, "labelled", columns={"domain": "topic"})
    plain, labelled = ([row for name in SIDES for row in side(tmp_path, name, out)] for out in ("out", "labelled"))
    unread = [of_rows(tmp_path, out)["ignored_columns"] for out in ("out", "labelled")]
    assert unread == [{"topic": 4}, {}]
    found = {row["text"]: row.pop("domain") for row in labelled}
    assert labelled == plain and found == dict(
        zip((row["text"] for row in rows), ("law", "7", None, None), strict=True)
    )
    with pytest.raises(DataError, match=r"rows.jsonl:1: domain is an object.*; accepted: a text of at most 100"):
        prepare(tmp_path, METHOD, [{"text": "a", "topic": {"a": 1}}], columns={"domain": "topic"})
    with pytest.raises(DataError, match=r"columns.domain: these are preferences, and labels of text and conv"):
        prepare(tmp_path, PreparePreferences(), [{**PAIR, "topic": "law"}], columns={"domain": "topic"})


def group_of(row: dict[str, object]) -> object:
    """Of the rows below: every twentieth has the same prompt, or the same group."""
    if "text" in row:
        return int(str(row["text"]).split()[1]) % 20
    return str(row.get("prompt") or row["messages"][0]["content"])  # type: ignore[index]


RENAMED = {"columns": {"text": "body", "group": "page"}}
TEXT, CHAT = PrepareText(held_out=0.3), PrepareConversations(held_out=0.3)
TOGETHER: dict[str, tuple[Method, Callable[[int, str], Fields]]] = {
    "a group": (TEXT, lambda i, of: {"text": f"row {i}", "group": of}),
    "a renamed group": (TEXT, lambda i, of: {"body": f"row {i}", "page": of}),
    "a count of groups": (PrepareText(held_out=25), lambda i, of: {"text": f"row {i}", "group": of}),
    "pairs": (
        PreparePreferences(held_out=0.3), lambda i, of: {"prompt": of, "chosen": f"good {i}", "rejected": "bad"}
    ),
    "labels": (
        PrepareUnpaired(held_out=0.3), lambda i, of: {"prompt": of, "completion": f"a{i}", "label": i % 2 == 0}
    ),
    "prompt and completion": (CHAT, lambda i, of: {"prompt": of, "completion": f"a{i}"}),
    "alpaca": (CHAT, lambda i, of: {"instruction": of, "output": f"a{i}"}),
    "messages": (
        CHAT, lambda i, of: {"messages": [{**QUESTION, "content": of}, {**ANSWER, "content": f"a{i}"}]}
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TOGETHER)
def test_what_belongs_together_is_on_one_side(tmp_path: Path, case: str) -> None:
    method, row = TOGETHER[case]
    rows = [row(index, f"g{index % 20}") for index in range(200)]
    metrics = prepare(tmp_path, method, rows, **(RENAMED if case == "a renamed group" else {}))
    train, held_out = ({group_of(found) for found in side(tmp_path, name)} for name in SIDES)
    assert train and held_out and not train & held_out
    assert metrics["rows"] + metrics["dropped"] == 200


def test_copies_of_a_row_are_on_one_side_whatever_their_groups_and_that_is_reported(tmp_path: Path) -> None:
    rows = [{"text": f"row {index % 100}", "group": f"g{index}"} for index in range(300)]
    metrics = prepare(tmp_path, PrepareText(held_out=0.5), rows)
    assert metrics["duplicates"] == 200
    assert not set(texts(tmp_path, "train")) & set(texts(tmp_path, "held_out"))
    ids = [str(row["row_id"]) for name in SIDES for row in side(tmp_path, name)]
    assert len(set(ids)) == 300
    assert sum(row_id.endswith("-2") for row_id in ids) == 100
    reported = of_rows(tmp_path)["remarks"]["away from its group, beside the row that it is a copy of"]
    assert 60 <= reported["count"] <= 140
    assert len(reported["places"]) == 5 and {*reported["places"]} <= {*ids}
    grouped = [{"text": f"row {index % 100}", "group": f"g{index % 100}"} for index in range(300)]
    prepare(tmp_path, PrepareText(held_out=0.5), grouped, "one group")
    assert of_rows(tmp_path, "one group")["remarks"] == {}


def test_the_same_rows_give_the_same_bytes_and_each_field_another_split(tmp_path: Path) -> None:
    for out in ("first", "second"):
        prepare(tmp_path, METHOD, numbered(12_000), out)
    digests = [
        {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in (tmp_path / out).iterdir()}
        for out in ("first", "second")
    ]
    assert digests[0] == digests[1]
    assert {"train.parquet", "held_out.parquet", "report.json", "report.html"} < set(digests[0])
    for number, method in enumerate((METHOD, replace(METHOD, held_out=0.4), replace(METHOD, seed=1))):
        prepare(tmp_path, method, numbered(100), str(number))
    assert len({str(side(tmp_path, "held_out", str(number))) for number in range(3)}) == 3


def test_strings_and_messages_of_a_preference_come_out_in_one_form(tmp_path: Path) -> None:
    rows = [
        {**PAIR, "kind": "k"},
        {"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "b"}], "id": 7, "kind": "k"},
        *({**PAIR, "prompt": f"q{index}"} for index in range(30)),
    ]
    metrics = prepare(tmp_path, PreparePreferences(held_out=0.2), rows)
    found = [row for name in SIDES for row in side(tmp_path, name) if messages_of(row["prompt"]) == [QUESTION]]
    assert metrics["duplicates"] == 1
    assert found[1] == {**found[0], "row_id": f"{found[0]['row_id']}-1"}
    assert messages_of(found[0]["chosen"]) == [ANSWER]
    assert messages_of(found[0]["rejected"]) == [{"role": "assistant", "content": "b"}]
    assert of_rows(tmp_path)["ignored_columns"] == {"id": 1}


IDS: list[tuple[Method, Fields, str]] = [
    (PrepareText(held_out=0.5), {"text": "row 0"}, "65df74098d2c5b46"),
    (PrepareConversations(held_out=0.5), {"messages": [QUESTION, {**ANSWER, "content": "ä"}]}, "58b18eac9b27ad00"),
    (
        PrepareConversations(held_out=0.5),
        {"messages": [{"role": "system", "content": "s"}, QUESTION, ANSWER]},
        "9e41d07551568a06",
    ),
    (PreparePreferences(held_out=0.5), PAIR, "8232f3251b1ae517"),
    (PreparePreferences(held_out=0.5), {**PAIR, "kind": "k"}, "4eb808286f7ff7cd"),
]


@pytest.mark.parametrize(("method", "row", "row_id"), IDS)
def test_a_row_has_the_id_that_it_always_had(tmp_path: Path, method: Method, row: Fields, row_id: str) -> None:
    """Data of earlier versions, replay and impact know it by that."""
    questions = [{**QUESTION, "content": f"q{index}"} for index in range(30)]
    others = [{"text": f"{q}", "messages": [q, ANSWER], **PAIR, "prompt": [q], "kind": "k"} for q in questions]
    prepare(tmp_path, method, [row, *({name: other[name] for name in row} for other in others)])
    assert row_id in {found["row_id"] for name in SIDES for found in side(tmp_path, name)}


def test_turns_without_loss_are_a_column_of_files_that_have_some(tmp_path: Path) -> None:
    plain = [{"messages": [{**QUESTION, "content": f"q {index}"}, ANSWER]} for index in range(20)]
    weighed = [{"messages": [{**QUESTION, "weight": 0}, {**ANSWER, "weight": 0}, QUESTION, ANSWER]}]
    method = PrepareConversations(held_out=0.2)
    prepare(tmp_path, method, plain, "plain")
    prepare(tmp_path, method, [*plain, *weighed], "weighed")
    assert list(side(tmp_path, "train", "plain")[0]) == ["row_id", "messages", "tools"]
    rows = [row for name in SIDES for row in side(tmp_path, name, "weighed")]
    before = [row for name in SIDES for row in side(tmp_path, name, "plain")]
    assert {row["row_id"]: row["untrained"] for row in rows if row["untrained"]} == {
        row["row_id"]: "[0]" for row in rows if len(messages_of(row["messages"])) == 4
    }
    assert {row["row_id"] for row in before} < {row["row_id"] for row in rows}, "other rows keep their ids"


def test_rows_without_loss_are_left_out_and_counted_and_are_no_bad_rows(tmp_path: Path) -> None:
    rows = [{**row, "weight": int(index % 3 > 0)} for index, row in enumerate(numbered(30))]
    metrics = prepare(tmp_path, METHOD, rows)
    kept = [str(row["text"]) for row in rows if row["weight"]]
    assert sorted(text for name in SIDES for text in texts(tmp_path, name)) == sorted(kept)
    assert (metrics["rows"], metrics["dropped"]) == (20, 10) and not (tmp_path / "out" / "rejects.jsonl").exists()
    assert of_rows(tmp_path)["dropped"] == {WITHOUT_LOSS: 10} and of_rows(tmp_path)["ignored_columns"] == {}
    with pytest.raises(DataError, match=r"^1 of 31 rows cannot be used"):
        prepare(tmp_path, METHOD, [*rows, {"text": 1}])
    assert report(tmp_path)["dropped"] == 11


def test_prompts_keep_the_columns_that_a_reward_is_computed_from(tmp_path: Path) -> None:
    prepare(tmp_path, PreparePrompts(held_out=0.3), [{"prompt": f"q{index}", "answer": index} for index in range(40)])
    row = side(tmp_path, "train")[0]
    question = row["prompt"][0]["content"]  # type: ignore[index]
    assert json.loads(str(row["columns"])) == {"answer": int(question[1:])}


def test_a_system_prompt_is_put_before_conversations_that_have_none_and_moves_no_row(tmp_path: Path) -> None:
    system = {"role": "system", "content": "mine"}
    rows = [
        {"messages": [*([system] if index % 2 else []), {**QUESTION, "content": f"q{index}"}, ANSWER]}
        for index in range(100)
    ]
    sides = []
    for out, prompt in (("without", None), ("with", "theirs")):
        prepare(tmp_path, PrepareConversations(held_out=0.3, system_prompt=prompt), rows, out)
        sides.append({row["messages"][-2]["content"] for row in side(tmp_path, "held_out", out)})  # type: ignore[index]
    firsts = [row["messages"][0]["content"] for row in side(tmp_path, "train", "with")]  # type: ignore[index]
    assert set(firsts) == {"mine", "theirs"} and sides[0] == sides[1]


def test_a_template_makes_prompts_of_columns(tmp_path: Path) -> None:
    rows = [{"context": f"c{index}", "question": "q?", "completion": "a", "id": index} for index in range(40)]
    prepare(tmp_path, PrepareConversations(held_out=0.3, prompt_template="{context}: {question}"), rows)
    asked = {row["messages"][0]["content"] for row in side(tmp_path, "train")}  # type: ignore[index]
    assert asked < {f"c{index}: q?" for index in range(40)}
    assert of_rows(tmp_path)["ignored_columns"] == {"id": 40}


SHARE = "a share of the rows above 0.0 and below 1.0, or a count of them from 1 on, is accepted; set held_out=0.05"


@pytest.mark.parametrize(
    ("cls", "fields", "message"),
    [
        (PrepareText, {"system_prompt": "a"}, "^system_prompt: this stage produces raw text, which has neither system"),
        (PrepareText, {"prompt_template": "{a}"}, "^prompt_template: this stage produces raw text, which has neither"),
        (PrepareConversations, {"prompt_template": "a question"}, "^prompt_template: no placeholder; accepted: "),
        *((PrepareText, {"held_out": each}, f"^held_out={each}: {SHARE}") for each in (0, -1, 0.0, 1.0, -0.5, True)),
        (PrepareText, {"held_out": 50, "replay_share": 0.3}, "^held_out=50 and replay_share=0.3: .*held_out=0.05$"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_set(cls: type, fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cls(**fields)


def test_an_empty_system_prompt_is_refused_when_it_is_set() -> None:
    with pytest.raises(ValidationError, match=r"system_prompt\n.*at least 1 character"):
        TypeAdapter(PrepareConversations).validate_json('{"system_prompt": ""}')


def test_rows_of_another_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError) as refusal:
        prepare(tmp_path, PrepareConversations(), numbered(10))
    assert str(refusal.value) == (
        f"{tmp_path}/rows.jsonl: detected text (has text: 10 of 10 rows looked at), which gives text; "
        "conversations is accepted by this stage; use pipeline=cpt, or conf/stage/text.yaml, or set another format "
        "with format=NAME"
    )


def test_the_report_says_how_rows_were_read_and_what_was_odd(tmp_path: Path) -> None:
    rows: list[Fields] = [*numbered(50), {"text": "a\u0001b", "url": "u"}]
    prepare(tmp_path, METHOD, rows)
    assert of_rows(tmp_path) == {
        "path": f"{tmp_path}/rows.jsonl", "format": "text", "mapping": {"text": "the document"},
        "evidence": "has text: 51 of 51 rows looked at", "rows_read": 51, "rows_used": 51, "dropped": {},
        "remarks": {"control characters": {"count": 1, "places": [f"{tmp_path}/rows.jsonl:51"]}},
        "ignored_columns": {"url": 1},
    }  # fmt: skip
    assert report(tmp_path)["lengths"]["unit"] == "bytes"  # type: ignore[index]


def test_answers_that_are_transcripts_are_counted(tmp_path: Path) -> None:
    output = [f"USER: {row} ASSISTANT: yes" if row < 30 else f"yes {row}" for row in range(50)]
    metrics = prepare(
        tmp_path, PrepareConversations(held_out=0.3), [{"prompt": f"p {row}", "completion": row} for row in output]
    )
    assert metrics["rows_with_role_marks"] == 30
    assert "rows_with_role_marks" not in prepare(tmp_path, METHOD, numbered(50), "out2")


def test_near_duplicates_and_leaked_rows_are_counted_and_kept(tmp_path: Path) -> None:
    long = [" ".join(f"{subject}{index}" for index in range(100)) for subject in range(20)]
    metrics = prepare(
        tmp_path, PrepareText(held_out=0.5), [{"text": text + end} for text in long for end in (" a", " b")]
    )
    assert (metrics["near_duplicate_rows"], metrics["duplicates"], metrics["rows"]) == (20, 0, 40)
    assert metrics["leaked_rows"] > 0 and report(tmp_path)["leakage"]


def test_rows_are_measured_in_the_tokens_of_a_model_that_is_given(tmp_path: Path) -> None:
    file, model = tmp_path / "rows.jsonl", tiny.write_tokenizer(tmp_path / "model")
    prepare(tmp_path, METHOD, numbered(30), "bytes")
    inputs = {
        "rows": Input(name="rows", kind=Kind.ROWS, fingerprint="", path=file, source=Source(path=str(file))),
        "tokenizer": Input(name="base", kind=Kind.CHECKPOINT, fingerprint="", path=model),
    }
    seen: list[tuple[str, ...]] = []
    METHOD.run(
        inputs,
        TrainContext(output_dir=tmp_path / "tokens", work_dir=tmp_path, loaded=lambda *slots: seen.append(slots)),
    )
    assert seen == [("tokenizer",)]  # which may change then
    in_bytes, in_tokens = (report(tmp_path, out)["lengths"] for out in ("bytes", "tokens"))
    assert (in_bytes["unit"], in_tokens["unit"], in_tokens["tokenizer"]) == ("bytes", "tokens", "base")  # type: ignore[index]
    assert side(tmp_path, "train", "bytes") == side(tmp_path, "train", "tokens")


def test_an_empty_side_is_refused_with_the_share_that_would_fill_it(tmp_path: Path) -> None:
    with pytest.raises(DataError) as refusal:
        prepare(tmp_path, PrepareText(held_out=0.001), numbered(5))
    *_, needed = str(refusal.value).split()
    assert str(refusal.value) == (
        f"held_out=0.001 of 5 rows leaves none to measure on; give more rows or groups, or a held_out above {needed}"
    )
    assert prepare(tmp_path, PrepareText(held_out=float(needed) + 0.001), numbered(5))["held_out_rows"] == 1
    with pytest.raises(DataError, match=r"^the one row leaves none to measure on beside it"):
        prepare(tmp_path, PrepareText(held_out=0.999), numbered(1))
    with pytest.raises(DataError, match=r"^held_out=150 of \d+ rows leaves none to train on; give more rows"):
        prepare(tmp_path, PrepareText(held_out=150), numbered(150))
    same = [{**row, "group": "one"} for row in numbered(5)]
    with pytest.raises(DataError, match=r"^held_out=1 of 5 rows leaves none to train on: all share one prompt, or one"):
        prepare(tmp_path, PrepareText(held_out=1), same)


# Which rows of a source are taken, and in which order they are written.


def taken(directory: Path, out: str = "out") -> set[str]:
    return {*texts(directory, "train", out), *texts(directory, "held_out", out)}


def names(indices: range) -> set[str]:
    return {f"row {index}" for index in indices}


@pytest.mark.parametrize(
    ("split", "indices"),
    [
        ("train[:100]", range(100)),
        ("train[90%:]", range(180, 200)),
        ("train[10%:20%]", range(20, 40)),
        ("train[-30:]", range(170, 200)),
        ("train[50:150]", range(50, 150)),
    ],
)
def test_a_slice_takes_the_rows_that_it_names(tmp_path: Path, split: str, indices: range) -> None:
    metrics = prepare(tmp_path, METHOD, numbered(200), split=split)
    assert taken(tmp_path) == names(indices)
    assert (metrics["rows"], metrics["dropped"]) == (len(indices), 200 - len(indices))
    assert of_rows(tmp_path)["dropped"] == {"outside the slice": 200 - len(indices)}


def test_a_slice_counts_bad_rows_in_it_and_reading_ends_with_it(tmp_path: Path) -> None:
    prepare(tmp_path, METHOD, [*numbered(100), {"text": None}, NO_TEXT], "outside", split="train[:100]")
    assert not (tmp_path / "outside" / "rejects.jsonl").exists()
    rows: list[Fields] = [{"text": None}, *numbered(100)]
    metrics = prepare(tmp_path, replace(METHOD, max_bad_rows=1), rows, split="train[:50]")
    assert taken(tmp_path) == names(range(49)) and metrics["dropped"] == 52
    # Of a file of many gigabytes the first thousand rows cost no more than of any other.
    prepare(tmp_path, METHOD, numbered(4000, "x" * 1000), "long", split="train[:100]")
    assert of_rows(tmp_path, "long")["rows_read"] < 3000


def test_a_sample_is_of_its_size_and_another_for_another_seed(tmp_path: Path) -> None:
    metrics = prepare(tmp_path, METHOD, numbered(300), "first", sample_count=120)
    prepare(tmp_path, METHOD, numbered(300), "again", sample_count=120)
    prepare(tmp_path, METHOD, numbered(300), "other", sample_count=120, shuffle_seed=1)
    assert (metrics["rows"], metrics["dropped"]) == (120, 180)
    assert of_rows(tmp_path, "first")["dropped"] == {"not in the sample": 180}
    assert taken(tmp_path, "first") == taken(tmp_path, "again") != taken(tmp_path, "other")
    assert len(taken(tmp_path, "other")) == 120
    assert prepare(tmp_path, METHOD, numbered(50), "all", sample_count=1000)["rows"] == 50


def test_rows_are_written_as_they_stand_unless_they_are_shuffled(tmp_path: Path) -> None:
    for out, fields in {
        "plain": {}, "shuffled": {"shuffle_seed": 0}, "again": {"shuffle_seed": 0}, "other": {"shuffle_seed": 1},
        "near": {"shuffle_seed": 0, "shuffle_buffer": 10},
    }.items():  # fmt: skip
        prepare(tmp_path, METHOD, numbered(1000), out, **fields)
    orders = {out: texts(tmp_path, "train", out) for out in ("plain", "shuffled", "again", "other")}
    assert orders["plain"] == sorted(orders["plain"], key=lambda text: int(text.split()[1]))
    assert orders["shuffled"] == orders["again"]
    assert len({tuple(order) for order in orders.values()}) == 3
    assert len({frozenset(order) for order in orders.values()}) == 1
    order = [int(text.split()[1]) for text in texts(tmp_path, "train", "near")]
    moved = [max(order[: place + 1]) - index for place, index in enumerate(order)]
    assert 0 < max(moved) <= 10


# Bad rows: refused or left out, and never lost.


def test_a_bad_row_is_named_with_its_file_and_line(tmp_path: Path) -> None:
    with pytest.raises(DataError) as refusal:
        prepare(tmp_path, PrepareText(), [*numbered(49), NO_TEXT])
    listed = rejects(tmp_path)
    where = f"{tmp_path}/rows.jsonl:50"
    assert str(refusal.value) == (
        f"1 of 50 rows cannot be used:\n  {where}: {listed[0]['problem']}\n"
        f"all of them are in {tmp_path}/out/rejects.jsonl; correct them, or leave them out with max_bad_rows=1"
    )
    assert listed == [{"where": where, "reason": "no text", "problem": listed[0]["problem"], "raw": '{"text": ""}'}]
    assert of_rows(tmp_path)["dropped"] == {"no text": 1}
    assert not (tmp_path / "out" / "train.parquet").exists()
    with pytest.raises(DataError, match=r"rows.jsonl:2: group is .*; accepted: a string or null; correct or"):
        prepare(tmp_path, PrepareText(), [{"text": "a"}, {"text": "b", "group": 1}])


def test_as_many_bad_rows_as_are_allowed_are_left_out_and_counted(tmp_path: Path) -> None:
    rows: list[Fields] = [*numbered(40), NO_TEXT, {"text": 1}, NO_TEXT]
    metrics = prepare(tmp_path, replace(METHOD, max_bad_rows=3), rows)
    assert (metrics["rows"], metrics["dropped"]) == (40, 3)
    source = of_rows(tmp_path)
    assert source["dropped"] == {"no text": 2, "not text": 1}
    assert (source["rows_read"], source["rows_used"]) == (43, 40)
    assert report(tmp_path)["rejects"] == "rejects.jsonl"
    with pytest.raises(DataError, match=r"^3 of 43 rows cannot be used:"):
        prepare(tmp_path, replace(METHOD, max_bad_rows=2), rows)


@pytest.mark.parametrize(
    ("max_bad_rows", "num_good", "bad", "is_taken"),
    [
        (None, 198, NO_TEXT, True),  # 2 of 200 are empty
        (None, 197, NO_TEXT, False),
        (None, 198, {"text": 1}, False),  # another fault
        (0, 198, NO_TEXT, False),
        (0.05, 38, {"text": 1}, True),
        (0.05, 37, {"text": 1}, False),
        (2, 38, {"text": 1}, True),
    ],
)
def test_a_share_of_bad_rows_or_a_number_may_be_left_out(tmp_path, max_bad_rows, num_good, bad, is_taken) -> None:
    rows: list[Fields] = [bad, *numbered(num_good), bad]
    method = replace(METHOD, max_bad_rows=max_bad_rows)
    if is_taken:
        assert prepare(tmp_path, method, rows)["dropped"] == 2
    else:
        with pytest.raises(DataError, match=f"^2 of {num_good + 2} rows cannot be used:"):
            prepare(tmp_path, method, rows)


def test_the_default_has_the_identity_that_0_had_and_0_another() -> None:
    assert METHOD.max_bad_rows is None and METHOD.recipe()["max_bad_rows"] == 0
    recipes = [replace(METHOD, max_bad_rows=each).recipe()["max_bad_rows"] for each in (0, 0.05, 5)]
    assert recipes == ["none", 0.05, 5]


def test_rows_not_one_of_which_can_be_read_are_listed_too(tmp_path: Path) -> None:
    file = tmp_path / "broken.jsonl"
    file.write_text('{"text": "a\n' * 25)
    rows = Input(name="rows", kind=Kind.ROWS, fingerprint="", path=file, source=Source(path=str(file)))
    with pytest.raises(DataError, match=r"^25 of 25 rows cannot be used:\n  .*broken.jsonl:1: ") as refusal:
        PrepareText().run({"rows": rows}, TrainContext(output_dir=tmp_path / "out", work_dir=tmp_path))
    lines = str(refusal.value).splitlines()  # at most three of one problem are shown
    assert (lines[4], len(lines)) == ("  and 22 more", 6) and len(rejects(tmp_path)) == 25
    assert of_rows(tmp_path)["format"] == "unknown"


WORDS = st.text(alphabet="abcdé \n", max_size=12)
GOOD = st.builds(
    lambda asked, output: {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": output}]},
    WORDS.map("q{}".format), WORDS.map("a{}".format),
)  # fmt: skip
BAD = st.sampled_from(
    [
        {"messages": []},
        {"messages": [{"role": "user", "content": "q"}]},
        {"messages": [{"role": "assistant", "content": 7}]},
        {"messages": None},
        {"other": "x"},
    ]
)


@given(
    rows=st.lists(st.one_of(GOOD, GOOD, GOOD, BAD), min_size=1, max_size=40), held_out=st.sampled_from([0.3, 0.6, 3])
)
@settings(max_examples=5)
def test_every_row_is_used_or_counted_and_on_one_side(
    tmp_path_factory: pytest.TempPathFactory, rows: Sequence[Fields], held_out: float
) -> None:
    directory = tmp_path_factory.mktemp("any")
    good = [row for row in rows if len(row.get("messages") or []) == 2]  # type: ignore[arg-type]
    try:
        metrics = prepare(directory, PrepareConversations(held_out=held_out, max_bad_rows=len(rows)), rows)
    except DataError as error:
        message = str(error)
        assert "leaves none to" in message or "no format fits" in message or "formats fit" in message
        return
    sides = {name: side(directory, name) for name in SIDES}
    assert metrics["rows"] + metrics["dropped"] == len(rows)
    assert metrics["rows"] == sum(map(len, sides.values())) <= len(good)
    contents = {name: {str(row["row_id"]).split("-")[0] for row in found} for name, found in sides.items()}
    assert not contents["train"] & contents["held_out"]
    kept = [str([message["content"] for message in row["messages"]]) for found in sides.values() for row in found]  # type: ignore[attr-defined]
    known = [str([message["content"] for message in row["messages"]]) for row in good]  # type: ignore[attr-defined]
    assert all(kept.count(text) <= known.count(text) for text in kept)
