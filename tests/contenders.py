"""Processes of two hosts that contend for the artifacts of one store: some are killed, some sleep through the expiry.

``python -m tests.contenders STORE NUMBER SEED`` starts them, harms them, and returns when all are over. What each did
is a line of ``<store>/log``: host, pid, artifact, word. The hosts differ in the name that the lease takes for theirs.
"""

import contextlib
import os
import random
import signal
import sys
import time
from pathlib import Path

from lineage import holder, lease
from lineage.digest import digest_files, digest_of
from lineage.errors import ArtifactError
from lineage.lease import Lease, acquire_or
from lineage.manifest import Manifest, Provenance
from lineage.store import Entry, Store

ARTIFACTS = ["a" * 64, "b" * 64, "c" * 64, "d" * 64]
SLEPT_ON = ARTIFACTS[:2]  # the first holder of these is suspended, until long after the expiry
STEPS = 8
KILLS = 12
_HEARTBEAT_SECONDS, _EXPIRY_SECONDS = 0.2, 2.0
_WAKE_SECONDS = 4.0


def log_lines(store: Path) -> list[tuple[str, int, str, str]]:
    """Host, pid, artifact and word of all that was done, in its order."""
    path = store / "log"
    words = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(host, int(pid), artifact, word) for host, pid, artifact, word in words]


def contend(store: Path, host: str, seed: int) -> None:
    """Makes every artifact that nobody else makes."""
    holder.host = lambda: host
    lease.HEARTBEAT_SECONDS, lease.EXPIRY_SECONDS = _HEARTBEAT_SECONDS, _EXPIRY_SECONDS
    for artifact in random.Random(seed).sample(ARTIFACTS, len(ARTIFACTS)):
        entry = Store(store).entry("model", artifact)
        held = Lease(entry.path)
        if acquire_or(held, entry.is_finished, lambda: None):
            with contextlib.suppress(ArtifactError), held.holding(lambda why: None):
                entry.fence()
                if not entry.is_finished():
                    _make(store, host, artifact, entry, held)


def _make(store: Path, host: str, artifact: str, entry: Entry, held: Lease) -> None:
    def log(word: str) -> None:
        with (store / "log").open("a") as file:
            file.write(f"{host} {os.getpid()} {artifact} {word}\n")

    log("begin")
    entry.begin()
    for step in range(STEPS):
        time.sleep(0.03)
        if step == 3 and artifact in SLEPT_ON and (artifact, "sleep") not in {line[2:] for line in log_lines(store)}:
            log("sleep")
            os.kill(os.getpid(), signal.SIGSTOP)
        held.require()  # as each report of a stage does
        log("step")
        (entry.output / f"part-{step}").write_text(held.token)
    entry.commit(_manifest(artifact, entry), held)
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
    """Kills one every now and then, mostly one that holds something, wakes the sleepers, and reaps all."""
    kills, asleep = 0, dict[int, float]()
    slept: set[int] = set()
    while pids:
        time.sleep(0.1)
        lines = log_lines(store)
        for _, pid, _, word in lines:
            if word == "sleep" and pid not in slept:
                slept.add(pid)
                asleep[pid] = time.monotonic() + _WAKE_SECONDS
        for pid in [each for each, wakes in asleep.items() if wakes < time.monotonic()]:
            os.kill(pid, signal.SIGCONT)
            del asleep[pid]
        holders = [pid for _, pid, _, word in lines[-4:] if word == "step" and pid in pids]
        victims = [pid for pid in (holders if draws.random() < 0.7 else sorted(pids)) if pid not in asleep]
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
            contend(store, f"host-{index % 2}", seed + index)
            os._exit(0)
        pids.add(pid)
    harm(store, pids, random.Random(seed))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
