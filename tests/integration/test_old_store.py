"""Stores written in November 2026 are read by the code of today.

``tests/fixtures/store.tar.xz`` holds the default pipeline in miniature on rows of a user's own: trained, promoted,
swept over two values of ``beta``, and killed once at a checkpoint, with its MLflow database. ``store-82e2e7c.tar.xz``
holds a pipeline of every method by commit 82e2e7c, and a killed stage. ``args`` and ``plan.json`` in them are the
overrides and the plan of then. ``recipes.json`` holds the fingerprints of the methods' recipes of then. No file may
change.
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


def unpacked(archive: str, folder: Path) -> Path:
    with tarfile.open(FIXTURES / archive) as file:
        file.extractall(folder, filter="data")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return unpacked("store.tar.xz", tmp_path)


def command(folder: Path, tracked: bool = True) -> Command:
    return Command(folder, *(folder / "args").read_text().split(), tracked=tracked)


@pytest.fixture
def old(folder: Path) -> Command:
    return command(folder)


def plans(old: Command) -> tuple[dict[str, dict], dict[str, dict]]:
    """Name, fingerprint, state and inputs of each stage, now and then."""
    documents = json.loads(old("plan", "--json").stdout), json.loads((old.folder / "plan.json").read_text())
    now, then = ({row["stage"]: row for row in document["stages"]} for document in documents)
    return now, then


def test_every_stage_is_reused(old: Command) -> None:
    now, then = plans(old)
    assert [(name, row["fingerprint"], row["state"], row["inputs"]) for name, row in now.items()] == [
        (name, row["fingerprint"], "reuse", row["inputs"]) for name, row in then.items()
    ]


def test_a_killed_stage_resumes_from_its_checkpoint(old: Command) -> None:
    assert old.states(*KILLED)["dpo"] == "resume"


# Stages of the other store whose version was raised since -> the reason in the plan.
RAISED = {
    **dict.fromkeys(("grpo", "rloo", "online-dpo", "ppo", "on-policy-distill"), "version: 1 -> 2"),
    **dict.fromkeys(("dpo-noise", "kto-noise"), "neftune_version: (none) -> 2"),
}


def test_every_method_of_82e2e7c_is_reused_unless_its_version_was_raised(tmp_path: Path) -> None:
    old = command(unpacked("store-82e2e7c.tar.xz", tmp_path), tracked=False)
    now, then = plans(old)
    assert now.keys() == then.keys()
    again = {name: row["reason"] for name, row in now.items() if row["state"] != "reuse"}
    assert again.pop("after-grpo").startswith("input policy: grpo@")
    assert again == RAISED
    same = then.keys() - RAISED.keys() - {"after-grpo"}
    assert {name: now[name]["fingerprint"] for name in same} == {name: then[name]["fingerprint"] for name in same}
    killed = ("stages.dpo.method.num_steps=3000", "stages.dpo.resources.save_steps=5")
    assert old.states(*killed)["dpo"] == "resume"
    assert "36 artifacts checked: intact" in old("verify").stdout


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


# The shipped gate measures on all held-out rows, and has another bound: it judges again, and nothing trains.
GATED = ("cpt-sft-dpo-gated/evaluate", "cpt-sft-dpo-gated/gate")
# Methods whose numbers changed, so that their version rose: they train again. Equal rewards had advantages by rounding,
# steps without a signal were taken, and completions did not end where the chat template alone ends a turn.
MOVED = ("grpo", "rloo", "online_dpo", "ppo", "on_policy_distill", *GATED)


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
