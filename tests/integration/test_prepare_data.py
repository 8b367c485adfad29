"""What the data stages accept, refuse, hold out and write."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from lineage.artifact import Kind, Source
from lineage.errors import ConfigError, DataError
from tasks.context import TrainContext
from tasks.data.kinds import messages_of
from tasks.method import Input, Method
from tasks.prepare_data import PrepareConversations, PreparePreferences, PreparePrompts, PrepareText, PrepareUnpaired
from tests import tiny
from tests.prepared import Fields, numbered, prepare, report, side

QUESTION = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}


def test_every_row_is_in_training_or_held_out_and_duplicates_are_counted(tmp_path: Path) -> None:
    metrics = prepare(tmp_path, PrepareText(held_out=0.2), [*numbered(200), *numbered(7), *numbered(3)])
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
        prepare(tmp_path, PrepareText(held_out=0.2), numbered(12_000), out)
    digests = [
        {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in (tmp_path / out).iterdir()}
        for out in ("first", "second")
    ]
    assert digests[0] == digests[1]
    assert {"train.parquet", "held_out.parquet", "report.json", "report.html"} < set(digests[0])


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
    rows_of_both = [row for name in ("train", "held_out") for row in side(tmp_path, name)]
    found = [row for row in rows_of_both if messages_of(row["prompt"]) == [QUESTION]]
    assert metrics["duplicates"] == 1
    assert found[1] == {**found[0], "row_id": f"{found[0]['row_id']}-1"}
    assert messages_of(found[0]["chosen"]) == [ANSWER]
    assert messages_of(found[0]["rejected"]) == [{"role": "assistant", "content": "b"}]
    assert report(tmp_path)["sources"]["rows"]["ignored_columns"] == {"id": 1}  # type: ignore[index]


PAIR = {"prompt": "q", "chosen": "a", "rejected": "b"}
IDS: list[tuple[Method, Fields, str]] = [
    (PrepareText(held_out=0.5), {"text": "row 0"}, "65df74098d2c5b46"),
    (PrepareConversations(held_out=0.5), {"messages": [QUESTION, {**ANSWER, "content": "ä"}]}, "58b18eac9b27ad00"),
    (PreparePreferences(held_out=0.5), PAIR, "8232f3251b1ae517"),
]


@pytest.mark.parametrize(("method", "row", "row_id"), IDS)
def test_a_row_has_the_id_that_it_always_had(tmp_path: Path, method: Method, row: Fields, row_id: str) -> None:
    """Data of earlier versions, replay and impact know it by that."""
    questions = [{**QUESTION, "content": f"q{index}"} for index in range(30)]
    others = [{"text": f"{q}", "messages": [q, ANSWER], **PAIR, "prompt": [q]} for q in questions]
    prepare(tmp_path, method, [row, *({name: other[name] for name in row} for other in others)])
    assert row_id in {found["row_id"] for name in ("train", "held_out") for found in side(tmp_path, name)}


def test_answers_with_a_label_are_split_by_their_prompt(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{index % 30}", "completion": f"a{index}", "label": index % 2 == 0} for index in range(90)]
    metrics = prepare(tmp_path, PrepareUnpaired(held_out=0.3), rows)
    train, held_out = side(tmp_path, "train"), side(tmp_path, "held_out")
    assert metrics["rows"] == len(train) + len(held_out) == 90
    assert sum(bool(row["label"]) for row in [*train, *held_out]) == 45
    assert not {str(row["prompt"]) for row in train} & {str(row["prompt"]) for row in held_out}


def test_prompts_keep_the_columns_that_a_reward_is_computed_from(tmp_path: Path) -> None:
    prepare(tmp_path, PreparePrompts(held_out=0.3), [{"prompt": f"q{index}", "answer": index} for index in range(40)])
    row = side(tmp_path, "train")[0]
    question = row["prompt"][0]["content"]  # type: ignore[index]
    assert json.loads(str(row["columns"])) == {"answer": int(question[1:])}


def test_a_system_prompt_is_put_before_conversations_that_have_none(tmp_path: Path) -> None:
    system = {"role": "system", "content": "mine"}
    rows = [
        {"messages": [*([system] if index % 2 else []), {**QUESTION, "content": f"q{index}"}, ANSWER]}
        for index in range(40)
    ]
    prepare(tmp_path, PrepareConversations(held_out=0.3, system_prompt="theirs"), rows)
    firsts = [row["messages"][0]["content"] for row in side(tmp_path, "train")]  # type: ignore[index]
    assert set(firsts) == {"mine", "theirs"}


def test_a_template_makes_prompts_of_columns(tmp_path: Path) -> None:
    rows = [{"context": f"c{index}", "question": "q?", "completion": "a", "id": index} for index in range(40)]
    prepare(tmp_path, PrepareConversations(held_out=0.3, prompt_template="{context}: {question}"), rows)
    asked = {row["messages"][0]["content"] for row in side(tmp_path, "train")}  # type: ignore[index]
    assert asked < {f"c{index}: q?" for index in range(40)}
    assert report(tmp_path)["sources"]["rows"]["ignored_columns"] == {"id": 40}  # type: ignore[index]


@pytest.mark.parametrize("field", ["system_prompt", "prompt_template"])
def test_raw_text_takes_no_prompts(field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: this stage makes raw text, which has neither system nor user; "):
        PrepareText(**{field: "a {text}"})  # type: ignore[arg-type]


def test_a_template_without_columns_is_refused_when_it_is_stated() -> None:
    with pytest.raises(ConfigError, match=r"^prompt_template: no placeholder; accepted: "):
        PrepareConversations(prompt_template="a question")


def test_rows_of_another_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError) as refusal:
        prepare(tmp_path, PrepareConversations(), numbered(10))
    assert str(refusal.value) == (
        f"{tmp_path}/rows.jsonl: detected text (has text: 10 of 10 rows looked at), which gives text; "
        "conversations is accepted by this stage; use conf/stage/text.yaml for it, or say with format=NAME how "
        "else it is read"
    )


def test_a_renamed_column_groups_rows(tmp_path: Path) -> None:
    rows = [{"body": f"row {index}", "page": f"p{index % 20}"} for index in range(200)]
    prepare(tmp_path, PrepareText(held_out=0.3), rows, columns={"text": "body", "group": "page"})
    page = {row["body"]: row["page"] for row in rows}
    train, held_out = ({page[str(row["text"])] for row in side(tmp_path, name)} for name in ("train", "held_out"))
    assert held_out and not train & held_out


def test_the_report_says_how_rows_were_read_and_what_was_odd(tmp_path: Path) -> None:
    rows: list[Fields] = [*numbered(50), {"text": "a\u0001b", "url": "u"}]
    prepare(tmp_path, PrepareText(held_out=0.2), rows)
    found = report(tmp_path)
    assert found["sources"]["rows"] == {  # type: ignore[index]
        "path": f"{tmp_path}/rows.jsonl", "format": "text", "mapping": {"text": "the document"},
        "evidence": "has text: 51 of 51 rows looked at", "rows_read": 51, "rows_used": 51, "dropped": {},
        "remarks": {"control characters": {"count": 1, "places": [f"{tmp_path}/rows.jsonl:51"]}},
        "ignored_columns": {"url": 1},
    }  # fmt: skip
    assert found["lengths"]["unit"] == "bytes"  # type: ignore[index]


def test_near_duplicates_are_counted_and_kept(tmp_path: Path) -> None:
    long = " ".join(f"word{index}" for index in range(100))
    rows = [{"text": long}, {"text": f"{long} more"}, *numbered(50)]
    metrics = prepare(tmp_path, PrepareText(held_out=0.2), rows)
    assert (metrics["near_duplicate_rows"], metrics["duplicates"], metrics["rows"]) == (1, 0, 52)
    assert len(report(tmp_path)["near_duplicates"]) == 1  # type: ignore[arg-type]


def test_an_empty_system_prompt_is_refused_when_it_is_stated() -> None:
    with pytest.raises(ValidationError, match=r"system_prompt\n.*at least 1 character"):
        TypeAdapter(PrepareConversations).validate_json('{"system_prompt": ""}')


def test_held_out_rows_that_are_trained_on_are_listed(tmp_path: Path) -> None:
    long = [" ".join(f"{subject}{index}" for index in range(100)) for subject in range(20)]
    metrics = prepare(
        tmp_path, PrepareText(held_out=0.5), [{"text": text + end} for text in long for end in (" a", " b")]
    )
    assert metrics["leaked_rows"] > 0
    assert report(tmp_path)["leakage"]


def test_rows_are_measured_in_the_tokens_of_a_model_that_is_given(tmp_path: Path) -> None:
    file, model = tmp_path / "rows.jsonl", tiny.write_tokenizer(tmp_path / "model")
    prepare(tmp_path, PrepareText(held_out=0.3), numbered(30), "bytes")
    inputs = {
        "rows": Input(name="rows", kind=Kind.ROWS, fingerprint="", path=file, source=Source(path=str(file))),
        "tokenizer": Input(name="base", kind=Kind.CHECKPOINT, fingerprint="", path=model),
    }
    PrepareText(held_out=0.3).run(inputs, TrainContext(output_dir=tmp_path / "tokens", work_dir=tmp_path))
    in_bytes, in_tokens = (report(tmp_path, out)["lengths"] for out in ("bytes", "tokens"))
    assert (in_bytes["unit"], in_tokens["unit"], in_tokens["tokenizer"]) == ("bytes", "tokens", "base")  # type: ignore[index]
    assert side(tmp_path, "train", "bytes") == side(tmp_path, "train", "tokens")


def test_nothing_is_left_in_the_scratch_directory(tmp_path: Path) -> None:
    prepare(tmp_path, PrepareText(held_out=0.2), numbered(30))
    assert {file.name for file in tmp_path.iterdir()} == {"out", "rows.jsonl"}


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
