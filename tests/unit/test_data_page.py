"""docs/data.md: every format has a row there that is of it."""

import json
import re
from pathlib import Path

import pytest

from lineage.artifact import Kind
from tasks.data.formats.detect import detect
from tasks.data.formats.known import FORMATS

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
ROW = re.compile(r"^\| `(\w+)` \| `(\{.*\})` \| (\w+)", re.MULTILINE)
ROWS = ROW.findall(PAGE.read_text(encoding="utf-8"))


def test_every_format_is_on_the_page():
    assert [name for name, _, _ in ROWS] == [each.name for each in FORMATS]


@pytest.mark.parametrize(("name", "row", "kind"), ROWS, ids=[name for name, _, _ in ROWS])
def test_a_row_of_the_page_is_detected_as_what_it_says(name, row, kind):
    detected = detect([json.loads(row)], "the page")

    assert detected.name == name and detected.format.kind == Kind(kind)
    assert detected.convert(json.loads(row))
