"""Rows that no format fits are read by the names of their columns, which is said with the overrides."""

import json
import shlex
from collections.abc import Sequence

import pytest

from flows.declare.config import load_pipeline
from lineage.errors import DataError
from tasks.data.formats.detect import detect
from tests.data_command import call as call  # a fixture


@pytest.mark.parametrize(
    ("names", "format"),
    [
        ("question answer", "prompt_completion"),
        ("query response", "prompt_completion"),
        ("problem solution", "prompt_completion"),
        ("input output", "prompt_completion"),
        ("source target", "prompt_completion"),
        ("Question Answer", "prompt_completion"),
        ("title document summary", "prompt_completion"),
        ("context question answer", "prompt_completion"),
        ("question response_j response_k", "preference"),
        ("user preferred dispreferred", "preference"),
    ],
)
def test_rows_are_read_as_the_overrides_of_the_note_read_them(call, names, format):
    rows = "".join(json.dumps({name: f"{name} {n}" for name in names.split()}) + "\n" for n in range(200))
    code, out, err = call("a.jsonl", "--json", a_jsonl=rows)
    assert code == 0 and json.loads(out)["sources"]["rows"]["format"] == format, err
    note = err.partition("a guess by their names, as in a pipeline: ")[2]
    words, _, pipeline = note.partition(" says the same, or names others; in a pipeline ")
    code, pasted, err = call("a.jsonl", *shlex.split(words), "--json")
    assert code == 0 and "guess" not in err, err
    alike = ({**json.loads(each), "sources": None} for each in (out, pasted))
    assert next(alike) == next(alike)
    overrides = shlex.split(pipeline)
    job, own = ("dpo", "preferences") if format == "preference" else ("sft", "instructions")
    assert load_pipeline([f"pipeline={job}", "model=owner/name", f"data.{own}=a.jsonl", *overrides])


def test_prompts_keep_the_answer_for_their_reward(call):
    rows = "".join(json.dumps({"question": f"{n} + 1?", "solution": f"#### {n + 1}"}) + "\n" for n in range(200))
    code, out, err = call("a.jsonl", "kind=prompts", "--json", a_jsonl=rows)
    assert code == 0 and json.loads(out)["sources"]["rows"]["format"] == "prompts", err
    assert "'sources.prompts.columns={prompt: question, answer: solution}'" in err, err


def test_numbers_are_answers_and_read_as_they_are_written(call):
    rows = "".join(
        json.dumps({"question": f"{n} / 4?", "answer": n / 4 if n % 4 else n // 4}) + "\n" for n in range(200)
    )
    code, out, err = call("a.jsonl", "--json", a_jsonl=rows)
    assert code == 0 and json.loads(out)["sources"]["rows"]["rows_used"] == 200, err
    assert "columns.prompt=question columns.completion=answer says the same" in err, err
    read = detect([{"question": "q", "answer": 0}], "a")
    assert read.convert({"question": "q", "answer": 0.25})["messages"][-1]["content"] == "0.25"


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        (
            {"context": "c", "question": "q", "answers": {"text": ["one", "two"], "answer_start": [3, 9]}},
            "one",
        ),  # SQuAD
        ({"question": "q", "answer": {"value": "one", "aliases": ["two"]}}, "one"),  # TriviaQA
        ({"question": "q", "answer": ["one", "two"]}, "one"),  # NQ open
    ],
)
def test_an_answer_inside_a_column_is_read(call, row, answer):
    rows = "".join(json.dumps({**row, "question": f"q {n}"}) + "\n" for n in range(200))
    code, out, err = call("a.jsonl", "--json", a_jsonl=rows)
    assert code == 0 and json.loads(out)["sources"]["rows"]["rows_used"] == 200, err
    read = detect([row], "a.jsonl")
    assert read.convert(read.filled(row))["messages"][-1]["content"] == answer


@pytest.mark.parametrize("row", [{"answer": ""}, {"answer": " "}, {"answer": None}, {"question": ""}, {"context": ""}])
@pytest.mark.parametrize("place", [0, 7])
def test_a_bad_row_among_good_ones_does_not_hide_the_columns(row: dict[str, object], place: int) -> None:
    rows: list[dict[str, object]] = [{"context": "c", "question": f"q {n}", "answer": "a"} for n in range(20)]
    rows[place] = {**rows[place], **row}
    found = detect(rows, "a.jsonl").guess
    assert found and found.overrides == ["columns.completion=answer", "prompt_template={context} {question}"]


Q, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"conversation_id": "1", "conversation": [Q, A], "turn": 1}, "columns.messages=conversation"),
        ({"dialog": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, "columns.conversations=dialog"),
        ({"input": [Q], "output": "a", "context": "c"}, "columns.prompt=input columns.completion=output"),
        (
            {"query": "q", "options": {"top_k": 2, "seed": 1}, "answer": "a"},
            "columns.prompt=query columns.completion=answer",
        ),
    ],
)
def test_turns_in_a_column_are_read_whole(row: dict[str, object], columns: str) -> None:
    guessed = detect([row], "a.jsonl")
    assert guessed.guess and guessed.guess.overrides == columns.split()
    renames = dict(word.removeprefix("columns.").split("=") for word in columns.split())
    for detected in (guessed, detect([row], "a.jsonl", columns=renames)):
        assert detected.convert(row) == {"messages": [Q, A]}


@pytest.mark.parametrize(
    ("row", "proposed"),
    [
        ({"input": "q", "choices": ["x", "y"], "target": 1}, "columns.question=input columns.answer=target"),
        (
            {"question": {"stem": "q", "choices": [{"text": "x", "label": "A"}, {"text": "y", "label": "B"}]},
             "answerKey": "B"},
            "columns.question=question.stem columns.choices=question.choices",
        ),
        ({"stem": "q", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answer": "B"}, "columns.question=stem"),
        (
            {"data": {"question": "q", "options": {"A": "x", "B": "y"}, "answer": "B"}},
            "columns.question=data.question columns.choices=data.options columns.answer=data.answer",
        ),
        (
            {"question": {"text": "q", "choices": ["x", "y"]}, "answer": {"label": "B", "text": "y"}},
            "columns.question=question.text columns.choices=question.choices columns.answer=answer.label",
        ),
    ],
)  # fmt: skip
def test_choices_are_read_with_their_question(row: dict[str, object], proposed: str) -> None:
    detected = detect([row], "a.jsonl")
    assert detected.guess and detected.guess.overrides == proposed.split()
    assert detected.convert(row) == {
        "messages": [{"role": "user", "content": "q\n\nA. x\nB. y"}, {"role": "assistant", "content": "B. y"}]
    }


def numbered(*marks: str, of: str, answer: str, values: Sequence[object], **more: str) -> list[dict[str, object]]:
    return [{**more, **{f"{of}{mark}": f"text {mark}" for mark in marks}, answer: value} for value in values]


@pytest.mark.parametrize(
    ("rows", "guessed", "answers"),
    [
        (  # PIQA
            numbered("1", "2", of="sol", answer="label", values=[1, 0], goal="q"),
            "columns.question=goal columns.A=sol1 columns.B=sol2", ["B. text 2", "A. text 1"],
        ),
        (  # WinoGrande
            numbered("1", "2", of="option", answer="answer", values=["1", "2", ""], sentence="q"),
            "columns.question=sentence columns.choice_1=option1 columns.choice_2=option2", ["1. text 1", "2. text 2"],
        ),
        (  # Social IQa
            numbered("A", "B", "C", of="answer", answer="label", values=["1", "3"], context="c", question="q"),
            "columns.choice_1=answerA columns.choice_2=answerB columns.choice_3=answerC", ["1. text A", "3. text C"],
        ),
        (  # COPA
            numbered("1", "2", of="choice", answer="label", values=[1, 0, -1], premise="c", question="cause"),
            "columns.context=premise columns.A=choice1 columns.B=choice2", ["B. text 2", "A. text 1"],
        ),
        (  # SWAG
            numbered("0", "1", "2", of="ending", answer="label", values=[2, 0], sent1="c", query="q"),
            "columns.A=ending0 columns.B=ending1 columns.C=ending2", ["C. text 2", "A. text 0"],
        ),
        (
            numbered("a", "b", of="Option ", answer="Answer", values=["text b", "text a"], Question="q"),
            "columns.question=Question columns.answer=Answer 'columns.A=Option a' 'columns.B=Option b'",
            ["B. text b", "A. text a"],
        ),
        (numbered("1", "2", "3", of="sol", answer="label", values=[1, 2], goal="q"), "", []),  # from 0, or from 1
        (numbered("1", "2", of="sol", answer="label", values=[], goal="q"), "", []),
        (  # SciQ
            [
                {"question": "q", "distractor1": "x", "distractor2": "y", "correct_answer": "z", "support": support}
                for support in ("c", "")
            ],
            "columns.completion=correct_answer prompt_template='{support} {question}'", ["z", "z"],
        ),
        (  # TruthfulQA, both
            [{"question": "q", "best_answer": "a", "correct_answers": ["a"], "incorrect_answers": ["b"]}],
            "columns.prompt=question columns.completion=best_answer", ["a"],
        ),
        (
            [{"question": "q", "mc1_targets": {"choices": ["a", "b"], "labels": [1, 0]}}],
            "columns.prompt=question columns.completion=mc1_targets.choices.0", ["a"],
        ),
        (  # BoolQ
            [{"question": "q", "passage": "c", "answer": value} for value in (True, False)],
            "columns.completion=answer prompt_template='{passage} {question}'", ["yes", "no"],
        ),
        ([{"Context": "q", "Response": "a"}], "columns.prompt=Context columns.completion=Response", ["a"]),
    ],
)  # fmt: skip
def test_rows_as_known_benchmarks_have_them(rows: list[dict[str, object]], guessed: str, answers: list[str]) -> None:
    if not guessed:
        with pytest.raises(DataError, match="no format fits"):
            detect(rows or [{"goal": "q"}], "a.jsonl")
        return
    detected = detect(rows, "a.jsonl")
    assert detected.guess and detected.guess.overrides == shlex.split(guessed)
    made = [detected.convert(detected.filled(row)) for row in rows[: len(answers)]]
    assert [each["messages"][-1]["content"] for each in made] == answers


def test_a_row_whose_answer_is_not_there_is_bad_and_named(call):
    rows = [{"question": f"q {n}", "answers": {"text": ["one"] if n else []}} for n in range(200)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    code, _, err = call("a.jsonl", "columns.prompt=question", "columns.completion=answers.text.0", "max_bad_rows=0",
                        a_jsonl=text)  # fmt: skip
    assert code == 2 and "a.jsonl:1" in err, err


def test_unusual_names_and_empty_columns_are_refused(call):
    for rows in (
        '{"foo": "a", "bar": "b"}\n',
        '{"question": "a", "answer": null}\n',
        '{"question": "a"}\n{"answer": "b"}\n',
    ):
        code, _, err = call("a.jsonl", a_jsonl=rows * 9)
        assert code == 2 and "a guess" not in err, err


def test_conversations_that_begin_alike_are_a_pair(call):
    """As LLaMA-Factory's version 1 has them."""
    asked = {"role": "user", "content": [{"type": "text", "value": "q"}], "loss_weight": 0.0}
    pair = {name: {"role": "assistant", "content": [{"type": "text", "value": name}]} for name in ("good", "bad")}
    row = {"chosen_messages": [asked, pair["good"]], "rejected_messages": [asked, pair["bad"]]}
    rows = "".join(json.dumps(row).replace('"q"', f'"q {n}"') + "\n" for n in range(200))
    code, out, err = call("a.jsonl", "--json", a_jsonl=rows)
    assert "columns.chosen=chosen_messages columns.rejected=rejected_messages says the same" in err, err
    assert (code, json.loads(out)["sources"]["rows"]["rows_used"]) == (0, 200), err


@pytest.mark.parametrize("key", ["value", "content"])  # of LLaMA-Factory's version 1, and of Oumi
def test_contents_in_parts_as_peers_have_them(call, key):
    row = {"messages": [
        {"role": "user", "content": [{"type": "text", key: "A question"}], "loss_weight": 0.0},
        {"role": "assistant", "content": [{"type": "text", key: "An answer"}], "loss_weight": 1.0},
    ]}  # fmt: skip
    rows = "".join(json.dumps(row).replace("question", f"question {n}") + "\n" for n in range(200))
    code, out, err = call("a.jsonl", "--json", a_jsonl=rows)
    assert (code, json.loads(out)["sources"]["rows"]["rows_used"]) == (0, 200), err


_CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("text", "items"),
    [
        (json.dumps([{"user": "u", "chats": [{"messages": _CHAT}] * 3}] * 4), ".[].chats[]"),
        (json.dumps({"chats": [{"messages": _CHAT}] * 3}), ".chats[]"),
        (json.dumps({"my chats": [_CHAT] * 3}), '."my chats"[] | {messages: .}'),
    ],
)
def test_of_several_chats_in_a_row_none_is_lost(tmp_path, text, items):
    (tmp_path / "rows.json").write_text(text)
    place, rows = str(tmp_path / "rows.json"), json.loads(text)
    with pytest.raises(DataError, match="the rows are in the list ") as refused:
        detect(rows if isinstance(rows, list) else [rows], place)
    assert f"jq -c {shlex.quote(items)} {place} > rows.jsonl" in str(refused.value)
    one = detect([{"user": "u", "chats": [{"messages": _CHAT}]}], place)
    assert one.columns == {"messages": "chats.0.messages"}
