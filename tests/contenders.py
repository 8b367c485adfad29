"""Processes that contend for the artifacts of one store: some are killed, some are suspended for a while.

``python -m tests.contenders STORE NUMBER SEED`` starts them, harms them, and returns when all are over. What each did
is a line of ``<store>/log``: pid, artifact, word.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

from lineage.digest import digest_files, digest_of
from lineage.lock import Lock, acquire_or
from lineage.manifest import Manifest, Provenance
from lineage.store import Entry, Store

ARTIFACTS = ["a" * 64, "b" * 64, "c" * 64, "d" * 64]
SLEPT_ON = ARTIFACTS[:2]  # the first owner of these is suspended, and keeps its lock
STEPS = 8
KILLS = 12
_WAKE_SECONDS = 1.0


def log_lines(store: Path) -> list[tuple[int, str, str]]:
    """Pid, artifact and word of all that was done, in its order."""
    path = store / "log"
    words = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(int(pid), artifact, word) for pid, artifact, word in words]


def contend(store: Path, seed: int) -> None:
    """Makes every artifact that no other process makes."""
    for artifact in random.Random(seed).sample(ARTIFACTS, len(ARTIFACTS)):
        entry = Store(store).entry("model", artifact)
        lock = Lock(entry.path)
        if acquire_or(lock, entry.is_finished, lambda: None):
            with lock.holding():
                entry.fence()
                if not entry.is_finished():
                    _make(store, artifact, entry, lock)


def _make(store: Path, artifact: str, entry: Entry, lock: Lock) -> None:
    def log(word: str) -> None:
        with (store / "log").open("a") as file:
            file.write(f"{os.getpid()} {artifact} {word}\n")

    log("begin")
    entry.begin()
    for step in range(STEPS):
        time.sleep(0.03)
        if step == 3 and artifact in SLEPT_ON and (artifact, "sleep") not in {line[1:] for line in log_lines(store)}:
            log("sleep")
            os.kill(os.getpid(), signal.SIGSTOP)
        lock.require()  # as each report of a stage does
        log("step")
        (entry.output / f"part-{step}").write_text(lock.token)
    entry.commit(_manifest(artifact, entry), lock)
    log("commit")


def _manifest(artifact: str, entry: Entry) -> Manifest:
    files = digest_files(entry.output)
    ran = Provenance(
        start=0.0, end=1.0, hosts=[], python="", libraries={}, git_commit=None, git_dirty=None, code_digest="", seed=0,
        resources={},
    )  # fmt: skip
    return Manifest(
        pipeline="p", stage="model", method="m", recipe={}, fingerprint=artifact, inputs={}, files=files,
        output_digest=digest_of(files), metrics={}, provenance=ran,
    )  # fmt: skip


def harm(store: Path, pids: set[int], draws: random.Random) -> None:
    """Kills one every now and then, mostly one that owns a lock, wakes the sleepers, and reaps all."""
    kills, asleep = 0, dict[int, float]()
    slept: set[int] = set()
    while pids:
        time.sleep(0.1)
        lines = log_lines(store)
        for pid, _, word in lines:
            if word == "sleep" and pid not in slept:
                slept.add(pid)
                asleep[pid] = time.monotonic() + _WAKE_SECONDS
        for pid in [each for each, wakes in asleep.items() if wakes < time.monotonic()]:
            os.kill(pid, signal.SIGCONT)
            del asleep[pid]
        owners = [pid for pid, _, word in lines[-4:] if word == "step" and pid in pids]
        victims = [pid for pid in (owners if draws.random() < 0.7 else sorted(pids)) if pid not in asleep]
        if victims and kills < KILLS:
            os.kill(draws.choice(victims), signal.SIGKILL)
            kills += 1
        for pid in list(pids):
            if os.waitpid(pid, os.WNOHANG)[0]:
                pids.remove(pid)


def main(store: Path, number: int, seed: int) -> None:
    """Starts them all at once."""
    pids = set()
    for index in range(number):
        pid = os.fork()
        if not pid:
            contend(store, seed + index)
            os._exit(0)
        pids.add(pid)
    harm(store, pids, random.Random(seed))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
