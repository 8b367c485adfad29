"""docs/add_a_method.md, followed to the letter: its files written where it says, its commands run as they stand."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny, training

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "add_a_method.md"
FILE = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What makes it small: the page's own numbers are those of a real training.
SMALL = (
    "stages.alphapo.method.num_steps=12 stages.alphapo.method.global_batch_size=8 "
    "stages.alphapo.method.learning_rate=3e-3"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a reader who did what the page says."""
    root = tmp_path_factory.mktemp("reader")
    for name, text in FILE.findall(PAGE.read_text()):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    tiny.write_policy(root / "models" / "chat")
    pairs = [{key: row[key] for key in ("prompt", "chosen", "rejected")} for row in tiny.preference_rows(60)]
    (root / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return root


def shell(folder: Path, setup: str, command: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    here = f"export PYTHONPATH=$PYTHONPATH:{ROOT}"  # this checkout, whichever one is installed
    return subprocess.run(
        ["bash", "-ec", f"{setup}\n{here}\n{command}"],
        cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_the_page_needs_one_python_file_and_one_yaml() -> None:
    names = [name for name, _ in FILE.findall(PAGE.read_text())]
    assert names == ["our_methods/alphapo.py", "our_conf/stage/alphapo.yaml", "our_conf/pipeline/alphapo.yaml"]
    assert len(dict(FILE.findall(PAGE.read_text()))["our_methods/alphapo.py"].splitlines()) <= 30


def test_a_method_added_by_the_page_plans_trains_and_is_reused(
    folder: Path, prefect_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", prefect_url)
    setup, add, *rest = [line for block in SHELL.findall(PAGE.read_text()) for line in block.splitlines()]
    plan, run = rest
    added = shell(folder, setup, f"{add} --json")
    assert added.returncode == 0, added.stderr
    assert "alphapo" in [row["stage"] for row in json.loads(added.stdout)["stages"]]

    result = shell(folder, setup, f"{run} {SMALL} --json")
    assert result.returncode == 0, result.stderr
    stage = {row["stage"]: row for row in json.loads(result.stdout)["stages"]}["alphapo"]
    assert stage["metrics"]["steps"] == 12
    reports = [json.loads(line) for line in (Path(stage["output"]).parent / "metrics.jsonl").read_text().splitlines()]
    losses = [report["metrics"]["loss"] for report in reports]
    # Before the first step: the loss of the margin that the untrained model has.
    margin = reports[0]["metrics"]["rewards/margins"]
    assert losses[0] == pytest.approx(math.log(1 + math.exp(1.0 - margin)), rel=0.05)
    assert losses[-1] < losses[0]
    assert not training.same(training.weights(Path(stage["output"])), training.weights(folder / "models" / "chat"))

    again = shell(folder, setup, f"{plan} {SMALL} --json")
    assert [row["state"] for row in json.loads(again.stdout)["stages"]] == ["reuse", "reuse"]
