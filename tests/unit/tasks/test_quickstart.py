"""The quickstart's rows: the same everywhere, in equal parts, and with nothing held out that is in training."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from lineage.errors import ConfigError
from tasks.quickstart import ROWS, quickstart_rows
from tasks.quickstart.documentation import documents
from tasks.quickstart.instructions import usages
from tasks.quickstart.preferences import FAULTS

REPOSITORY = Path(__file__).parents[3]
DIGEST = """
import hashlib, json, sys
{before}
from tasks.quickstart import ROWS
for name, rows in ROWS.items():
    print(name, hashlib.sha256("".join(json.dumps(row) for row in rows()).encode()).hexdigest())
"""


def digests(before: str, directory: Path, **environment: str) -> str:
    command = [sys.executable, "-c", DIGEST.format(before=before)]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), **environment}
    return subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, check=True).stdout


def test_rows_depend_on_neither_hash_seed_nor_directory_nor_environment_nor_what_is_imported(tmp_path: Path) -> None:
    plain = digests("", REPOSITORY, PYTHONHASHSEED="1")
    patched = "import os.path, email.mime.text, textwrap; os.listdir.__class__; textwrap.dedent.__doc__ = 'changed'"
    elsewhere = digests(patched, tmp_path, PYTHONHASHSEED="2", QUERY_STRING="secret", HOME=str(tmp_path), LC_ALL="C")
    assert plain == elsewhere
    assert [line.split()[0] for line in plain.splitlines()] == list(ROWS)


def test_rows_name_no_address_and_no_path_of_this_machine() -> None:
    for name in ROWS:
        text = "".join(str(row) for row in quickstart_rows(name))
        assert " at 0x" not in text
        for place in (sys.base_prefix, sys.prefix, sys.executable):
            assert place not in text
        assert str(Path.home()) not in text


def test_there_are_thousands_of_rows_and_no_text_twice() -> None:
    rows = {name: [str({**row, "group": None}) for row in quickstart_rows(name)] for name in ROWS}
    assert all(len(found) >= 3000 for found in rows.values())
    assert all(len(set(found)) == len(found) for found in rows.values())
    assert len({document.text for document in documents()}) == len(documents())


def test_a_function_is_owned_by_one_module_whatever_it_is_imported_from() -> None:
    found = {document.name: document.group for document in documents()}
    assert found["os.path.join"] == found["os.listdir"] == "os"
    assert found["str.join"] == found["len"] == "builtins"
    assert not any(name.startswith(("posixpath.", "posix.", "ntpath.", "_")) for name in found)


def test_no_function_is_asked_or_told_about_in_the_rows_of_another_module() -> None:
    owner = {usage.name: usage.group for usage in usages()}
    answers = {usage.answer: usage.group for usage in usages()}
    for row in quickstart_rows("preferences"):
        assert all(answers.get(str(row[side]), row["group"]) == row["group"] for side in ("chosen", "rejected"))
        told = [str(row[side]).partition("(")[0].strip("`") for side in ("chosen", "rejected")]
        assert all(owner.get(name, row["group"]) == row["group"] for name in [*told, asked(str(row["prompt"]))])
    for row in quickstart_rows("instructions"):
        question = str(row["messages"][0]["content"])  # type: ignore[index]
        assert owner.get(asked(question), row["group"]) == row["group"]


def asked(question: str) -> str:
    """The first name in backticks."""
    return question.split("`")[1]


def test_the_kinds_of_preference_are_in_equal_parts() -> None:
    counts = Counter(str(row["kind"]) for row in quickstart_rows("preferences"))
    assert set(counts) == set(FAULTS)
    assert max(counts.values()) - min(counts.values()) <= 2


def test_a_rejected_answer_has_the_fault_that_it_is_named_after() -> None:
    for row in quickstart_rows("preferences"):
        chosen, rejected, kind = str(row["chosen"]), str(row["rejected"]), row["kind"]
        call, _, summary = rejected.partition("\n\n")
        right_call, _, right_summary = chosen.partition("\n\n")
        assert chosen != rejected
        if kind == "cut_off":
            assert chosen.startswith(rejected)
        elif kind == "scrambled":
            assert sorted(summary.split()) == sorted(right_summary.split())
        elif kind == "wrong_signature":
            assert summary == right_summary
            assert call != right_call
        elif kind == "another_function":
            assert call.partition("(")[0] != right_call.partition("(")[0]
        elif kind == "evasive":
            assert right_call not in rejected


def test_an_unknown_quickstart_source_is_refused() -> None:
    with pytest.raises(ConfigError, match="quickstart:poems is no quickstart source; give quickstart: and one of"):
        quickstart_rows("poems")


def test_rows_do_not_depend_on_the_virtual_environment() -> None:
    file = sys.modules[documents.__module__].__file__
    interpreters = (sys.executable, sys._base_executable)  # type: ignore[attr-defined]
    found = [
        subprocess.run([path, "-I", "-S", str(file)], capture_output=True, check=True).stdout for path in interpreters
    ]
    assert found[0] == found[1]
