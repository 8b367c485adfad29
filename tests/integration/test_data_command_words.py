"""What the words of ``posttrain data`` mean: which are rows and which say how they are read."""

import json

import pytest

from tests.data_command import call as call  # a fixture
from tests.data_command import lines, texts

ASKED = [
    {"The Question": f"What is {place}?", "my-answer": f"It is {place}.", "context": "Facts:"} for place in range(99)
]
RENAMED = ("columns.prompt=The Question", "columns.completion=my-answer")


def report_of(called):
    code, out, err = called
    assert code == 0, err
    return json.loads(out)


def test_a_column_may_be_called_whatever_the_user_calls_it(call):
    report = report_of(call("a.jsonl", *RENAMED, "--json", a_jsonl=lines(ASKED)))

    assert report["sources"]["rows"]["mapping"].keys() == {"The Question", "my-answer"}
    assert report["rows"] == 99


@pytest.mark.parametrize("name", ["year=2024.jsonl", "a.b=c.jsonl"])
def test_a_file_may_have_an_equals_sign_in_its_name(call, tmp_path, name):
    (tmp_path / name).write_text(lines(texts(99)))

    assert report_of(call(name, "--json"))["sources"]["rows"]["path"] == name


@pytest.mark.parametrize("prompt", ["Be brief: now", "{Be} brief", "yes", "5"])
def test_text_is_what_a_shell_hands_over(call, prompt):
    plain = report_of(call("a.jsonl", *RENAMED, "--json", a_jsonl=lines(ASKED)))
    told = report_of(call("a.jsonl", *RENAMED, f"system_prompt={prompt}", "--json"))

    assert told["lengths"]["max"] - plain["lengths"]["max"] == pytest.approx(len(prompt), abs=1)


@pytest.mark.parametrize("template", ["{context} {The Question}", "{The Question}"])
def test_a_template_is_what_a_shell_hands_over(call, template):
    words = ("a.jsonl", "columns.completion=my-answer", f"prompt_template={template}", "--json")

    report = report_of(call(*words, a_jsonl=lines(ASKED)))

    assert report["sources"]["rows"]["format"] == "prompt_completion" and report["rows"] == 99


def test_a_template_is_for_conversations_where_no_row_can_be_read(call):
    code, _, err = call("a.jsonl", "prompt_template={question}", a_jsonl="{\n{\n")

    assert code == 2 and "2 of 2 rows cannot be used" in err and "raw text" not in err


def test_proportions_name_the_sources_as_the_report_does(call):
    files = {"a_jsonl": lines(texts(120)[:60]), "b_jsonl": lines(texts(120)[60:])}
    words = ("a.jsonl", "b.jsonl", "proportions.rows=0.75", "proportions.rows_2=0.25")

    code, out, _ = call(*words, **files)
    report = report_of(call(*words, "--json"))

    assert code == 0 and "rows: a.jsonl" in out.splitlines() and "rows_2: b.jsonl" in out.splitlines()
    assert report["sources"]["rows_2"]["path"] == "b.jsonl"
    assert report["sources"]["rows_2"]["dropped"]["left out by the mixture"] > 30


def test_a_source_of_another_kind_is_left_out_and_named(call):
    files = {"a_jsonl": lines(texts(100)), "b_jsonl": lines([{"prompt": "a", "completion": "b"}] * 9)}

    code, out, err = call("a.jsonl", "b.jsonl", "--json", **files)

    assert code == 2 and json.loads(out)["rows"] == 100
    assert "posttrain: b.jsonl: detected prompt_completion (" in err
    assert err.endswith(
        "which gives conversations; text is accepted beside a.jsonl; look at it by itself, or say with format=NAME how "
        "else it is read\n"
    )


def test_rows_of_another_kind_than_asked_for_are_reported_as_what_they_are(call):
    code, out, err = call("a.jsonl", "kind=preferences", "--json", a_jsonl=lines(texts(100)))

    assert code == 2 and json.loads(out)["rows"] == 100
    assert "which gives text; preferences is accepted by kind=preferences; leave it out" in err


def test_a_function_is_called_once(call, tmp_path):
    code = 'def rows():\n    open("calls", "a").write("x")\n    yield from ({"text": f"row {i}"} for i in range(99))\n'

    report = report_of(call("python:made.py:rows", "allow_code=true", "--json", made_py=code))

    assert report["rows"] == 99 and (tmp_path / "calls").read_text() == "x"
