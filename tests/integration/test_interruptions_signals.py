"""What interrupts a run from without: it saves if it is asked to, leaves nothing, and goes on to the same bits.

On a Ray cluster of its own too: there a worker, the head, and the driver are killed. A file holds the training in one
step until it is interrupted, so that no test hurries, and none waits.
"""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from socket import gethostname

import psutil
import pytest

from lineage.record.attempts import attempts
from tests.chaos.record import digests
from tests.command import Command, family, wait_until
from tests.marked import MARK, left
from tests.toy_interrupted import HOLD_FILE, TROUBLE_FILE, ToyInterrupted, unbroken

STEPS, HELD = 8, 5
WORDS = ("pipeline=toy-interrupted", "model=none", "sources.rows.path=rows.txt")
TWO = ("stages.train.resources.num_workers=2", "stages.train.resources.micro_batch_size=4")
SLOW = pytest.mark.slow
UNSAVED = ("stages.train.resources.save_steps=1000",)  # but when it is asked to


class Started:
    """A run under way, as leader of a process group and session of its own."""

    def __init__(self, toy: Command, *overrides: str, command: Sequence[str] = ("run",)) -> None:
        self.toy, self.overrides = toy, overrides
        self.mark = secrets.token_hex(8)
        self.stderr = toy.folder / "stderr.txt"
        self.hold = toy.folder / "artifacts" / HOLD_FILE
        self.hold.write_text(str(HELD))
        with self.stderr.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "flows", *command, *toy.cli_args("run"), *overrides],
                cwd=toy.folder, env={**toy.environment, MARK: self.mark}, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True,
            )  # fmt: skip
        wait_until(lambda: self.steps() == HELD - 1 or self.process.poll() is not None, "it steps", 180)

    @property
    def family(self) -> list[psutil.Process]:
        return family(self.process)

    @property
    def directory(self) -> Path:
        [found] = (self.toy.folder / "artifacts" / "train").iterdir()
        return found

    def steps(self) -> int:
        return sum(1 for file in self.toy.folder.glob("artifacts/train/*/metrics.jsonl") for _ in file.open())

    def stage(self) -> psutil.Process:
        log = str(self.directory / "logs" / "stage.log")
        [found] = [
            each for each in self.family
            if each.name().startswith("python") and log in [file.path for file in each.open_files()]
            and os.getsid(each.pid) == each.pid
        ]  # fmt: skip
        return found

    def named(self, word: str) -> list[psutil.Process]:
        return [each for each in self.family if word in each.name()]

    def wait(self) -> int:
        code = self.process.wait(180)
        assert not left(self.mark)
        return code

    def resumed_at(self) -> list[int]:
        """Runs it to its end if it has not come there, and checks that it is what an unbroken run makes."""
        self.hold.unlink(missing_ok=True)
        if self.toy.states(*self.overrides)["train"] != "reuse":
            self.toy.run(*self.overrides)
        assert digests(self.toy.folder / "artifacts")["train"] == unbroken(ToyInterrupted(num_steps=STEPS))
        steps = [json.loads(line)["step"] for line in (self.directory / "metrics.jsonl").read_text().splitlines()]
        assert steps == list(range(1, STEPS + 1))
        found = json.loads((self.directory / "manifest.json").read_text())["provenance"]["resumed_at"]
        assert isinstance(found, list)
        return found


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose store has the rows."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "rows.txt").write_text("rows")
    toy = Command(folder, *WORDS)
    assert toy("stage", "data", *toy.cli_args("run")).returncode == 0
    return folder


@pytest.fixture
def toy(tmp_path: Path, prepared: Path, prefect_url: str) -> Command:
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    return Command(tmp_path, *WORDS, environment={"PREFECT_API_URL": prefect_url})


def to_driver(number: signal.Signals) -> Callable[[Started], None]:
    return lambda run: run.process.send_signal(number)


def to_group(number: signal.Signals) -> Callable[[Started], None]:
    return lambda run: os.killpg(run.process.pid, number)


def to_all(run: Started) -> None:
    """As a machine that goes down, and systemd, send it."""
    for each in run.family:
        each.terminate()


def kill_head(run: Started) -> None:
    for each in run.named("gcs_server") + run.named("raylet"):
        each.kill()


@pytest.mark.parametrize(
    ("interrupt", "by", "command"),
    [
        pytest.param(to_group(signal.SIGINT), "SIGINT", ["run"], id="ctrl-c"),
        pytest.param(to_driver(signal.SIGTERM), "SIGTERM", ["run"], id="term"),
        pytest.param(to_driver(signal.SIGHUP), "SIGHUP", ["run"], id="hang-up", marks=SLOW),
        pytest.param(to_all, "SIGTERM", ["run"], id="term-all", marks=SLOW),
        pytest.param(to_driver(signal.SIGTERM), "SIGTERM", ["stage", "train"], id="one stage", marks=SLOW),
    ],
)
def test_a_run_that_is_asked_to_end_saves_once_and_ends_with_130(toy, interrupt, by, command):
    run = Started(toy, *UNSAVED, command=command)
    interrupt(run)
    assert run.wait() == 130
    [saved] = (run.directory / "checkpoints").iterdir()
    step = int(saved.name.removeprefix("step-"))
    message = run.stderr.read_text()
    stopped = f"posttrain: stopped by {by} on {gethostname()}: train saved at step {step}; run the same command again"
    assert [line.startswith(stopped) for line in message.splitlines() if "stopped" in line] == [True]
    assert "FAILED" not in message and "Traceback" not in message and "it resumes" not in message
    assert toy.states(*UNSAVED)["train"] == "resume"
    assert run.resumed_at() == [step]


@pytest.mark.parametrize(
    "kill",
    [
        pytest.param(to_driver(signal.SIGKILL), id="driver"),
        pytest.param(to_group(signal.SIGKILL), id="group", marks=SLOW),
    ],
)
def test_a_run_that_is_killed_leaves_nothing_and_resumes_from_its_checkpoint(toy, kill):
    run = Started(toy)
    kill(run)
    assert run.wait() == -signal.SIGKILL
    assert toy.states()["train"] == "resume"
    assert run.resumed_at()[0] >= 2
    assert f"its driver on {gethostname()} was killed at step " in attempts(run.directory)[-1].cause


@SLOW
def test_a_stage_that_alone_is_asked_to_end_saves_and_resumes_by_itself(toy):
    run = Started(toy, *UNSAVED)
    run.stage().terminate()
    assert run.wait() == 0
    assert "was asked to end by SIGTERM, and saved: stopped at step" in run.stderr.read_text()
    assert len(run.resumed_at()) == 1


@SLOW  # tests/unit/flows/stages/test_launch.py: a second Ctrl-C is heeded at once
def test_who_asks_twice_does_not_wait_for_a_save(toy):
    run = Started(toy, *UNSAVED)
    run.stage().suspend()  # it cannot save
    run.process.send_signal(signal.SIGINT)
    wait_until(lambda: (run.directory / "work" / "stop").exists(), "it is asked")
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGINT)
    run.process.wait(15)  # less than a stage is given to save
    assert run.wait() == 130


@SLOW  # a stage is given 20 s to save
def test_a_step_that_outlasts_a_stop_is_lost_and_the_run_ends_all_the_same(toy):
    trouble = toy.folder / "artifacts" / TROUBLE_FILE
    trouble.write_text("hang:6:0")  # a step without end, after the checkpoint of step 4
    run = Started(toy)
    run.hold.unlink()
    wait_until(lambda: not trouble.exists(), "it is in that step")
    run.process.terminate()
    run.process.wait(40)  # of which 30 are for a run, and the rest for a machine that is busy
    assert run.wait() == 130
    assert sorted(path.name for path in (run.directory / "checkpoints").iterdir()) == ["step-2", "step-4"]
    assert "Traceback" not in run.stderr.read_text()


@pytest.mark.parametrize(
    ("kill", "cause"),
    [
        pytest.param(lambda run: run.named("RayTrainWorker")[-1].kill(), " died at step ", id="worker", marks=SLOW),
        pytest.param(kill_head, "its Ray cluster on ", id="head", marks=SLOW),
        pytest.param(lambda run: run.stage().kill(), "the process that leads its workers, on ", id="stage", marks=SLOW),
        pytest.param(lambda run: run.named("RayTrainWorker")[-1].suspend(), " hangs at step ", id="hang", marks=SLOW),
    ],
)
def test_on_a_cluster_what_is_killed_is_replaced(toy, kill, cause):
    run = Started(toy, *TWO, "resources.hang_minutes=0.2")
    kill(run)
    run.hold.unlink()
    assert run.wait() == 0
    [line] = [line for line in run.stderr.read_text().splitlines() if "it resumes from its checkpoint of step" in line]
    assert line.startswith("stage train failed: ") and cause in line
    assert len(run.resumed_at()) == 1


@SLOW
def test_on_a_cluster_a_wait_for_a_worker_that_hangs_ends_after_timeout_minutes(toy):
    (toy.folder / "artifacts" / TROUBLE_FILE).write_text("hang:5:1")
    result = toy("run", *TWO, "resources.timeout_minutes=0.1")
    assert result.returncode == 0, result.stderr
    [line] = [line for line in result.stderr.splitlines() if line.startswith("stage train failed: ")]
    found = f"rank 1 on {gethostname()} hangs at step 4, between steps: rank 0 waited 0.1 minutes for it "
    assert f"{found}(resources.timeout_minutes) (log: " in line
    assert line.endswith("; it resumes from its checkpoint of step 4")


@SLOW
def test_on_a_cluster_a_wrong_row_ends_all_workers_and_a_killed_driver_leaves_none(toy):
    trouble = toy.folder / "artifacts" / TROUBLE_FILE
    trouble.write_text("row:5:1")
    result = toy("run", *TWO)
    assert result.returncode == 2
    assert "posttrain: stage train failed: rank 1 on " in result.stderr
    assert " at step 4: rows.txt line 7: the answer is empty; delete the row (log: " in result.stderr
    assert "Traceback" not in result.stderr and "it resumes" not in result.stderr
    run = Started(toy, *TWO)  # the steps that it sees may be those of the run before
    wait_until(lambda: {"gcs_server", "raylet"} <= {each.name() for each in run.family}, "Ray starts")
    run.process.kill()
    run.wait()
    assert toy.states(*TWO)["train"] == "resume"
