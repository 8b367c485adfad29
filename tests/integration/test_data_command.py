"""``posttrain data``, in process: what it prints, refuses, compares and keeps of a user's own files."""

import json
import re
import shutil
from itertools import groupby
from pathlib import Path

import duckdb
import pytest

from flows.declare.config import load_pipeline
from flows.planning.plan import make_plan
from flows.reports.wording import relative
from tests import tiny
from tests.command import Command
from tests.data_command import call as call  # a fixture
from tests.data_command import lines, reported, texts
from tests.finished import finish

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
BAD = [{"text": 5}] * 30
ASKED = [
    {"The Question": f"What is {place}?", "my-answer": f"It is {place}.", "context": "Facts:"} for place in range(99)
]
RENAMED = ("a.jsonl", "columns.prompt=The Question", "columns.completion=my-answer")


def alike(count: int) -> list[dict[str, str]]:
    """Rows of which each but the first says nearly the same as the first."""
    return [{"text": " ".join([*(f"word{i}" for i in range(300)), f"end{place}"])} for place in range(count)]


def printed_by(called: tuple[int, str, str]) -> str:
    code, out, err = called
    assert code == 0, err
    return out


def report_of(called: tuple[int, str, str]) -> dict:
    return json.loads(printed_by(called))


def test_good_rows_are_reported_and_with_json_as_one_object(call):
    code, out, err = call("a.jsonl", a_jsonl=lines([*texts(200), texts(1)[0]]))
    report = report_of(call("a.jsonl", "--json"))

    shown = reported(out)
    assert code == 0 and err == "reading a.jsonl\n" and shown[0] == "a.jsonl"
    assert "format text (has text: 201 of 201 rows looked at)" in shown
    assert "text the document" in shown and "rows 201 read, 201 used" in shown and "duplicates 1" in shown
    assert any(line.startswith("lengths of 201 rows, bytes at most: 50 %: ") for line in shown)
    assert report["rows"] == 201 and report["bad_rows"] == [] and report["samples"] == []
    assert report["sources"]["rows"]["mapping"] == {"text": "the document"}
    assert sum(report["lengths"]["counts"]) == 201


def test_a_process_that_refuses_a_table_says_why_and_nothing_of_what_duckdb_has_left(tmp_path):
    (tmp_path / "odd.jsonl").write_text('{"foo": 1, "bar": 2}\n')
    done = Command(tmp_path).process("data", "odd.jsonl")
    assert done.returncode == 2 and done.stderr.startswith("posttrain: odd.jsonl: no format fits the columns foo, bar")
    assert len(done.stderr.splitlines()) == 1


def test_a_bad_row_ends_with_2_its_place_and_the_report_unless_it_is_allowed(call):
    code, out, err = call("a.jsonl", a_jsonl=lines([*texts(200), {"text": 5}]))
    allowed, shown, nothing = call("a.jsonl", "max_bad_rows=1")
    many = report_of(call("a.jsonl", "max_bad_rows=30", "--json", a_jsonl=lines([*texts(200), *BAD])))

    problem = '  a.jsonl:201: text is the number 5; accepted: {"text": "..."}; correct or remove the row'
    assert code == 2 and "left out not text: 1" in reported(out)
    assert err.endswith(
        f"posttrain: 1 of 201 rows cannot be used:\n{problem}\n"
        "all of them are in rejects.jsonl, which --out DIR keeps; correct them, or leave them out with max_bad_rows=1\n"
    )
    assert allowed == 0 and "cannot be used" not in nothing and problem in shown.splitlines()
    assert len(many["bad_rows"]) == 20
    assert many["sources"]["rows"]["dropped"] == {"not text": 30}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["empty.jsonl"], "empty.jsonl: there is no row in this file"),
        (["two.jsonl"], "2 formats fit: text (has text: 9 rows from row 1 on), alpaca ("),
        (["nothing.jsonl"], "sources.rows.path=nothing.jsonl: no such file or directory"),
        (["kind=text"], "no rows are named; give a file"),
        (["a.jsonl", "formt=text"], "did you mean format?"),
        (["a.jsonl", "max_bad_rows=-1"], "max_bad_rows=-1: input should be greater than or equal to 0"),
        (["a.jsonl", "columns={a: [b}"], "key=value is accepted"),
        (["source:corpsu"], "the configuration has no such source; there are: corpus, instructions, preferences;"),
        (["a.jsonl", "kind=rows"], "kind=rows: no data stage produces it; accepted: text, conversations, preferences"),
        (["a.jsonl", "kind=preferences"], "which gives text; preferences is accepted by kind=preferences; leave it"),
        (["a.jsonl", "max_length=9"], "max_length=9: it is about tokens, so it needs a model; set model="),
        (["a.jsonl", "chat_template=chatml", "model=."], "chat_template=chatml: text goes through no chat template"),
        (["a.jsonl", "a.jsonl", "proportions.more=1.0"], "the slots of rows are rows, rows_2; set a share for each"),
        (["a.jsonl", "model=/nowhere"], "model /nowhere: no such directory, and the hub gave none"),
        (["a.jsonl", "year=2024.jsonl"], "year: unknown key, and no file is called year=2024.jsonl; accepted: "),
        (["a.jsonl", "--against", "nothing.jsonl"], "sources.rows.path=nothing.jsonl: no such file or directory"),
        (["a.jsonl", "--html", "nowhere/a.html"], "--html nowhere/a.html: cannot be written; name a file in a folder"),
        (["a.jsonl", "--out", "a.jsonl"], "--out a.jsonl: is no folder"),
        (["a.txt", "split_by=word"], "split_by"),
    ],
)
def test_what_cannot_be_is_refused_with_2(call, overrides, message):
    two = lines([{"text": f"text {place}", "instruction": "say", "output": str(place)} for place in range(9)])
    code, _, err = call(*overrides, a_jsonl=lines(texts(100)), empty_jsonl="", two_jsonl=two, a_txt="a\n\nb")

    assert code == 2 and message in err and "Traceback" not in err


def test_columns_the_other_way_round_are_refused_with_the_words_to_type(call):
    code, _, err = call("a.jsonl", "columns.context=prompt", a_jsonl=lines(ASKED))

    assert code == 2 and "columns maps our name to the rows' column: set columns.prompt=context" in err


def test_single_answers_and_prompts_are_counted_in_tokens(call, tmp_path):
    """Real rows of each through the command: how many of each label, what is trained, what is cut."""
    tiny.write_tokenizer(tmp_path / "model")
    answers = [
        {"prompt": f"what is {place}?", "completion": f"it is {place}", "label": place % 4 > 0} for place in range(80)
    ]
    asked = [{"prompt": "why " * (place % 20) + f"{place}?", "answer": place} for place in range(80)]

    code, out, _ = call("a.jsonl", "model=model", "held_out=0.2", a_jsonl=lines(answers))
    report = report_of(call("a.jsonl", "model=model", "held_out=0.2", "--json"))
    assert code == 0 and f"desirable rows {report['desirable_rows']}" in reported(out)
    assert report["desirable_rows"] + report["undesirable_rows"] == report["train_rows"]
    assert f"undesirable answers {report['labels']['labels']['undesirable']}" in reported(out)
    assert report["labels"]["labels"]["undesirable"] == report["undesirable_rows"] > 0
    assert "⟧ (" in out and 0 < report["labels"]["trained_tokens_percent"] < 100

    code, out, _ = call("b.jsonl", "model=model", "max_length=20", "--html", "b.html", b_jsonl=lines(asked))
    report = report_of(call("b.jsonl", "model=model", "max_length=20", "--json"))
    labels = report["labels"]
    assert code == 0 and labels["trained_tokens_percent"] is None and 0 < labels["prompts_cut"] < report["train_rows"]
    assert f"trained tokens none of {labels['num_tokens']}: answers are generated" in reported(out)
    assert f"prompts cut {labels['prompts_cut']} at max_length=20" in reported(out)
    assert 'columns: {"answer"' in out and "answers are generated" in (tmp_path / "b.html").read_text()


def test_words_are_what_a_shell_hands_over_and_reach_the_preparation(call, tmp_path):
    plain = report_of(call(*RENAMED, "--json", a_jsonl=lines(ASKED)))
    assert plain["sources"]["rows"]["mapping"].keys() == {"The Question", "my-answer"} and plain["rows"] == 99
    for prompt in ("Be brief: now", "{Be} brief", "yes", "5"):
        prompted = report_of(call(*RENAMED, f"system_prompt={prompt}", "--json"))
        assert prompted["lengths"]["max"] - plain["lengths"]["max"] == pytest.approx(len(prompt), abs=1)
    for template in ("{context} {The Question}", "{The Question}"):
        overrides = ("a.jsonl", "columns.completion=my-answer", f"prompt_template={template}", "--json")
        assert report_of(call(*overrides))["sources"]["rows"]["format"] == "prompt_completion"
    sliced = report_of(call(*RENAMED, "split=train[:50]", "held_out=0.5", "--json"))
    assert sliced["rows"] == 50 and sliced["held_out_rows"] > 15
    for name in ("year=2024.jsonl", "a.b=c.jsonl"):  # files that are there
        (tmp_path / name).write_text(lines(texts(99)))
        assert report_of(call(name, "--json"))["sources"]["rows"]["path"] == name
    code, _, err = call("a.jsonl", "prompt_template={question}", a_jsonl="{\n{\n")
    assert code == 2 and "2 of 2 rows cannot be used" in err and "raw text" not in err


@pytest.mark.parametrize(("separator", "word"), [("|", "|"), ("#", "#"), ("\t", r"\t")])
def test_a_separator_is_what_a_shell_hands_over(call, separator, word):
    cells = "".join(f"{place}?{separator}{place}.\n" for place in range(30))
    report = report_of(call("a.csv", f"loader.sep={word}", "--json", a_csv=f"prompt{separator}completion\n{cells}"))
    assert report["sources"]["rows"]["rows_used"] == 30


def test_how_a_text_is_split_is_shown_and_can_be_set(call):
    text = "".join(f"paragraph {place}\nsays {place * 7919}\n\n" for place in range(90))

    code, out, _ = call("a.txt", a_txt=text)
    report = report_of(call("a.txt", "split_by=line", "--json"))

    assert code == 0 and "split by paragraph (split_by=line|paragraph|document sets it)" in reported(out)
    assert "rows 90 read, 90 used" in reported(out)
    assert report["rows"] == 180 and report["sources"]["rows"]["split_by"] == "line"


def test_several_sources_are_prepared_together_and_one_of_another_kind_is_left_out(call):
    overrides = ("a.jsonl", "b.jsonl")
    report = report_of(call(*overrides, "--json", a_jsonl=lines(texts(100)), b_jsonl=lines(texts(120))))
    assert report["rows"] == 220 and report["duplicates"] == 100
    mixed = (*overrides, "proportions.rows=0.75", "proportions.rows_2=0.25")
    out = printed_by(call(*mixed, b_jsonl=lines(texts(200)[100:])))
    report = report_of(call(*mixed, "--json"))
    assert "rows: a.jsonl" in out.splitlines() and "rows_2: b.jsonl" in out.splitlines()
    assert report["sources"]["rows_2"]["path"] == "b.jsonl"
    assert report["sources"]["rows_2"]["dropped"]["left out by the mixture"] > 30

    code, out, err = call(*overrides, "--json", b_jsonl=lines([{"prompt": "a", "completion": "b"}] * 9))
    assert code == 2 and json.loads(out)["rows"] == 100
    assert "posttrain: b.jsonl: detected prompt_completion (" in err
    assert "which gives conversations; text is accepted beside a.jsonl; look at it by itself" in err


def test_what_a_directory_holds_of_other_splits_is_reported_once(call, tmp_path):
    (tmp_path / "rows").mkdir()
    for split in ("train", "test"):
        (tmp_path / "rows" / f"{split}.jsonl").write_text(lines(texts(30)))
    code, _, err = call("rows", "--json")

    assert code == 0
    assert err.count("rows: split=train is read; not read, because their names are of other splits: test.jsonl\n") == 1


def test_a_function_is_called_once_and_prints_nothing_into_the_json(call, tmp_path):
    code = (
        "import sys\ndef rows():\n    print('hello')\n    open('calls', 'a').write('x')\n"
        "    for i in range(30): yield {'text': f'row {i} of {i * 7919}'}\ndef ends(): sys.exit(0)\n"
    )
    found, out, err = call("python:a.py:rows", "allow_code=true", "--json", a_py=code)
    assert found == 0 and json.loads(out)["rows"] == 30 and "hello\n" in err
    assert (tmp_path / "calls").read_text() == "x"
    found, _, err = call("python:a.py:ends", "allow_code=true")
    assert found == 2 and "a.py:6: SystemExit: 0; correct the function" in err


def test_rows_that_are_measured_on_elsewhere_are_named(call):
    overrides = ("a.jsonl", "--against", "b.jsonl", "--json")
    measured = [{"text": "only here"}, texts(8)[7], *BAD]  # bad rows are counted, and the others compared

    report = report_of(call(*overrides, a_jsonl=lines(texts(100)), b_jsonl=lines(measured)))

    assert report["leaked_rows"] == 1 and report["rows"] == 100
    assert report["sources"]["against"]["dropped"] == {"not text": 30}
    [overlap] = report["leakage"]
    assert (overlap["kind"], overlap["train_set"], overlap["held_out_set"]) == ("exact", "a.jsonl", "b.jsonl")
    assert overlap["train_row_id"] == overlap["held_out_row_id"]
    # Refused after they were written, rows are compared all the same; refused before, they are not.
    code, out, err = call(*overrides, a_jsonl=lines(texts(1)), b_jsonl=lines(texts(9)))
    assert code == 2 and "leaves none to measure on" in err and json.loads(out)["leaked_rows"] == 1
    code, out, err = call(*overrides[:-1], a_jsonl=lines([*texts(100), *BAD]))
    assert code == 2 and "not compared with b.jsonl: the rows are refused" in err.splitlines()
    assert "leaked rows" not in out


@pytest.mark.parametrize(
    ("measured", "why"), [("", "b.jsonl: there is no row"), (lines(BAD), "not one of its rows can be used")]
)
def test_a_set_that_cannot_be_compared_costs_no_report(call, measured, why):
    overrides = ("a.jsonl", "--against", "b.jsonl", "--against", "c.jsonl", "--json")

    code, out, err = call(*overrides, a_jsonl=lines(texts(100)), b_jsonl=measured, c_jsonl=lines(texts(3)))

    assert code == 2 and f"posttrain: not compared with b.jsonl: {why}" in err
    assert json.loads(out)["leaked_rows"] == 3


def test_of_more_than_twenty_it_is_reported_how_many_and_all_are_kept_where_that_is_asked(call, tmp_path):
    rows = [*texts(100), *alike(26), *BAD]
    overrides = ("a.jsonl", "max_bad_rows=30", "--against", "b.jsonl", "--html", "a.html")

    out = printed_by(call(*overrides, a_jsonl=lines(rows), b_jsonl=lines(texts(40))))
    (leaked,) = (int(line.split()[-1]) for line in reported(out) if line.startswith("leaked rows"))
    assert leaked > 40  # rows that are alike are on both sides too
    assert [line for line in reported(out) if "--out" in line] == [
        f"and {more} more; --out DIR keeps all of them" for more in (27, 5, leaked - 20)
    ]
    page = (tmp_path / "a.html").read_text()
    assert "<svg" in page and "rejects.jsonl" not in page and "near_duplicates.parquet" not in page
    assert "and 5 more; --out DIR keeps all of them" in page

    out = printed_by(call(*overrides, "--out", "kept/here"))
    kept = tmp_path / "kept" / "here"
    assert f"and {leaked - 20} more; kept/here/leakage.parquet has all of them" in reported(out)
    assert {file.name for file in kept.iterdir()} == {
        "report.json", "report.html", "rejects.jsonl", "near_duplicates.parquet", "leakage.parquet",
    }  # fmt: skip
    assert duckdb.read_parquet(str(kept / "near_duplicates.parquet")).count("*").fetchall() == [(25,)]
    assert duckdb.read_parquet(str(kept / "leakage.parquet")).count("*").fetchall() == [(leaked,)]
    assert len((kept / "rejects.jsonl").read_text().splitlines()) == 30
    printed_by(call("a.jsonl", "--out", "kept/here", a_jsonl=lines(texts(100))))
    assert not (kept / "rejects.jsonl").exists()  # of the call before

    code, _, err = call("a.jsonl", "--out", "refused", a_jsonl=lines(rows))
    assert code == 2 and "\n  and 27 more\nall of them are in refused/rejects.jsonl; correct them" in err
    (tmp_path / "b.html").symlink_to("nowhere/b.html")
    code, out, err = call("b.jsonl", "--html", "b.html")
    assert code == 2 and "40 read, 40 used" in out and "--html b.html: cannot be written; name a file" in err


def test_a_finished_data_stage_is_shown_as_it_reported(call, tmp_path):
    printed_by(call("a.jsonl", "max_bad_rows=30", "--out", "kept", a_jsonl=lines([*texts(100), *BAD])))
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
        assert "rows 130 read, 100 used" in reported(out)
        assert f"and 27 more; {relative(entry.output)}/rejects.jsonl has all of them" in reported(out)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_policy(tmp_path_factory.mktemp("model"))


def test_with_a_model_lengths_are_tokens_and_labels_are_reported(model, call, tmp_path):
    shutil.copytree(model, tmp_path / "model")
    rows = [
        {"messages": [{"role": "user", "content": f"say {place}"}, {"role": "assistant", "content": "word " * place}]}
        for place in range(1, 101)
    ]
    overrides = ("a.jsonl", "model=model", "--json")

    report = report_of(call(*overrides, a_jsonl=lines(rows)))
    assert (report["lengths"]["unit"], report["lengths"]["tokenizer"]) == ("tokens", "model")
    assert report["labels"]["max_length"] == report["lengths"]["suggested_max_length"]
    assert report["labels"]["rows_cut"] <= 5
    code, out, err = call(*overrides, "max_length=100")
    assert (code, err) == (0, "reading a.jsonl\ntokenizing as model does\n")
    labels, samples = (json.loads(out)[name] for name in ("labels", "samples"))
    assert labels["max_length"] == 100 and 0 < labels["rows_cut"] < 100 and 0 < labels["trained_tokens_percent"] < 100
    assert len(samples) == 3 and "⟦word" in samples[0]
    code, out, err = call(*overrides, "max_length=3")
    assert code == 2 and "has a trained token within max_length=3" in err
    assert json.loads(out)["labels"]["trained_tokens_percent"] == 0
    code, out, err = call(*overrides, "split=train[:1]", "held_out=0.05")  # refused after they were written
    assert code == 2 and "leaves none to measure on" in err
    assert json.loads(out)["labels"]["trained_tokens_percent"] > 0
    (tmp_path / "model" / "chat_template.jinja").unlink()
    code, out, err = call(*overrides)
    assert code == 2 and "no chat template" in err and json.loads(out)["rows"] == 100
    assert "<|im_start|>assistant" in report_of(call(*overrides, "chat_template=chatml"))["samples"][0]


def test_a_project_says_which_rows_a_source_has(call):
    settings = "pipeline: sft\nmodel: owner/name\ndata: mine.jsonl\nsources.instructions.columns.prompt: ask\n"
    rows = [{"ask": f"q {n}", "completion": "a"} for n in range(60)]
    code, out, err = call("source:instructions", "--json", posttrain_yaml=settings, mine_jsonl=lines(rows))
    assert code == 0, err
    assert json.loads(out)["sources"]["rows"]["rows_used"] == 60


def test_the_page_shows_what_the_command_prints_of_a_source(call):
    def without_numbers(text: str) -> list[str]:
        """The lines without what another version of Python's documentation changes; of lines alike then, one."""
        found = [re.sub(r"\s+", " ", re.sub(r"\b[0-9a-f]{16}\b|\d+(\.\d+)?", "#", line)) for line in text.splitlines()]
        return [line for line, _ in groupby(found)]

    code, printed, _ = call("source:instructions")
    (shown,) = re.findall(r"`posttrain data quickstart:instructions`:\n\n```\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert code == 0 and without_numbers(printed) == without_numbers(shown)


def test_a_model_has_the_names_that_it_has_in_a_plan(call):
    code, _, err = call("a.jsonl", "model=tiny", a_jsonl=lines(texts(100)))
    assert code == 2 and "model=tiny: a run makes it, so it has no tokenizer yet" in err
    code, _, err = call("a.jsonl", "model=smolm2", a_jsonl=lines(texts(100)))
    assert code == 2 and "model=smolm2: no such model; accepted: " in err and "did you mean smollm2?" in err
