"""Rows by the hundred thousand: prepared by processes as by one, and in memory that does not grow with them."""

import hashlib
import json
import random
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.prepare_data import PrepareConversations
from tests.prepared import Fields, prepare

pytestmark = pytest.mark.integration

WORDS = [f"word{number}" for number in range(3000)]
MAX_OF_LONG_ROWS = 1500  # megabytes: of rows of one each
MAX_MEGABYTES = 800  # twice what an interpreter with its libraries takes; the rows as Python objects take as much again

PREPARE = """
import sys
from pathlib import Path
from lineage.artifact import Kind, Source
from tasks.context import Resources, TrainContext
from tasks.method import Input
from tasks.prepare_data import PrepareConversations

directory = Path(sys.argv[1])
source = Source(path=str(directory / "rows.jsonl"), shuffle_seed=1)
rows = Input(name="rows", kind=Kind.ROWS, fingerprint="", path=directory, source=source)
context = TrainContext(output_dir=directory / "out", work_dir=directory, resources=Resources(cpus_per_worker=1))
PrepareConversations().run({"rows": rows}, context)
# Not `ru_maxrss`: that begins with what the process held that started this one.
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(int(status["VmHWM"].split()[0]) // 1024)
"""


def conversation(draw: random.Random) -> Fields:
    turns = [" ".join(draw.choices(WORDS, k=16)) for _ in range(8)]
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[turn % 2], "content": text} for turn, text in enumerate(turns)]}


def digests(directory: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in directory.iterdir()}


@pytest.mark.slow  # test_ordered_pool.py has the quick ones
def test_processes_write_the_bytes_that_one_process_writes(tmp_path: Path) -> None:
    draw = random.Random(0)
    rows = [conversation(draw) for _ in range(12_000)]
    rows[::1000] = [{"messages": []}] * 12
    method = PrepareConversations(max_bad_rows=12)
    prepare(tmp_path, method, rows, "alone", cpus=1)
    seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    prepare(tmp_path, method, rows, "together", cpus=2)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime > seconds  # other processes have worked
    assert digests(tmp_path / "alone") == digests(tmp_path / "together")


@pytest.mark.slow
def test_memory_does_not_hold_the_rows(tmp_path: Path) -> None:
    draw = random.Random(0)
    with (tmp_path / "rows.jsonl").open("w") as file:
        for _ in range(100_000):
            file.write(json.dumps(conversation(draw)) + "\n")
    assert peak_megabytes(tmp_path) < MAX_MEGABYTES


@pytest.mark.slow
def test_memory_does_not_hold_many_rows_of_a_megabyte(tmp_path: Path) -> None:
    draw = random.Random(0)
    with (tmp_path / "rows.jsonl").open("w") as file:
        for _ in range(100):
            turns = [
                {"role": role, "content": " ".join(draw.choices(WORDS, k=65_000))} for role in ("user", "assistant")
            ]
            file.write(json.dumps({"messages": turns}) + "\n")
    assert peak_megabytes(tmp_path) < MAX_OF_LONG_ROWS


def peak_megabytes(directory: Path) -> int:
    """Of a process that prepares the rows there."""
    done = subprocess.run([sys.executable, "-c", PREPARE, str(directory)], capture_output=True, text=True, check=True)
    return int(done.stdout)
