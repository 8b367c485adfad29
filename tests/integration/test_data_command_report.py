"""``posttrain data``, in process: what it prints of good rows, bad ones, and of what is no rows at all."""

import json

import pytest

from tests import tiny
from tests.data_command import call as call  # a fixture
from tests.data_command import lines, texts, told


def test_good_rows_are_told(call):
    code, out, err = call("a.jsonl", a_jsonl=lines([*texts(200), texts(1)[0]]))

    assert code == 0 and err == "reading a.jsonl\n"
    shown = told(out)
    assert shown[0] == "a.jsonl"
    assert "format text (has text: 201 of 201 rows looked at)" in shown
    assert "text -> the document" in shown and "rows 201 read, 201 used" in shown and "duplicates 1" in shown
    assert any(line.startswith("lengths of 201 rows half have at most") for line in shown)


def test_json_is_one_object_that_holds_the_report(call):
    code, out, _ = call("a.jsonl", "--json", a_jsonl=lines(texts(200)))

    report = json.loads(out)
    assert code == 0 and report["rows"] == 200 and report["bad_rows"] == [] and report["samples"] == []
    assert report["sources"]["rows"]["mapping"] == {"text": "the document"}
    assert sum(report["lengths"]["counts"]) == 200


def test_a_bad_row_ends_with_2_its_place_and_the_report_all_the_same(call):
    code, out, err = call("a.jsonl", a_jsonl=lines([*texts(200), {"text": 5}]))

    assert code == 2
    assert "left out not text: 1" in told(out)
    assert err.endswith(
        "posttrain: 1 of 201 rows cannot be used:\n"
        '  a.jsonl:201: text is the number 5; accepted: {"text": "..."}; write a string\n'
        "all of them are in rejects.jsonl, which --out DIR keeps; mend them, or leave them out with max_bad_rows=1\n"
    )


def test_bad_rows_that_are_allowed_are_shown_and_end_with_0(call):
    code, out, err = call("a.jsonl", "max_bad_rows=1", a_jsonl=lines([*texts(200), {"text": 5}]))

    assert code == 0 and "cannot be used" not in err
    assert '  a.jsonl:201: text is the number 5; accepted: {"text": "..."}; write a string' in out.splitlines()


def test_at_most_twenty_bad_rows_are_shown(call):
    code, out, _ = call("a.jsonl", "max_bad_rows=30", "--json", a_jsonl=lines([*texts(200), *[{"text": 5}] * 30]))

    report = json.loads(out)
    assert code == 0 and len(report["bad_rows"]) == 20 and report["sources"]["rows"]["dropped"] == {"not text": 30}


def test_rows_that_fit_two_formats_are_refused_with_both(call):
    rows = [{"text": f"text {place}", "instruction": "say", "output": str(place)} for place in range(9)]

    code, out, err = call("a.jsonl", a_jsonl=lines(rows))

    assert (code, out) == (2, "")
    assert err == (
        "posttrain: a.jsonl: two formats fit: text (has text), alpaca (has instruction and output); "
        "say which with format=NAME (sources.NAME.format=...)\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["empty.jsonl"], "empty.jsonl is empty (0 bytes)"),
        (["nothing.jsonl"], "sources.rows.path=nothing.jsonl: no such file or directory"),
        (["kind=text"], "no rows are named; give a file"),
        (["a.jsonl", "formt=text"], "did you mean format?"),
        (["a.jsonl", "held_out=yes"], "held_out"),
        (["a.jsonl", "max_bad_rows=-1"], "max_bad_rows=-1: input should be greater than or equal to 0"),
        (["a.jsonl", "kind=pictures"], 'kind="pictures": input should be'),
        (["a.jsonl", "columns={a: [b}"], "key=value is accepted"),
        (["source:corpsu"], "the configuration has no such source; there are: corpus, instructions, preferences;"),
        (["a.jsonl", "kind=rows"], "kind=rows: no data stage makes it; accepted: text, conversations, preferences"),
        (["a.jsonl", "max_length=9"], "max_length=9: it is of tokens, which nothing but a model makes; state model="),
        (["a.jsonl", "chat_template=chatml"], "chat_template=chatml: it is of tokens, which nothing but a model"),
        (
            ["a.jsonl", "chat_template=chatml", "model=."],
            "chat_template=chatml: text goes through no chat template, as",
        ),
        (["a.jsonl", "a.jsonl", "proportions.more=1.0"], "the slots of rows are rows, rows_2; state a share for each"),
        (["a.jsonl", "model=/nowhere"], "model=/nowhere: no such directory"),
        (["a.jsonl", "year=2024.jsonl"], "year: unknown key, and no file is called year=2024.jsonl; accepted: "),
        (["a.jsonl", "max-length=5"], "did you mean max_length?"),
        (["a.jsonl", "--against", "nothing.jsonl"], "sources.rows.path=nothing.jsonl: no such file or directory"),
    ],
)
def test_what_cannot_be_is_refused_with_2(call, words, message):
    code, _, err = call(*words, a_jsonl=lines(texts(100)), empty_jsonl="")

    assert code == 2 and message in err and "Traceback" not in err


def test_single_answers_and_prompts_are_counted_in_tokens(call, tmp_path):
    """Real rows of each through the command: how many of each label, what is trained, what is cut."""
    tiny.write_tokenizer(tmp_path / "model")
    answers = [
        {"prompt": f"what is {place}?", "completion": f"it is {place}", "label": place % 4 > 0} for place in range(80)
    ]
    asked = [{"prompt": "why " * (place % 20) + f"{place}?", "answer": place} for place in range(80)]

    code, out, _ = call("a.jsonl", "model=model", "held_out=0.2", a_jsonl=lines(answers))
    report = json.loads(call("a.jsonl", "model=model", "held_out=0.2", "--json")[1])
    shown = told(out)
    assert code == 0 and f"desirable rows {report['desirable_rows']}" in shown
    assert report["desirable_rows"] + report["undesirable_rows"] == report["train_rows"]
    assert f"undesirable answers {report['labels']['labels']['undesirable']}" in shown
    assert report["labels"]["labels"]["undesirable"] == report["undesirable_rows"] > 0
    assert "⟧ (" in out and 0 < report["labels"]["trained_tokens_percent"] < 100

    code, out, _ = call("b.jsonl", "model=model", "max_length=20", "--html", "b.html", b_jsonl=lines(asked))
    report = json.loads(call("b.jsonl", "model=model", "max_length=20", "--json")[1])
    labels = report["labels"]
    assert code == 0 and labels["trained_tokens_percent"] is None and 0 < labels["prompts_cut"] < report["train_rows"]
    assert f"trained tokens none of {labels['num_tokens']}: answers are generated" in told(out)
    assert f"prompts cut {labels['prompts_cut']} at max_length=20" in told(out)
    assert 'columns: {"answer"' in out and "answers are generated" in (tmp_path / "b.html").read_text()


def test_columns_and_other_overrides_reach_the_preparation(call):
    rows = lines([{"question": f"what is {place}?", "answer": f"it is {place}"} for place in range(300)])
    words = ["a.jsonl", "columns.prompt=question", "columns.completion=answer", "--json"]

    report = json.loads(call(*words, a_jsonl=rows)[1])
    sliced = json.loads(call(*words, "split=train[:100]", "held_out=0.5", "system_prompt=Be brief.")[1])

    assert report["rows"] == 300 and report["sources"]["rows"]["format"] == "prompt_completion"
    assert sliced["rows"] == 100 and sliced["held_out_rows"] > 30
    assert sliced["lengths"]["p50"] == pytest.approx(report["lengths"]["p50"] + len("Be brief.\n"), abs=2)


def test_columns_the_other_way_round_are_refused_with_the_words_to_type(call):
    rows = lines([{"question": f"what is {place}?", "answer": f"it is {place}"} for place in range(9)])

    code, _, err = call("a.jsonl", "columns.question=prompt", "columns.answer=completion", a_jsonl=rows)

    assert code == 2
    assert (
        "a.jsonl: columns.question=prompt: 'prompt' is no column; there are: question, answer; columns maps our name "
        "to the rows' column: state columns.prompt=question" in err
    )


def test_how_a_text_is_split_is_shown_and_can_be_set(call):
    text = "".join(f"paragraph {place}\nsays {place * 7919}\n\n" for place in range(90))

    code, out, _ = call("a.txt", a_txt=text)
    report = json.loads(call("a.txt", "split_by=line", "--json")[1])

    assert code == 0 and "split by paragraph (split_by=line|paragraph|document sets it)" in told(out)
    assert "rows 90 read, 90 used" in told(out)
    assert report["rows"] == 180 and report["sources"]["rows"]["split_by"] == "line"
    assert call("a.txt", "split_by=word")[0] == 2


def test_several_sources_are_prepared_together(call):
    code, out, _ = call("a.jsonl", "b.jsonl", "--json", a_jsonl=lines(texts(100)), b_jsonl=lines(texts(120)))

    report = json.loads(out)
    assert code == 0 and report["rows"] == 220 and report["duplicates"] == 100
    assert [source["path"] for source in report["sources"].values()] == ["a.jsonl", "b.jsonl"]


def test_what_a_directory_holds_of_other_splits_is_told_once(call, tmp_path):
    (tmp_path / "rows").mkdir()
    for split in ("train", "test"):
        (tmp_path / "rows" / f"{split}.jsonl").write_text(lines(texts(30)))
    code, _, err = call("rows", "--json")

    assert code == 0
    assert err.count("rows: split=train is read; not read, being of other splits by name: test.jsonl\n") == 1


def test_what_a_function_prints_is_not_in_the_json(call):
    code = "def rows():\n    print('hello')\n    for i in range(30): yield {'text': f'row {i} of {i * 7919}'}\n"
    code, out, err = call("python:a.py:rows", "allow_code=true", "--json", a_py=code)

    assert code == 0 and json.loads(out)["rows"] == 30 and "hello\n" in err


def test_a_function_that_ends_the_process_is_refused(call):
    code, _, err = call("python:a.py:rows", "allow_code=true", a_py="import sys\ndef rows(): sys.exit(0)\n")

    assert code == 2 and "a.py:2: SystemExit: 0; mend the function" in err
