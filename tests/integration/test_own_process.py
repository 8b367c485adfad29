"""What only a process of its own shows: what it imports, what its hash seed changes, that it ends with its parent."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from lineage.record.environment import run_answering
from tasks.quickstart import ROWS
from tasks.quickstart.documentation import documents
from tests.command import REPOSITORY

HEAVY = (
    "torch", "transformers", "trl", "ray", "prefect", "mlflow", "datasets", "pyarrow", "numpy", "optuna", "sqlalchemy",
)  # fmt: skip
MAIN = "from flows.__main__ import main; main({})"


@pytest.mark.parametrize(
    ("code", "banned"),
    [
        (MAIN.format(["plan", "store=/nonexistent"]), HEAVY),
        (MAIN.format(["status"]), (*HEAVY, "hydra", "pydantic")),
        ("import flows.sweep.run", ("optuna",)),
        ("from flows.declare.operation import is_cron; is_cron('@daily')", HEAVY),
    ],
    ids=["plan", "status", "sweep", "cron"],
)
def test_what_answers_at_once_imports_nothing_heavy(code: str, banned: tuple[str, ...], tmp_path: Path) -> None:
    shown = f"import sys; {code}; print('heavy:', sorted({set(banned)} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", shown], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "heavy: []"


DIGEST = """
import hashlib, json, sys
{before}
from lineage.record.environment import run_answering
from tasks.quickstart import ROWS
for name, rows in ROWS.items():
    print(name, hashlib.sha256("".join(json.dumps(row) for row in rows()).encode()).hexdigest())
"""


def digests(before: str, directory: Path, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", DIGEST.format(before=before)]
    return subprocess.Popen(
        command, cwd=directory, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True
    )


def test_rows_depend_on_neither_hash_seed_nor_directory_nor_environment_nor_what_is_imported(tmp_path: Path) -> None:
    plain = digests("", REPOSITORY, PYTHONHASHSEED="1")
    patched = "import os.path, email.mime.text, textwrap; os.listdir.__class__; textwrap.dedent.__doc__ = 'changed'"
    elsewhere = digests(patched, tmp_path, PYTHONHASHSEED="2", QUERY_STRING="secret", HOME=str(tmp_path), LC_ALL="C")
    found, other = (each.communicate(timeout=60)[0] for each in (plain, elsewhere))
    assert found == other
    assert [line.split()[0] for line in found.splitlines()] == list(ROWS)


def test_rows_do_not_depend_on_the_virtual_environment() -> None:
    file = sys.modules[documents.__module__].__file__
    interpreters = (sys.executable, sys._base_executable)  # type: ignore[attr-defined]
    found = [run_answering([path, "-I", "-S", str(file)]) for path in interpreters]
    assert found[0].stdout == found[1].stdout and [run.returncode for run in found] == [0, 0]
    assert len(found[0].stdout.splitlines()) > 1000


def test_processes_that_work_on_rows_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, signal\nfrom tests.integration.test_ordered_pool import slow_first\n"
        "from tasks.data import kinds as ordered_pool\n"
        "if __name__ == '__main__':\n"
        "    ordered_pool.INLINE_SECONDS = 0.0\n"
        "    results = ordered_pool.ordered_map(slow_first, iter(range(10**6)), 2)\n"
        "    print(next(results)[1], flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    worker = int(subprocess.run([sys.executable, script], stdout=subprocess.PIPE, check=False).stdout)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(worker).wait(timeout=60)
    assert not psutil.pid_exists(worker)
