"""Rows of a Python function: pinned to its code, which is read and not run."""

import sys

import pytest

from lineage.artifact import Source
from lineage.digest import DigestCache
from lineage.errors import ConfigError
from lineage.sources import pin as pin_with

CODE = "raise RuntimeError('it ran')\ndef rows():\n    yield {'text': 'one'}\ndef others(): ...\n"


def pin(path: str, tmp_path, **fields):
    return pin_with("rows", Source(path=path, **fields), DigestCache(tmp_path / "digests.json"))


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package ``mine`` with a function ``mine.rows.rows`` that reads a constant of ``mine.words``."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "rows.py").write_text("from mine import words\n" + CODE)
    (folder / "words.py").write_text("WORDS = 1\n")
    (folder / "apart.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def test_a_function_is_pinned_to_its_code_and_what_that_imports(package, tmp_path):
    before = pin("python:mine.rows.rows", tmp_path)
    (package / "apart.py").write_text("unrelated = 1\n")
    assert pin("python:mine.rows.rows", tmp_path).fingerprint == before.fingerprint
    (package / "words.py").write_text("WORDS = 2\n")
    imported = pin("python:mine.rows.rows", tmp_path)
    (package / "rows.py").write_text("from mine import words\n" + CODE.replace("one", "two"))
    assert len({before.fingerprint, imported.fingerprint, pin("python:mine.rows.rows", tmp_path).fingerprint}) == 3
    assert before.record.revision == before.source.revision
    assert "mine" not in sys.modules  # and CODE, once run, would have raised


def test_another_function_of_the_same_file_is_another_source(package, tmp_path):
    one, other = (pin(f"python:mine.rows.{name}", tmp_path) for name in ("rows", "others"))
    assert one.fingerprint != other.fingerprint


def test_a_file_is_pinned_to_its_bytes_wherever_it_lies(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text(CODE)
    one, moved = (pin(f"python:{name}:rows", tmp_path, allow_code=True) for name in ("a.py", "b.py"))
    assert one.fingerprint == moved.fingerprint
    assert one.source.path == f"python:{tmp_path}/a.py:rows"
    (tmp_path / "a.py").write_text(CODE.replace("one", "two"))
    assert pin("python:a.py:rows", tmp_path, allow_code=True).fingerprint != one.fingerprint


def test_a_file_runs_only_where_it_is_allowed(tmp_path):
    (tmp_path / "a.py").write_text(CODE)
    with pytest.raises(ConfigError, match=r"come from running that file; state sources.rows.allow_code=true"):
        pin(f"python:{tmp_path}/a.py:rows", tmp_path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("python:", "names no function; accepted: python:PACKAGE.MODULE.FUNCTION"),
        ("python:rows", "names no function"),
        ("python:mine.rows.", "names no function"),
        ("python:mine..rows", "names no function"),
        ("python:rows.txt:rows", "names no function"),
        ("python:none.rows", "no Python source of a module none"),
        ("python:mine.none.rows", "no Python source of a module mine.none"),
        ("python:sys.exit", "no Python source of a module sys"),
        ("python:math.sqrt", "no Python source of a module math"),
        ("python:none.py:rows", "none.py: no such file"),
        ("python:mine.rows.row", r"rows.py defines no row; functions in it: others, rows"),
        ("python:mine.cut.rows", r"cut.py:1: not Python: .*; mend the line"),
    ],
)
def test_what_is_no_function_is_named_when_the_plan_is_made(path, message, package, tmp_path):
    (package / "cut.py").write_text("def rows(:\n")
    with pytest.raises(ConfigError, match=f"sources.rows: .*{message}"):
        pin(path, tmp_path, allow_code=True)


def test_a_function_has_no_splits_but_slices(package, tmp_path):
    with pytest.raises(ConfigError, match=r"sources.rows.split=test: a function has no splits"):
        pin("python:mine.rows.rows", tmp_path, split="test")
    whole, part = (pin("python:mine.rows.rows", tmp_path, split=split) for split in ("train", "train[:5]"))
    assert whole.fingerprint != part.fingerprint
