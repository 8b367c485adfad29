"""``posttrain data``, in process: what it prints of good rows, bad ones, and of what is no rows at all."""

import json
import re

import pytest

from flows.__main__ import main


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def texts(count):
    return [{"text": f"row {place} says something of its own: {place * 7919}"} for place in range(count)]


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Writes files, calls the command beside them, and returns its exit code and both outputs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()

    def called(*words, **files):
        for name, text in files.items():
            (tmp_path / name.replace("_", ".")).write_text(text)
        code = main(["data", *words])
        return code, *capsys.readouterr()

    return called


def told(output):
    """The lines without the padding of columns."""
    return [re.sub(r"\s+", " ", line).strip() for line in output.splitlines()]


def test_good_rows_are_told_and_nothing_is_left_behind(call, tmp_path):
    code, out, err = call("a.jsonl", a_jsonl=lines([*texts(200), texts(1)[0]]))

    assert code == 0 and err == "reading a.jsonl\n"
    shown = told(out)
    assert shown[0] == "a.jsonl"
    assert "format text (text is a string: 201 of 201 rows looked at)" in shown
    assert "text -> the document" in shown and "rows 201 read, 201 used" in shown and "duplicates 1" in shown
    assert any(line.startswith("lengths of 201 rows half have at most") for line in shown)
    assert not list((tmp_path / "scratch").iterdir())


def test_json_is_one_object_that_holds_the_report(call):
    code, out, _ = call("a.jsonl", "--json", a_jsonl=lines(texts(200)))

    report = json.loads(out)
    assert code == 0 and report["rows"] == 200 and report["bad_rows"] == [] and report["samples"] == []
    assert report["sources"]["rows"]["mapping"] == {"text": "the document"}
    assert sum(report["lengths"]["counts"]) == 200


def test_a_bad_row_ends_with_2_its_place_and_a_file_of_rejects_and_the_report_all_the_same(call):
    code, out, err = call("a.jsonl", a_jsonl=lines([*texts(200), {"text": 5}]))

    assert code == 2
    assert "left out not text: 1" in told(out)
    assert (
        "posttrain: 1 of 201 rows cannot be used:\n"
        '  a.jsonl:201: text is the number 5; accepted: {"text": "..."}; write a string\n'
    ) in err
    rejects = re.search(r"all of them are in (\S+);", err)
    assert rejects
    with open(rejects.group(1)) as file:
        assert json.loads(file.read())["where"] == "a.jsonl:201"


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
        "posttrain: a.jsonl: two formats fit: text (text is a string), alpaca (instruction and output are strings); "
        "say which with format=NAME (sources.NAME.format=...)\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["empty.jsonl"], "empty.jsonl is empty (0 bytes)"),
        (["nothing.jsonl"], "sources.rows.path=nothing.jsonl: no such file or directory"),
        (["kind=text"], "no rows are named; give a file"),
        (["a.jsonl", "formt=text"], "formt: unknown key; accepted: "),
        (["a.jsonl", "formt=text"], "did you mean format?"),
        (["a.jsonl", "held_out=yes"], "held_out"),
        (["a.jsonl", "max_bad_rows=-1"], "max_bad_rows=-1: input should be greater than or equal to 0"),
        (["a.jsonl", "kind=pictures"], 'kind="pictures": input should be'),
        (["a.jsonl", "columns={a: [b}"], "key=value is accepted"),
        (["source:corpsu"], "the configuration has no such source; there are: corpus, instructions, preferences;"),
        (["a.jsonl", "kind=preferences"], "which gives text; this stage makes preferences"),
        (["a.jsonl", "model=/nowhere"], "model=/nowhere: no such directory"),
        (["a.jsonl", "--html", "/nowhere/a.html"], "--html /nowhere/a.html: cannot be written"),
        (["a.jsonl", "--against", "empty.jsonl"], "empty.jsonl is empty"),
        (["a.jsonl", "--against", "bad.jsonl"], "1 of 2 rows cannot be used"),
    ],
)
def test_what_cannot_be_is_refused_with_2(call, words, message):
    bad = lines([*texts(1), {"text": None}])

    code, _, err = call(*words, a_jsonl=lines(texts(100)), empty_jsonl="", bad_jsonl=bad)

    assert code == 2 and message in err and "Traceback" not in err


def test_columns_and_other_overrides_reach_the_preparation(call):
    rows = lines([{"question": f"what is {place}?", "answer": f"it is {place}"} for place in range(300)])
    words = ["a.jsonl", "columns.question=prompt", "columns.answer=completion", "--json"]

    report = json.loads(call(*words, a_jsonl=rows)[1])
    sliced = json.loads(call(*words, "split=train[:100]", "held_out=0.5", "system_prompt=Be brief.")[1])

    assert report["rows"] == 300 and report["sources"]["rows"]["format"] == "prompt_completion"
    assert sliced["rows"] == 100 and sliced["held_out_rows"] > 30
    assert sliced["lengths"]["p50"] == pytest.approx(report["lengths"]["p50"] + len("Be brief.\n"), abs=2)


def test_several_sources_are_prepared_together(call):
    code, out, _ = call("a.jsonl", "b.jsonl", "--json", a_jsonl=lines(texts(100)), b_jsonl=lines(texts(120)))

    report = json.loads(out)
    assert code == 0 and report["rows"] == 220 and report["duplicates"] == 100
    assert [source["path"] for source in report["sources"].values()] == ["a.jsonl", "b.jsonl"]


def test_rows_that_are_measured_on_elsewhere_are_named(call):
    trained, measured = texts(100), [{"text": "only here"}, texts(8)[7]]

    code, out, err = call("a.jsonl", "--against", "b.jsonl", "--json", a_jsonl=lines(trained), b_jsonl=lines(measured))

    report = json.loads(out)
    assert code == 0 and report["leaked_rows"] == 1 and "reading b.jsonl" in err
    [overlap] = report["leakage"]
    assert (overlap["kind"], overlap["train_set"], overlap["held_out_set"]) == ("exact", "a.jsonl", "b.jsonl")
    assert overlap["train_row_id"] == overlap["held_out_row_id"]


def test_a_page_is_written(call, tmp_path):
    code, _, _ = call("a.jsonl", "--html", "a.html", a_jsonl=lines(texts(100)))

    assert code == 0 and "<svg" in (tmp_path / "a.html").read_text()
