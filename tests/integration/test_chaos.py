"""A pipeline that is interrupted again and again ends as one that was not: outputs, record, MLflow, processes.

Here at stated events; ``make chaos`` interrupts at moments of the clock.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys

import pytest

from tests.chaos.events import EVENTS, INTERRUPTED
from tests.chaos.record import digests, doubled, made_again, misrecorded, starts, untidy
from tests.command import CONF, REPOSITORY, TOY
from tests.marked import MARK, left

# Two trainings side by side, of which one saves: long enough to be met under way, short enough for every commit.
STEPS = ("stages.left.method.num_steps=12", "stages.left.method.step_seconds=0.05", "resources.save_steps=3")
CODES = {signal.SIGKILL: {-signal.SIGKILL}, signal.SIGINT: {130}}


@pytest.mark.slow
@pytest.mark.parametrize(
    "signals", [(signal.SIGKILL, signal.SIGINT), pytest.param((signal.SIGINT, signal.SIGKILL), marks=pytest.mark.slow)]
)
def test_a_pipeline_interrupted_at_every_event_is_that_of_an_unbroken_run(tmp_path, prefect_url, signals):
    def command(folder, *leading):
        cli_args = ("run", "--config-dir", str(CONF), "tracking.dvc=false", *TOY, *STEPS)
        return subprocess.run(
            [sys.executable, *leading, *cli_args], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=300, env={**os.environ, "PYTHONPATH": str(REPOSITORY), MARK: mark, "PREFECT_API_URL": prefect_url},
        )  # fmt: skip

    def fresh(name):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "rows.txt").write_text("rows")
        return folder

    def finish(folder, finished):
        store = folder / "artifacts"
        done = command(folder, "-m", "flows")
        assert done.returncode == 0, done.stdout + done.stderr
        assert digests(store) == digests(tmp_path / "unbroken" / "artifacts")
        assert [*doubled(store), *untidy(store), *misrecorded(folder), *made_again(finished, store)] == []

    mark = secrets.token_hex(8)
    assert command(fresh("unbroken"), "-m", "flows").returncode == 0
    folder, finished = fresh("interrupted"), {}
    for place, event in enumerate(EVENTS):
        number = signals[place % 2]
        done = command(folder, "-m", "tests.chaos.events", event, number.name)
        if INTERRUPTED not in done.stderr:  # too little was left to do for this event
            assert done.returncode == 0, done.stdout + done.stderr
            finish(folder, finished)
            folder, finished = fresh(f"interrupted-{place}"), {}
            done = command(folder, "-m", "tests.chaos.events", event, number.name)
        assert done.returncode in CODES[number], f"{event}: {done.returncode}\n{done.stdout}{done.stderr}"
        assert not made_again(finished, folder / "artifacts")
        finished = starts(folder / "artifacts") if (folder / "artifacts").exists() else {}
    finish(folder, finished)
    assert not left(mark)


@pytest.mark.nightly
def test_a_pipeline_that_is_killed_at_random_moments_is_that_of_an_unbroken_run(tmp_path, prefect_database):
    shutil.copytree(prefect_database, tmp_path / "prefect")
    url = f"sqlite+aiosqlite:///{tmp_path}/prefect/prefect.db"
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--toy", "--kills", "2"],
        cwd=REPOSITORY, env={**os.environ, "PREFECT_API_DATABASE_CONNECTION_URL": url}, capture_output=True, text=True,
        timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    [report] = [line for line in done.stdout.splitlines() if ": kills 2  survived 2  trainings hit " in line]
    assert "leaked processes 0" in report
