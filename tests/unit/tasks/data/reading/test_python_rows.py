"""Rows of a Python function, read."""

import pickle

import pytest

from lineage.artifact import Source
from lineage.errors import DataError
from tasks.data.reading.chunk import Broken, Row
from tasks.data.reading.python_rows import read_function


@pytest.fixture
def read(tmp_path):
    """Reads the rows of a function of this code."""
    file = tmp_path / "mine.py"

    def rows(code: str, name: str = "rows") -> list[Row | Broken]:
        file.write_text(code)
        chunks = list(read_function(Source(path=f"python:{file}:{name}", allow_code=True)))
        return [row for chunk in chunks for row in pickle.loads(pickle.dumps(chunk)).rows()]

    return rows


def test_what_a_function_yields_are_rows_with_their_index(read, tmp_path):
    rows = read("def rows():\n    for i in range(2500): yield {'text': str(i), 'n': [i, None]}\n")
    assert [row.fields for row in rows] == [{"text": str(i), "n": [i, None]} for i in range(2500)]
    assert rows[1000].where == f"python:{tmp_path}/mine.py:rows[1000]"


def test_a_function_of_a_module_is_read(tmp_path, monkeypatch):
    (tmp_path / "rows_of_mine.py").write_text("def rows(count=2):\n    return [{'text': 'a'}] * count\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (chunk,) = read_function(Source(path="python:rows_of_mine.rows"))
    assert [row.fields for row in chunk.rows()] == [{"text": "a"}] * 2


def test_rows_are_asked_for_as_they_are_needed(tmp_path):
    (tmp_path / "endless.py").write_text("def rows():\n    while True: yield {'text': 'a'}\n")
    chunks = read_function(Source(path=f"python:{tmp_path}/endless.py:rows", allow_code=True))
    assert len(list(next(chunks).rows())) == 1000


_ODD = """
class Hostile:
    def __repr__(self):
        raise ValueError("no")

def hostile():
    return Hostile()

def deep():
    value = []
    for _ in range(5000):
        value = [value]
    return {'text': value}

"""


def test_nothing_is_a_value_and_arrays_are_lists(read):
    code = "import numpy as np\ndef rows(): yield {'a': None, 'b': np.array([1.5]), 'c': np.float32(2)}"
    assert [row.fields for row in read(code)] == [{"a": None, "b": [1.5], "c": 2.0}]


def test_what_a_function_prints_stays_out_of_the_output_of_the_command(read, capsys):
    read("print('loaded')\ndef rows():\n    print('called')\n    yield {'text': 'a'}\n    print('done')\n")
    assert capsys.readouterr() == ("", "loaded\ncalled\ndone\n")


@pytest.mark.parametrize(
    ("item", "problem", "reason"),
    [
        ("['a']", "the function yielded list; accepted: a function that yields mappings", "not a mapping"),
        ("None", "the function yielded NoneType", "not a mapping"),
        ("{'text': object()}", "not JSON: Type is not JSON serializable: object", "not JSON"),
        ("{1: 'a'}", "not JSON: Dict key must be str", "not JSON"),
        (
            "{'text': float('nan'), 'none': None}",
            "not JSON: Out of range float values are not JSON compliant",
            "not JSON",
        ),
        ("{'text': __import__('numpy').array([1, float('inf')])}", "not JSON: Out of range float values", "not JSON"),
        ("deep()", "not JSON: Recursion limit reached", "not JSON"),
        ("hostile()", "the function yielded Hostile", "not a mapping"),
        ("{'text': hostile()}", "not JSON: Type is not JSON serializable: Hostile", "not JSON"),
        ("{'text': '\\ud800'}", "not JSON: str is not valid UTF-8: surrogates not allowed", "not JSON"),
    ],
)
def test_an_item_that_is_no_row_is_told_with_its_index(item, problem, reason, read, tmp_path):
    good, bad, last = read(
        _ODD + f"def rows():\n    yield {{'text': 'a'}}\n    yield {item}\n    yield {{'text': 'b'}}\n"
    )
    assert isinstance(good, Row) and isinstance(bad, Broken) and isinstance(last, Row)
    assert bad.problem.startswith(problem) and bad.reason == reason
    assert bad.where == f"python:{tmp_path}/mine.py:rows[1]" and last.where.endswith("[2]")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("rows = 5", r"mine.py:rows is int; a function that takes no argument"),
        ("", r"mine.py:rows is nothing"),
        ("def rows(path): ...", r"mine.py:rows\(path\): missing a required argument: 'path'"),
        ("def rows(): return 5", r"mine.py:rows returned int; .*; yield the rows"),
        ("def rows(): return {'text': 'a'}", r"rows returned dict"),
        ("def rows():\n    yield {}\n    int('a')", r"mine.py:3: ValueError: invalid literal .*; mend the function"),
        ("import json\ndef rows():\n    json.loads('{')", r"mine.py:3: JSONDecodeError: "),
        ("import sys\ndef rows():\n    yield {}\n    sys.exit()", r"mine.py:4: SystemExit: .*; mend the function"),
        ("exit(0)", r"mine.py:1: SystemExit: 0; mend the function"),
        ("import nowhere", r"mine.py:1: ModuleNotFoundError: No module named 'nowhere'; mend the function"),
        ("def rows(:", r"mine.py:rows: SyntaxError: "),
    ],
)
def test_a_function_that_cannot_be_read_is_named(code, message, read):
    with pytest.raises(DataError, match=message):
        read(code)
