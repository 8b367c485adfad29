"""Many that want one artifact: it is made by one at a time, committed once, and the others have it too."""

import json
import os
import random
import re
import signal
import subprocess
import sys

import pytest

from lineage.store import Entry, Store
from tests.command import CONF, TOY, wait_until
from tests.contenders import ARTIFACTS, SLEPT_ON, STEPS, log_lines
from tests.toy_methods import ToyTraining
from tests.unbroken import unbroken

pytestmark = pytest.mark.integration


def test_of_fifty_contenders_on_two_hosts_one_makes_each_artifact_whatever_befalls_them(tmp_path):
    seed = random.randrange(10**6)
    done = subprocess.run(
        [sys.executable, "-m", "tests.contenders", str(tmp_path), "50", str(seed)],
        capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    lines = log_lines(tmp_path)
    assert {artifact for _, _, artifact, word in lines if word == "sleep"} == set(SLEPT_ON)
    for artifact in ARTIFACTS:
        own = [(host, pid, word) for host, pid, each, word in lines if each == artifact]
        told = f"seed {seed}: {own}"
        begun = [index for index, (_, _, word) in enumerate(own) if word == "begin"]
        for start, end in zip(begun, [*begun[1:], len(own)], strict=True):  # nobody does anything after a successor
            assert len({pid for _, pid, _ in own[start:end]}) == 1, told
        assert [word for _, _, word in own].count("commit") <= 1, told  # none: killed between the commit and the line
        if artifact in SLEPT_ON:
            assert len(begun) > 1, told
        entry = Store(tmp_path).entry("model", artifact)
        manifest = entry.manifest()
        assert manifest, told
        assert len(manifest.files) == STEPS
        assert manifest.damage(entry.output) == []
        assert len({(entry.output / name).read_text() for name in manifest.files}) == 1, told
        left = {path.name for path in entry.path.iterdir() if not path.name.startswith("lock.")}  # of the killed
        assert left == {"logs", "manifest.json", "metrics.json", "output", "plots.json"}, told


# The command on a host of another name, whose silence is short, as a test has to wait for it.
_ELSEWHERE = """
import sys
from lineage import holder, lease
lease.EXPIRY_SECONDS, lease.HEARTBEAT_SECONDS = 3.0, 0.2
holder.host = lambda: {host!r}
from flows.__main__ import main
sys.exit(main())
"""


SLEPT_STEPS = 150


def start(toy, host, *words):
    arguments = [sys.executable, "-c", _ELSEWHERE.format(host=host), "run", "--config-dir", str(CONF), "tracking=none"]
    return subprocess.Popen(
        [*arguments, *TOY, *words], cwd=toy.folder, env=toy.environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_a_driver_that_slept_through_the_expiry_ends_and_its_stage_with_it(toy):
    # It still steps when the other takes over, and what it writes to is taken away under it.
    words = (
        f"stages.left.method.num_steps={SLEPT_STEPS}",
        "stages.left.method.step_seconds=0.1",
        "resources.save_steps=5",
    )
    toy.run("stages.left.method.num_steps=1")  # data and model
    [row] = [row for row in json.loads(toy("plan", "--json", *words).stdout)["stages"] if row["stage"] == "left"]
    directory = toy.folder / "artifacts" / "left" / row["fingerprint"][:16]
    sleeper = start(toy, "one", *words)
    wait_until(lambda: list(directory.glob("checkpoints/step-*")), "the first saves")
    sleeper.send_signal(signal.SIGSTOP)  # its stage goes on, and would write beside the other's
    winner = start(toy, "other", *words)
    _, errors = winner.communicate(timeout=120)
    assert winner.returncode == 0, errors
    sleeper.send_signal(signal.SIGCONT)
    _, errors = sleeper.communicate(timeout=120)
    assert sleeper.returncode == 1
    assert [line for line in errors.splitlines() if line.startswith("posttrain: ")] == [errors.splitlines()[-1]]
    assert re.match(r"posttrain: the lock .*left.*lock was lost to ", errors.splitlines()[-1]), errors
    assert "Traceback" not in errors, errors
    steps = [json.loads(line)["step"] for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, SLEPT_STEPS + 1))
    manifest = Entry(directory).manifest()
    assert manifest and manifest.output_digest == unbroken(ToyTraining(num_steps=SLEPT_STEPS))
    assert toy.states(*words)["left"] == "reuse"
    assert {"lock", "work", "checkpoints"}.isdisjoint(path.name for path in directory.iterdir())
