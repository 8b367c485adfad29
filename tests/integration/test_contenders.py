"""Many that want one artifact: it is made by one at a time, committed once, and the others have it too."""

import json
import os
import random
import signal
import socket
import subprocess
import sys

import pytest

from lineage.store import Entry, Store
from tests.command import wait_until
from tests.contenders import ARTIFACTS, SLEPT_ON, STEPS, log_lines
from tests.toy_methods import ToyTraining
from tests.unbroken import unbroken

pytestmark = pytest.mark.integration


def test_of_fifty_contenders_one_makes_each_artifact_whatever_befalls_them(tmp_path):
    seed = random.randrange(10**6)
    done = subprocess.run(
        [sys.executable, "-m", "tests.contenders", str(tmp_path), "50", str(seed)],
        capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    lines = log_lines(tmp_path)
    assert {artifact for _, artifact, word in lines if word == "sleep"} == set(SLEPT_ON)
    for artifact in ARTIFACTS:
        own = [(pid, word) for pid, each, word in lines if each == artifact]
        told = f"seed {seed}: {own}"
        begun = [index for index, (_, word) in enumerate(own) if word == "begin"]
        for start, end in zip(begun, [*begun[1:], len(own)], strict=True):  # nobody does anything after a successor
            assert len({pid for pid, _ in own[start:end]}) == 1, told
        assert [word for _, word in own].count("commit") <= 1, told  # none: killed between the commit and the line
        entry = Store(tmp_path).entry("model", artifact)
        manifest = entry.manifest()
        assert manifest, told
        assert len(manifest.files) == STEPS
        assert manifest.damage(entry.output) == []
        assert len({(entry.output / name).read_text() for name in manifest.files}) == 1, told
        left = {path.name for path in entry.path.iterdir()} - {"lock"}  # of one that was killed after its commit
        assert left == {"logs", "manifest.json", "metrics.json", "output", "plots.json"}, told


SLEPT_STEPS = 20


def test_a_suspended_driver_keeps_its_lock_and_who_waits_says_whose(toy):
    words = (f"stages.left.method.num_steps={SLEPT_STEPS}", "stages.left.method.step_seconds=0.1")
    toy.run("stages.left.method.num_steps=1")  # data and model
    [row] = [row for row in json.loads(toy("plan", "--json", *words).stdout)["stages"] if row["stage"] == "left"]
    directory = toy.folder / "artifacts" / "left" / row["fingerprint"][:16]
    sleeper = toy.start("run", *words)
    wait_until(lambda: (directory / "metrics.jsonl").exists(), "the first step")
    sleeper.send_signal(signal.SIGSTOP)
    waiter = toy.start("run", *words)
    whose = f"waits for another run that makes it (process {sleeper.pid} on {socket.gethostname()})"
    read = [waiter.stderr.readline()]
    while whose not in read[-1]:
        read.append(waiter.stderr.readline())
        assert read[-1], read
    sleeper.send_signal(signal.SIGCONT)
    for process in (sleeper, waiter):
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert "reused: another run made it" in errors
    steps = [json.loads(line)["step"] for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, SLEPT_STEPS + 1))
    manifest = Entry(directory).manifest()
    assert manifest and manifest.output_digest == unbroken(ToyTraining(num_steps=SLEPT_STEPS))
    assert toy.states(*words)["left"] == "reuse"
    assert {"lock", "work", "checkpoints"}.isdisjoint(path.name for path in directory.iterdir())
