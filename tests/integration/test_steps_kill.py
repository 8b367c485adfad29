"""The server is killed with -9 while many clients sample and one trains: nothing is lost, and nothing is run twice."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from flows.steps.records import Records
from posttrain.steps import Client, Row
from tests import training

NUM_CLIENTS, NUM_CALLS, NUM_STEPS = 32, int(os.environ.get("STEPS_CALLS", "320")), 12
LONGEST = max(300, NUM_CALLS // 10)  # seconds
SETTINGS = {"learning_rate": 1e-2, "max_length": 64}


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str | None]:
    """A URL for ``--database``; None: the server's own."""
    if request.param == "sqlite":
        yield None
        return
    pytest.importorskip("psycopg")
    programs = next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)), None)
    if programs is None:
        pytest.skip("PostgreSQL is not installed")
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    user = "postgres" if os.getuid() == 0 else None  # it does not run as root
    if user:
        shutil.chown(folder, user)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = f"-c listen_addresses=127.0.0.1 -c unix_socket_directories='' -p {port}"
    own = {"check": True, "cwd": folder, "user": user, "stdout": subprocess.DEVNULL, "timeout": 60}
    initdb = [programs / "initdb", "-D", folder / "data", "-A", "trust", "-U", "steps", "--no-sync"]
    subprocess.run(initdb, **own)  # type: ignore[call-overload]
    control = [programs / "pg_ctl", "-D", folder / "data", "-w", "-l", folder / "log"]
    subprocess.run([*control, "-o", options, "start"], **own)  # type: ignore[call-overload]
    try:
        yield f"postgresql+psycopg://steps@127.0.0.1:{port}/postgres"
    finally:
        subprocess.run([*control, "-m", "immediate", "stop"], **own)  # type: ignore[call-overload]
        shutil.rmtree(folder)


@contextmanager
def serving(root: Path, port: int, database: str | None) -> Iterator[subprocess.Popen[bytes]]:
    """The command, until it is killed or the block ends."""
    more = ["--database", database] if database else []
    process = subprocess.Popen(
        [sys.executable, "-m", "flows", "steps", "serve", "--root", str(root), "--port", str(port), *more],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        for _ in range(3000):
            try:
                httpx.get(f"http://127.0.0.1:{port}/openapi.json")
                break
            except httpx.TransportError:
                assert process.poll() is None, "the server ended"
                time.sleep(0.02)
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(60)


@pytest.mark.slow
@pytest.mark.timeout(3 * LONGEST)
def test_a_killed_server_loses_no_result_and_runs_none_twice(tmp_path: Path, database: str | None) -> None:
    training.write_models(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, root = f"http://127.0.0.1:{port}", tmp_path / "steps"
    done, kill = Counter[str](), threading.Event()

    def sample(number: int, key: str, name: str) -> list[object]:
        session, found = Client(url, key).resume(name), []
        for each in range(number, NUM_CALLS, NUM_CLIENTS):
            found.append(session.call("generate", prompts=[[5, each % 250]], max_tokens=2, seed=each)["completions"])
            done["calls"] += 1
            if done["calls"] > NUM_CALLS // 2:
                kill.set()
        return found

    def train(key: str, name: str) -> list[object]:
        session, found = Client(url, key).resume(name), list[object]()
        for each in range(NUM_STEPS):
            row = Row(tokens=[5, 6, each], target_tokens=[6, each, 7], weights=[1.0] * 3)
            found += [session.call("backward", data=[row]), session.call("step")]
            if each < NUM_STEPS // 2:
                continue
            kill.wait(LONGEST)
        return found

    with serving(root, port, database) as process:
        key = (root / "key").read_text()
        assert (root / "key").stat().st_mode & 0o077 == 0
        client = Client(url, key)
        frozen, trained, other = (client.session(str(tmp_path / "policy"), **SETTINGS).name for _ in range(3))
        with ThreadPoolExecutor(NUM_CLIENTS + 1) as pool:
            results = [pool.submit(sample, number, key, frozen) for number in range(NUM_CLIENTS)]
            steps = pool.submit(train, key, trained)
            assert kill.wait(LONGEST)
            process.kill()
            process.wait()
            with serving(root, port, database):
                answers = [each.result(LONGEST) for each in results]
                taken = steps.result(LONGEST)
                kill.set()
                expected = train(key, other)
                digests = [client.resume(name).call("save", to="end")["weights"] for name in (trained, other)]
    assert taken == expected and digests[0] == digests[1]
    assert sum(map(len, answers)) == NUM_CALLS
    records = Records(root, database)
    calls = records.calls(frozen)
    assert Counter(each["name"] for each in calls) == {"create": 1, "generate": NUM_CALLS}
    assert {each["state"] for each in records.calls()} == {"done"}
    counted = Counter(each["request"] for each in records.audited() if each["request"])
    assert set(counted.values()) == {1} and len(counted) == len(records.calls())
    again = {each["id"]: each["number"] for each in records.calls()}
    assert len(set(again.values())) == len(again)
