"""Tables as plain text."""

import pytest

from flows.commands.data import as_text
from flows.reports.wording import empty_table, on_screen, plain_text, screen_cells


def test_columns_are_as_wide_as_their_cells_and_text_stays_as_it_is():
    table = empty_table("name", "count", "why", numbers=("count",))
    table.add_row("a", "7", "restart=[cpt]")
    table.add_row("long name", "12", "one\ntwo")
    table.add_row("", "", "")
    assert plain_text(table).split("\n") == [
        "name       count  why",
        "a              7  restart=[cpt]",
        "long name     12  one",
        "                  two",
        "",
    ]


def test_letters_that_take_two_columns_of_a_screen_are_aligned(monkeypatch):
    table = empty_table("column", "rows", "is", numbers=("rows",))
    table.add_row("文本", "十", "document")
    table.add_row("cafe\u0301", "12", "answer")  # a mark on the letter before it
    table.add_row("text", "3", "one")
    ends = [screen_cells(line[: line.index(end)]) for line, end in zip(
        plain_text(table).split("\n"), ("is", "document", "answer", "one"), strict=True)]  # fmt: skip
    assert ends == [14] * 4
    assert as_text(("rows", [("文本", "1"), ("text", "2")])).split("\n") == ["rows", "  文本  1", "  text  2"]
    monkeypatch.setenv("COLUMNS", "40")
    lines = on_screen("文本 " * 20).split("\n")
    assert len(lines) > 2 and max(map(screen_cells, lines)) <= 40


@pytest.mark.parametrize("width", [80, 120])
def test_what_is_wider_than_the_screen_resumes_below_in_its_column(width, monkeypatch):
    table = empty_table("stage", "rate", "origin", "length", numbers=("rate",))
    table.add_row("sft", "2e-05", "as set; default, x10 under an adapter: 0.0002", "2 epochs of 50 rows, about 7 " * 3)
    whole = plain_text(table)
    monkeypatch.setenv("COLUMNS", str(width))
    lines = plain_text(table).split("\n")
    assert max(map(len, lines)) <= width < max(map(len, whole.split("\n"))) and len(lines) > 2
    starts = [lines[0].index(name) for name in ("origin", "length")]
    cells = [
        " ".join(line[at:end].strip() for line in lines[1:]).strip()
        for at, end in zip(starts, [starts[1], 999], strict=True)
    ]
    assert cells == ["as set; default, x10 under an adapter: 0.0002", ("2 epochs of 50 rows, about 7 " * 3).strip()]
    assert plain_text(empty_table("a", "b")) == "a  b"  # what fits stays as it is


def test_long_lines_are_folded_below_their_text_and_commands_stay_whole_for_the_clipboard(monkeypatch):
    run = "posttrain run pipeline=sft model=owner/name 'data=my chats.jsonl'"
    long = f"  {run} stages.sft.method.learning_rate=1e-05"
    text = f"posttrain: {'x ' * 30}: make one with: {run}; or leave it\n{long}\n  sft  {'step 3 ' * 12}\nshort"
    assert on_screen(text) == text  # other programs read it
    monkeypatch.setenv("COLUMNS", "80")
    lines = on_screen(text).split("\n")
    assert max(map(len, lines)) <= 80 and any(f" {run};" in line for line in lines)
    at = next(number for number, line in enumerate(lines) if line.endswith(" \\"))
    assert lines[at][:-2] + lines[at + 1][3:] == long and lines[-2].startswith("       step 3") and lines[-1] == "short"


def test_what_installs_a_package_stays_on_one_line(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    found = on_screen("posttrain: it is not here; run: pip install --no-deps 'posttrain[gpu]'").split("\n")
    assert found[-1] == "  pip install --no-deps 'posttrain[gpu]'"
