"""`make chaos` in small: what is killed at a random moment is judged by what came of it."""

import os
import shutil
import subprocess
import sys

from tests.command import REPOSITORY

SEED = 16556  # kills the driver in its trainings, and asks the next one to end


def test_a_pipeline_that_is_killed_twice_is_that_of_an_unbroken_run(tmp_path, prefect_database):
    shutil.copytree(prefect_database, tmp_path / "prefect")
    url = f"sqlite+aiosqlite:///{tmp_path}/prefect/prefect.db"
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--toy", "--kills", "2", "--seed", str(SEED)],
        cwd=REPOSITORY, env={**os.environ, "PREFECT_API_DATABASE_CONNECTION_URL": url}, capture_output=True, text=True,
        timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    [report] = [line for line in done.stdout.splitlines() if ": kills 2  survived 2  trainings hit " in line]
    assert "leaked processes 0" in report
