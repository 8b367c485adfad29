"""A store written in November 2026, with its MLflow database, sweep and promotion, is read by the code of today.

``tests/fixtures/store.tar.xz`` holds the default pipeline in miniature on rows of a user's own: trained, promoted,
swept over two values of ``beta``, and killed once at a checkpoint. ``args`` and ``plan.json`` in it are the overrides
and the plan of then. ``recipes.json`` holds the fingerprints of the methods' recipes of then. Neither file may change.
"""

import csv
import json
import sqlite3
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from flows.declare.config import load_pipeline
from lineage.fingerprint import fingerprint
from tasks.method import Adapter
from tests import training
from tests.command import REPOSITORY, Command

FIXTURES = REPOSITORY / "tests" / "fixtures"
DPO, OTHER_BETA = "ca8f67ca71a76108", "d792ebb1aa0e582c"
KILLED = (
    "stages.dpo.method.beta=0.3", "stages.dpo.method.num_steps=3000", "stages.dpo.resources.save_steps=20",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with tarfile.open(FIXTURES / "store.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


@pytest.fixture
def old(folder: Path) -> Command:
    return Command(folder, *(folder / "args").read_text().split(), tracked=True)


def test_every_stage_is_reused(old: Command, folder: Path) -> None:
    rows = json.loads(old("plan", "--json").stdout)["stages"]
    before = json.loads((folder / "plan.json").read_text())["stages"]
    assert [(row["stage"], row["fingerprint"], row["state"], row["inputs"]) for row in rows] == [
        (row["stage"], row["fingerprint"], "reuse", row["inputs"]) for row in before
    ]


def test_a_killed_stage_resumes_from_its_checkpoint(old: Command) -> None:
    assert old.states(*KILLED)["dpo"] == "resume"


def test_the_questions_are_answered(old: Command) -> None:
    lineage = json.loads(old("lineage", DPO, "--json").stdout)
    assert {"corpus", "instructions", "preferences", "base", "cpt", "sft", "dpo"} <= {
        node["name"] for node in lineage["nodes"]
    }
    assert ["champion"] in [node["aliases"] for node in lineage["nodes"] if node["name"] == "dpo"]
    difference = json.loads(old("diff", DPO, OTHER_BETA, "--json").stdout)
    assert [each["text"] for each in difference["differences"]] == ["dpo: beta: 0.3 -> 0.5"]
    impact = old("impact", "source:preferences")
    assert impact.returncode == 0 and DPO in impact.stdout, impact.stderr
    verified = old("verify")
    assert verified.returncode == 0 and "13 artifacts checked: intact" in verified.stdout, verified.stdout
    assert DPO in old("lineage", "alias:champion").stdout
    assert old("lineage", DPO, "--html", "page.html").returncode == 0
    assert DPO in (old.folder / "page.html").read_text()
    unknown = old("lineage", "cpt-sft-dpo/dpoo")
    assert unknown.returncode == 2 and "did you mean cpt-sft-dpo/dpo, " in unknown.stderr


HEAVY = {"hydra", "omegaconf", "pydantic", "prefect", "mlflow", "dvc", "torch", "ray", "pyarrow", "rich", "datasets"}


def test_the_questions_are_answered_without_a_heavy_import(old: Command) -> None:
    verbs = [["lineage", DPO], ["impact", "source:preferences"], ["diff", DPO, OTHER_BETA]]
    script = f"import sys; from flows.__main__ import main; codes = [main(each) for each in {verbs!r}]; "
    result = subprocess.run(
        [sys.executable, "-c", f"{script}print(codes, *sys.modules, sep=chr(10))"],
        cwd=old.folder, env=old.environment, capture_output=True, text=True,
    )  # fmt: skip
    assert "[0, 0, 0]" in result.stdout, result.stderr
    assert not {line.partition(".")[0] for line in result.stdout.splitlines()} & HEAVY


def test_mlflow_is_continued_and_can_be_refilled(old: Command, folder: Path) -> None:
    runs = runs_of(folder)
    assert old("rebuild").returncode == 0
    assert runs_of(folder) == runs
    (folder / "mlflow.db").unlink()
    assert old("rebuild").returncode == 0
    assert {name for name, _ in runs_of(folder)} >= {name for name, _ in runs if name in ("sft", "dpo", "evaluate")}


def runs_of(folder: Path) -> list[tuple[str, str]]:
    with sqlite3.connect(folder / "mlflow.db") as database:
        return sorted(database.execute("select name, run_uuid from runs").fetchall())


def test_a_finished_sweep_trains_nothing_again(old: Command, folder: Path) -> None:
    [table] = folder.glob("artifacts/sweeps/*/trials.csv")
    before = table.read_text()
    swept = old("run", "--multirun", "stages.dpo.method.beta=0.1,0.5")
    assert swept.returncode == 0, swept.stderr
    assert sorted(entry.name for entry in (folder / "artifacts" / "dpo").iterdir()) == sorted(
        ["7c5abad5d5eff7a9", "c942fff08a6f3c2b", DPO, OTHER_BETA]
    )
    columns = [name for name in next(csv.reader([before.splitlines()[0]])) if "perplexity" in name or "beta" in name]
    [old_rows, new_rows] = (
        [[row[name] for name in columns] for row in csv.DictReader(text.splitlines())]
        for text in (before, table.read_text())
    )
    assert columns and new_rows == old_rows


# Methods whose numbers changed, so that their version rose: they train again. Equal rewards had advantages by rounding,
# steps without a signal were taken, and completions did not end where the chat template alone ends a turn.
MOVED = ("grpo", "rloo", "online_dpo", "ppo", "on_policy_distill")


def test_no_recipe_moved() -> None:
    pipeline, lora = "cpt-sft-dpo-gated", Adapter(rank=4, alpha=8, dropout=0.1)
    found = {
        f"{pipeline}/{name}": stage.method for name, stage in load_pipeline([f"pipeline={pipeline}"]).stages.items()
    }
    found |= {name: training.method(name) for name in training.METHODS}
    found |= {f"{name}+lora": training.method(name, adapter=lora) for name in training.METHODS}
    before = json.loads((FIXTURES / "recipes.json").read_text())
    moved = {name: fingerprint(method.recipe(), {})[:16] for name, method in found.items()}
    still = {name for name in before if name.partition("+")[0] not in MOVED}
    assert {name: moved[name] for name in still} == {name: before[name] for name in still}
    assert not [name for name in before if name not in still and moved[name] == before[name]]
