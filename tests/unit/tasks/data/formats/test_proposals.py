"""Rows that no format fits are answered with overrides that read them."""

import json
import shlex
from collections.abc import Sequence

import pytest

from flows.declare.config import load_pipeline
from lineage.errors import DataError
from tasks.data.formats.detect import detect
from tasks.data.formats.proposals import proposed as words_of
from tasks.data.formats.proposals import with_prompt
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
def test_the_overrides_of_the_message_read_the_rows(call, names, format):
    rows = "".join(json.dumps({name: f"{name} {n}" for name in names.split()}) + "\n" for n in range(200))
    code, _, err = call("a.jsonl", a_jsonl=rows)
    assert code == 2 and "; posttrain data a.jsonl " in err
    command, _, pipeline = err.partition("posttrain data ")[2].partition(" reads them; a pipeline does with ")
    code, out, err = call(*shlex.split(command), "--json")
    assert code == 0, err
    assert json.loads(out)["sources"]["rows"]["format"] == format
    source = [word.replace("NAME", "instructions") for word in shlex.split(pipeline.partition("; the formats")[0])]
    overrides = [word.replace("STAGE", "instructions") for word in source]
    job = "dpo" if format == "preference" else "sft"
    assert load_pipeline([f"pipeline={job}", "model=owner/name", "data=a.jsonl", *overrides])


def test_the_report_is_of_the_rows_as_the_proposal_reads_them(call):
    rows = "".join(json.dumps({"question": f"q {n}", "answer": f"a {n}"}) + "\n" for n in range(60))
    code, out, err = call("a.jsonl", a_jsonl=rows)
    assert code == 2 and "60 read, 60 used" in out and "'sources.instructions.columns={prompt: question, c" in err
    assert "the report is of the rows as they are read with columns.prompt=question columns.completion=answer" in err


def test_prompts_keep_the_answer_for_their_reward(call):
    rows = "".join(json.dumps({"question": f"{n} + 1?", "solution": f"#### {n + 1}"}) + "\n" for n in range(200))
    code, _, err = call("a.jsonl", "kind=prompts", a_jsonl=rows)
    assert code == 2 and "'sources.prompts.columns={prompt: question, answer: solution}'" in err, err
    code, out, err = call(*shlex.split(err.partition("posttrain data ")[2].partition(" reads them")[0]), "--json")
    assert code == 0 and json.loads(out)["sources"]["rows"]["format"] == "prompts", err


def test_numbers_are_proposed_as_answers_and_read_as_they_are_written(call):
    rows = "".join(
        json.dumps({"question": f"{n} / 4?", "answer": n / 4 if n % 4 else n // 4}) + "\n" for n in range(200)
    )
    code, _, err = call("a.jsonl", a_jsonl=rows)
    assert code == 2 and "columns.prompt=question columns.completion=answer reads them" in err, err
    code, out, err = call("a.jsonl", "columns.prompt=question", "columns.completion=answer", "--json")
    assert code == 0 and json.loads(out)["sources"]["rows"]["rows_used"] == 200, err
    read = detect([{"question": "q", "answer": 0}], "a", columns={"prompt": "question", "completion": "answer"})
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
def test_an_answer_inside_a_column_is_proposed_and_read(call, row, answer):
    rows = "".join(json.dumps({**row, "question": f"q {n}"}) + "\n" for n in range(200))
    code, _, err = call("a.jsonl", a_jsonl=rows)
    assert code == 2 and "columns.completion=answer" in err, err
    command = shlex.split(err.partition("posttrain data ")[2].partition(" reads them")[0])
    code, out, err = call(*command, "--json")
    assert code == 0, err
    assert json.loads(out)["sources"]["rows"]["rows_used"] == 200
    columns = dict(word.removeprefix("columns.").split("=") for word in command if word.startswith("columns."))
    made = detect([{**row, "prompt": "q"}], "a.jsonl", columns={"completion": columns["completion"]})
    made = made.convert({**row, "prompt": "q"})
    assert made["messages"][-1]["content"] == answer


@pytest.mark.parametrize("row", [{"answer": ""}, {"answer": " "}, {"answer": None}, {"question": ""}, {"context": ""}])
@pytest.mark.parametrize("place", [0, 7])
def test_a_bad_row_among_good_ones_does_not_hide_the_columns(row: dict[str, object], place: int) -> None:
    rows: list[dict[str, object]] = [{"context": "c", "question": f"q {n}", "answer": "a"} for n in range(20)]
    rows[place] = {**rows[place], **row}
    with pytest.raises(DataError, match=r"columns.completion=answer prompt_template='\{context\} \{question\}' reads"):
        detect(rows, "a.jsonl")


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
def test_turns_in_a_column_are_proposed_whole(row: dict[str, object], columns: str) -> None:
    with pytest.raises(DataError, match=f"; posttrain data a.jsonl {columns} reads them; a pipeline does with "):
        detect([row], "a.jsonl")
    renames = dict(word.removeprefix("columns.").split("=") for word in columns.split())
    assert detect([row], "a.jsonl", columns=renames).convert(row) == {"messages": [Q, A]}


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
def test_choices_are_proposed_with_their_question(row: dict[str, object], proposed: str) -> None:
    with pytest.raises(DataError, match=rf"; posttrain data a\.jsonl {proposed} reads them"):
        detect([row], "a.jsonl")
    columns = dict(word.removeprefix("columns.").split("=") for word in proposed.split())
    read = detect([row], "a.jsonl", columns=columns).convert(row)
    assert read == {
        "messages": [{"role": "user", "content": "q\n\nA. x\nB. y"}, {"role": "assistant", "content": "B. y"}]
    }


def numbered(*marks: str, of: str, answer: str, values: Sequence[object], **more: str) -> list[dict[str, object]]:
    return [{**more, **{f"{of}{mark}": f"text {mark}" for mark in marks}, answer: value} for value in values]


@pytest.mark.parametrize(
    ("rows", "proposed", "answers"),
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
def test_rows_as_known_benchmarks_have_them(rows: list[dict[str, object]], proposed: str, answers: list[str]) -> None:
    with pytest.raises(DataError) as refused:
        detect(rows or [{"goal": "q"}], "a.jsonl")
    found = words_of(str(refused.value))
    assert found == shlex.split(proposed), refused.value
    if not found:
        return
    settings = dict(word.split("=", 1) for word in found)
    template = settings.pop("prompt_template", None)
    columns = {name.removeprefix("columns."): theirs for name, theirs in settings.items()}
    read = [with_prompt(row, template) if template else row for row in rows]
    detected = detect(read, "a.jsonl", columns=columns)
    assert [detected.convert(row)["messages"][-1]["content"] for row in read[: len(answers)]] == answers


def test_a_row_whose_answer_is_not_there_is_bad_and_named(call):
    rows = [{"question": f"q {n}", "answers": {"text": ["one"] if n else []}} for n in range(200)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    code, _, err = call("a.jsonl", "columns.prompt=question", "columns.completion=answers.text.0", "max_bad_rows=0",
                        a_jsonl=text)  # fmt: skip
    assert code == 2 and "a.jsonl:1" in err, err


def test_unusual_names_and_empty_columns_get_no_proposal(call):
    for rows in (
        '{"foo": "a", "bar": "b"}\n',
        '{"question": "a", "answer": null}\n',
        '{"question": "a"}\n{"answer": "b"}\n',
    ):
        assert "reads them; a pipeline" not in call("a.jsonl", a_jsonl=rows * 9)[2]


def test_conversations_that_begin_alike_are_proposed_as_a_pair(call):
    """As LLaMA-Factory's version 1 has them."""
    asked = {"role": "user", "content": [{"type": "text", "value": "q"}], "loss_weight": 0.0}
    pair = {name: {"role": "assistant", "content": [{"type": "text", "value": name}]} for name in ("good", "bad")}
    row = {"chosen_messages": [asked, pair["good"]], "rejected_messages": [asked, pair["bad"]]}
    rows = "".join(json.dumps(row).replace('"q"', f'"q {n}"') + "\n" for n in range(200))
    code, _, err = call("a.jsonl", a_jsonl=rows)
    assert code == 2 and "columns.chosen=chosen_messages columns.rejected=rejected_messages reads them" in err, err
    command = shlex.split(err.partition("posttrain data ")[2].partition(" reads them")[0])
    code, out, err = call(*command, "--json")
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
