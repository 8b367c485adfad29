"""What ``posttrain data`` finds: compared with other sets, listed, and kept where that is asked for."""

import json

import duckdb
import pytest

from flows.declare.config import load_pipeline
from flows.planning.plan import make_plan
from tests.data_command import call as call  # a fixture
from tests.data_command import lines, texts, told
from tests.finished import finish

BAD = [{"text": 5}] * 30


def alike(count):
    """Rows of which each but the first says nearly the same as the first."""
    return [{"text": " ".join([*(f"word{i}" for i in range(300)), f"end{place}"])} for place in range(count)]


def test_rows_that_are_measured_on_elsewhere_are_named(call):
    trained, measured = texts(100), [{"text": "only here"}, texts(8)[7]]

    code, out, err = call("a.jsonl", "--against", "b.jsonl", "--json", a_jsonl=lines(trained), b_jsonl=lines(measured))

    report = json.loads(out)
    assert code == 0 and report["leaked_rows"] == 1 and "reading b.jsonl" in err
    [overlap] = report["leakage"]
    assert (overlap["kind"], overlap["train_set"], overlap["held_out_set"]) == ("exact", "a.jsonl", "b.jsonl")
    assert overlap["train_row_id"] == overlap["held_out_row_id"]


def test_rows_that_are_refused_after_they_were_written_are_compared_all_the_same(call):
    code, out, err = call("a.jsonl", "--against", "b.jsonl", "--json", a_jsonl=lines(texts(1)), b_jsonl=lines(texts(9)))

    assert code == 2 and "leaves none to measure on" in err
    assert json.loads(out)["leaked_rows"] == 1


def test_rows_that_are_refused_before_are_said_not_to_be_compared(call):
    rows = lines([*texts(100), *BAD])

    code, out, err = call("a.jsonl", "--against", "b.jsonl", a_jsonl=rows, b_jsonl=lines(texts(9)))

    assert code == 2 and "not compared with b.jsonl: the rows are refused" in err.splitlines()
    assert "leaked rows" not in out


def test_bad_rows_of_a_set_that_is_measured_on_are_counted_and_the_others_compared(call):
    measured = lines([texts(8)[7], *BAD])

    code, out, _ = call("a.jsonl", "--against", "b.jsonl", "--json", a_jsonl=lines(texts(100)), b_jsonl=measured)

    report = json.loads(out)
    assert code == 0 and report["leaked_rows"] == 1 and report["rows"] == 100
    assert report["sources"]["against"]["path"] == "b.jsonl"
    assert report["sources"]["against"]["dropped"] == {"not text": 30}


@pytest.mark.parametrize(
    ("measured", "why"), [("", "b.jsonl is empty"), (lines(BAD), "not one of its rows can be used")]
)
def test_a_set_that_cannot_be_compared_costs_no_report(call, measured, why):
    words = ("a.jsonl", "--against", "b.jsonl", "--against", "c.jsonl", "--json")

    code, out, err = call(*words, a_jsonl=lines(texts(100)), b_jsonl=measured, c_jsonl=lines(texts(3)))

    assert code == 2 and f"posttrain: not compared with b.jsonl: {why}" in err
    assert json.loads(out)["leaked_rows"] == 3


def test_of_more_than_twenty_it_is_said_how_many_and_how_to_keep_all(call):
    rows = [*texts(100), *alike(26), *BAD]
    words = ("a.jsonl", "max_bad_rows=30", "--against", "b.jsonl")

    code, out, _ = call(*words, a_jsonl=lines(rows), b_jsonl=lines(texts(40)))

    (leaked,) = (int(line.split()[-1]) for line in told(out) if line.startswith("leaked rows"))
    assert code == 0 and leaked >= 40
    assert [line for line in told(out) if "--out" in line] == [
        f"and {more} more; --out DIR keeps all of them" for more in (10, 5, leaked - 20)
    ]


def test_what_is_asked_for_is_kept(call, tmp_path):
    rows = [*texts(100), *alike(26), *BAD]
    words = ("a.jsonl", "max_bad_rows=30", "--against", "b.jsonl", "--out", "kept/here")

    code, out, _ = call(*words, a_jsonl=lines(rows), b_jsonl=lines(texts(40)))

    kept = tmp_path / "kept" / "here"
    leaked = json.loads((kept / "report.json").read_text())["leaked_rows"]
    assert code == 0 and f"and {leaked - 20} more; kept/here/leakage.parquet has all of them" in told(out)
    assert leaked > 40  # rows that are alike are on both sides too
    assert {file.name for file in kept.iterdir()} == {
        "report.json", "report.html", "rejects.jsonl", "near_duplicates.parquet", "leakage.parquet",
    }  # fmt: skip
    assert duckdb.read_parquet(str(kept / "near_duplicates.parquet")).count("*").fetchall() == [(25,)]
    assert duckdb.read_parquet(str(kept / "leakage.parquet")).count("*").fetchall() == [(leaked,)]
    assert len((kept / "rejects.jsonl").read_text().splitlines()) == 30

    call("a.jsonl", "--out", "kept/here", a_jsonl=lines(texts(100)))
    assert not (kept / "rejects.jsonl").exists()  # of the call before


def test_a_page_that_cannot_be_written_costs_no_report(call, tmp_path):
    (tmp_path / "a.html").symlink_to("nowhere/a.html")

    code, out, err = call("a.jsonl", "--html", "a.html", a_jsonl=lines(texts(100)))

    assert code == 2 and "100 read, 100 used" in out
    assert "--html a.html: cannot be written; name a file in a folder that exists" in err


def test_a_refusal_names_the_file_of_bad_rows_that_is_kept(call, tmp_path):
    code, _, err = call("a.jsonl", "--out", "kept", a_jsonl=lines([*texts(100), *BAD]))

    assert code == 2 and "\n  and 10 more\nall of them are in kept/rejects.jsonl; mend them" in err
    assert len((tmp_path / "kept" / "rejects.jsonl").read_text().splitlines()) == 30


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--html", "nowhere/a.html"), "--html nowhere/a.html: cannot be written; name a file in a folder that exists"),
        (("--html", "scratch"), "--html scratch: cannot be written"),
        (("--out", "a.jsonl"), "--out a.jsonl: is no folder"),
    ],
)
def test_a_place_that_cannot_be_written_is_told_before_anything_is_read(call, words, message):
    code, out, err = call("a.jsonl", *words, a_jsonl=lines(texts(100)))

    assert (code, out) == (2, "") and err.startswith(f"posttrain: {message}") and "reading" not in err


def test_a_page_is_written_and_names_no_file_that_is_not_kept(call, tmp_path):
    rows = lines([*texts(100), *alike(26), *BAD])

    code, _, _ = call("a.jsonl", "max_bad_rows=30", "--html", "a.html", a_jsonl=rows)

    page = (tmp_path / "a.html").read_text()
    assert code == 0 and "<svg" in page
    assert "The first 20 of 25; <code>posttrain data --out DIR</code> keeps all of them." in page
    assert "rejects.jsonl" not in page and "near_duplicates.parquet" not in page


def test_a_finished_data_stage_is_shown_as_it_reported(call, tmp_path):
    call("a.jsonl", "max_bad_rows=30", "--out", "kept", a_jsonl=lines([*texts(100), *BAD]))
    plan = make_plan(load_pipeline([f"store={tmp_path}/artifacts"]))
    finish(plan, "corpus")
    entry = plan.entry(plan.stage("corpus"))
    manifest = json.loads((entry.path / "manifest.json").read_text())
    (entry.path / "manifest.json").write_text(json.dumps({**manifest, "produces": "text"}))
    for file in (tmp_path / "kept").iterdir():
        file.rename(entry.output / file.name)

    for ref in ("cpt-sft-dpo/corpus", entry.path.name):
        code, out, err = call(ref)
        assert (code, err) == (0, "")
        assert "rows 130 read, 100 used" in told(out)
        assert f"and 10 more; {entry.output}/rejects.jsonl has all of them" in told(out)
