"""The walks of docs/architecture.md: how many files a value passes, and that each calls the next one."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
MOST = 10  # files that a reader opens, one after the other

# The file that has the value, what it calls, the file that defines this, and how.
# A call that moves to a file in between fails here, and then the page lacks that file.
BETA = [
    ("flows/__main__.py", "load_pipeline(", "flows/declare/config.py", "def load_pipeline"),
    ("flows/declare/config.py", "typed(cls, recipe", "flows/declare/config.py", "def typed"),
    ("flows/__main__.py", "make_plan(", "flows/planning/plan.py", "def make_plan"),
    ("flows/planning/plan.py", ".recipe()", "tasks/method.py", "def recipe"),
    ("flows/__main__.py", "run_plan as execute", "flows/run.py", "def run_plan"),
    ("flows/run.py", "execute(run, plan.stage(stage))", "flows/stages/execute.py", "def execute"),
    ("flows/stages/execute.py", "run.processes.run", "flows/stages/launch.py", "def run"),
    ("flows/stages/launch.py", "job.method.run(", "tasks/method.py", "def run"),
    ("tasks/method.py", "train(self, {slot: each", "tasks/train/run.py", "def train"),
    ("tasks/method.py", "self.trainer(run)", "tasks/dpo.py", "def trainer"),
    ("tasks/dpo.py", '"beta": self.beta', "tasks/dpo.py", "class DPO"),
    ("tasks/dpo.py", "run.trl(", "tasks/train/run.py", "def trl"),
    ("flows/stages/execute.py", "entry.commit(", "lineage/store.py", "def commit"),
]


def walk(heading: str) -> list[str]:
    """The files that a section of the page numbers."""
    section = PAGE.split(heading, 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^\d+\. `([\w/]+\.py)`", section, re.MULTILINE)


WALKS = {"## `beta`: ": BETA}


@pytest.mark.parametrize("heading", WALKS)
def test_a_walk_passes_few_files_and_the_page_names_them(heading):
    named = walk(heading)
    assert sorted(named) == sorted({file for caller, _, called, _ in WALKS[heading] for file in (caller, called)})
    assert len(named) <= MOST


@pytest.mark.parametrize(
    ("caller", "call", "called", "definition"), [step for steps in WALKS.values() for step in steps]
)
def test_each_file_calls_the_next_one(caller, call, called, definition):
    assert call in (ROOT / caller).read_text(encoding="utf-8")
    assert re.search(rf"^ *{definition}\b", (ROOT / called).read_text(encoding="utf-8"), re.MULTILINE)
