"""``posttrain data`` where it needs more than files: a model's tokenizer, the configuration."""

import json
import re
from itertools import groupby
from pathlib import Path

import pytest

from flows.__main__ import main
from tests import tiny

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


@pytest.fixture
def chats(tmp_path, monkeypatch, capsys):
    """Calls the command on a hundred conversations of growing length, in the tokens of a tiny model."""
    monkeypatch.chdir(tmp_path)
    tiny.write_policy(tmp_path / "model")
    capsys.readouterr()  # what imports of libraries print
    rows = [
        {"messages": [{"role": "user", "content": f"say {place}"}, {"role": "assistant", "content": "word " * place}]}
        for place in range(1, 101)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def called(*words):
        code = main(["data", "a.jsonl", "model=model", "--json", *words])
        out, err = capsys.readouterr()
        return code, json.loads(out or "null"), err

    return called


def test_with_a_model_lengths_are_tokens_and_labels_are_told(chats):
    code, report, err = chats("max_length=100")

    assert code == 0 and "tokenizing as model does" in err
    assert (report["lengths"]["unit"], report["lengths"]["tokenizer"]) == ("tokens", "model")
    labels = report["labels"]
    assert labels["max_length"] == 100 and 0 < labels["rows_cut"] < 100 and 0 < labels["trained_tokens_percent"] < 100
    assert len(report["samples"]) == 3 and "⟦word" in report["samples"][0]


def test_the_suggested_length_is_what_labels_are_told_for(chats):
    _, report, _ = chats()

    assert report["labels"]["max_length"] == report["lengths"]["suggested_max_length"]
    assert report["labels"]["rows_cut"] <= 5


def test_rows_of_which_nothing_would_be_trained_are_refused(chats):
    code, report, err = chats("max_length=3")

    assert code == 2 and "has a trained token within max_length=3" in err
    assert report["labels"]["trained_tokens_percent"] == 0


def test_rows_that_are_refused_after_they_were_written_are_tokenized_all_the_same(chats):
    code, report, err = chats("split=train[:1]")

    assert code == 2 and "leaves none to measure on" in err
    assert report["labels"]["trained_tokens_percent"] > 0


def test_the_page_shows_what_the_command_prints(capsys):
    code = main(["data", "quickstart:instructions"])

    printed = capsys.readouterr().out
    (shown,) = re.findall(r"`posttrain data quickstart:instructions`:\n\n```\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert code == 0 and without_numbers(printed) == without_numbers(shown)


def without_numbers(text):
    """The lines without what another version of Python's documentation changes; of lines that are then alike, one."""
    lines = [re.sub(r"\s+", " ", re.sub(r"\b[0-9a-f]{16}\b|\d+(\.\d+)?", "#", line)) for line in text.splitlines()]
    return [line for line, _ in groupby(lines)]


def test_a_source_of_the_configuration_is_named(capsys):
    code = main(["data", "source:corpus", "--json"])

    report = json.loads(capsys.readouterr().out)
    assert code == 0 and report["sources"]["rows"]["path"] == "quickstart:corpus"


def test_a_model_without_a_chat_template_is_given_one(chats, tmp_path):
    (tmp_path / "model" / "chat_template.jinja").unlink()

    code, told, err = chats()
    given, report, _ = chats("chat_template=chatml")

    assert code == 2 and "no chat template" in err and told["rows"] == 100
    assert given == 0 and "<|im_start|>assistant" in report["samples"][0]
