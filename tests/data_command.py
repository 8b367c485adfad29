"""``posttrain data``, called in process on files that it is given."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from flows.__main__ import main

Call = Callable[..., tuple[int, str, str]]


def lines(rows: Sequence[object]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def texts(count: int) -> list[dict[str, str]]:
    return [{"text": f"row {place} says something of its own: {place * 7919}"} for place in range(count)]


def reported(output: str) -> list[str]:
    """The lines without the padding of columns."""
    return [re.sub(r"\s+", " ", line).strip() for line in output.splitlines()]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Writes files, calls the command beside them, and returns its exit code and both outputs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()

    def called(*overrides: str, **files: str) -> tuple[int, str, str]:
        for name, text in files.items():
            (tmp_path / name.replace("_", ".")).write_text(text)
        capsys.readouterr()  # what imports of libraries print
        code = main(["data", *overrides])
        assert not list((tmp_path / "scratch").iterdir())  # whatever came of it, nothing is left behind
        return code, *capsys.readouterr()

    return called
