"""What is left of a stage's process that was killed with all that would have ended it."""

import os
import subprocess
import sys

import psutil

from flows.progress.run_record import RUN_VARIABLE
from flows.stages.stage_process import end_left_session
from tests.command import wait_until

LEADER = """
import os, subprocess, sys, time
from pathlib import Path
from flows.stages.stage_process import note_session
note_session(Path(sys.argv[1]))
for run in ("this-run", "another"):
    environment = {**os.environ, "POSTTRAIN_RUN": run}
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], process_group=0, env=environment)
    print(left.pid, flush=True)
time.sleep(60)
"""


def leader(work):
    """A stage's process, and what it has started: of its run, and of another, as whoever has its number later."""
    process = subprocess.Popen(
        [sys.executable, "-c", LEADER, str(work)], start_new_session=True, stdout=subprocess.PIPE, text=True,
        env={**os.environ, RUN_VARIABLE: "this-run"},
    )  # fmt: skip
    return process, *(psutil.Process(int(process.stdout.readline())) for _ in range(2))


def gone(process):
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_what_a_killed_process_has_left_is_ended(tmp_path):
    process, left, other = leader(tmp_path)
    end_left_session(tmp_path)
    assert process.poll() is None  # a living one is let be, with all that is its own
    process.kill()
    wait_until(lambda: gone(psutil.Process(process.pid)), "it is a zombie, which lives no more", seconds=10)
    assert not gone(left)
    end_left_session(tmp_path)
    wait_until(lambda: gone(left), "what it left is ended", seconds=10)
    assert not gone(other)
    other.kill()
    process.wait()
