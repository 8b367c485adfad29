"""``posttrain gc`` on a store of real runs: what goes, what stays, and that the record is intact afterwards."""

import json
import os
import shutil
from pathlib import Path

import pytest

from flows.__main__ import main
from flows.declare.config import load_pipeline
from flows.planning.plan import Plan, PlannedStage, make_plan
from flows.progress.run_record import latest
from flows.promotion.promote import promote
from flows.reports.wording import relative
from lineage.dvc import View
from lineage.mlflow.registry import refill, set_alias
from lineage.store import Store
from lineage.verify.store import Checked, check_outputs, check_promotions, read_store
from tests.command import CONF, Command, wait_until
from tests.finished import finish
from tests.unit.lineage.test_checkpoints import commit
from tests.written_store import WrittenStore
from tests.written_store import node as written_node

pytestmark = pytest.mark.integration

MINE = """# @package _global_
name: mine
sources:
  rows: {path: rows.txt}
stages:
  corpus: {method: {_target_: tests.toy_methods.ToyRows}, inputs: {rows: "source:rows"}}
  model: {method: {_target_: tests.toy_methods.ToyModel}, inputs: {rows: corpus}}
  left:
    method: {_target_: tests.toy_methods.ToyTraining}
    inputs: {policy: model, rows: corpus}
    resources: {cpus_per_worker: 1}
"""
SLOW = ("stages.left.method.step_seconds=0.05", "stages.left.method.num_steps=4000", "resources.save_steps=1")
RATE = "stages.left.method.learning_rate"
OBJECTIVE = "sweep.objectives.best={metric: left/loss, direction: minimize}"


@pytest.fixture
def mine(tmp_path, monkeypatch) -> Path:
    """A pipeline that stands as it is declared, in a folder of its own."""
    (tmp_path / "rows.txt").write_text("rows")
    shutil.copytree(CONF / "model", tmp_path / "conf" / "model")
    (tmp_path / "conf" / "pipeline").mkdir()
    (tmp_path / "conf" / "pipeline" / "mine.yaml").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan(mine: Path, *overrides: str) -> Plan:
    return make_plan(load_pipeline(["pipeline=mine", "model=none", "tracking=none", *overrides], mine / "conf"))


def node(planned: PlannedStage) -> str:
    return f"{planned.name}@{planned.fingerprint[:16]}"


def states(plan: Plan) -> dict[str, str]:
    return {planned.name: planned.state for planned in plan.stages}


@pytest.fixture
def gc(mine, capsys):
    """``posttrain gc`` without the start of a process; what ``--json`` prints, or the text."""

    def call(*options: str):
        assert main(["gc", "--config-dir", str(mine / "conf"), "tracking=none", *options]) == 0
        message = capsys.readouterr().out
        return json.loads(message) if "--json" in options else message

    return call


def unfinished(plan: Plan, step: int | None) -> Path:
    """What a killed attempt leaves."""
    entry = plan.entry(plan.stage("left"))
    entry.begin()
    if step:
        commit(entry.checkpoints, step)
    return entry.path


def entries(folder: Path) -> set[str]:
    paths = [path for stage in ("corpus", "model", "left") for path in (folder / "artifacts" / stage).glob("*")]
    return {f"{path.parent.name}@{path.name}" for path in paths}


def test_what_nobody_needs_goes_and_the_record_stays_intact(mine, gc):
    declared, other, promoted = plan(mine), plan(mine, f"{RATE}=0.2"), plan(mine, f"{RATE}=0.3")
    for each in (declared, other, promoted):
        finish(each)
    View(declared.pipeline.store, "mine").show({"left": declared.entry(declared.stage("left"))})
    promote(declared.pipeline, node(promoted.stage("left")), "champion", why="", force=True)
    bare, saved = unfinished(plan(mine, f"{RATE}=0.4"), None), unfinished(plan(mine, f"{RATE}=0.5"), 7)
    before = entries(mine)
    for path in (other.entry(other.stage("left")).path, bare):
        for each in [*path.rglob("*"), path]:
            os.utime(each, (1.0, 1.0))  # not used for years
    lost, kept = {node(other.stage("left")), f"left@{bare.name}"}, f"left@{saved.name}"

    shown = gc()
    assert all(each in shown for each in lost)
    assert "2 things to delete" in shown and "--yes deletes it" in shown
    assert f"stay: {kept}; --older-than 0" in shown
    assert gc("--json", "--yes", "--dry-run")["freed"] == []
    configured = gc("--json", "pipeline=mine", "model=none", f"{RATE}=0.2")  # what the command states is needed too
    assert [row["what"] for row in configured["garbage"]] == [f"left@{bare.name}"]
    assert entries(mine) == before

    done = gc("--json", "--yes")
    assert set(done["freed"]) == lost == before - entries(mine)
    assert [row["what"] for row in done["too_young"]] == [kept]
    assert done["needed"][node(declared.stage("left"))] == "view mine/left"
    assert done["needed"][node(promoted.stage("left"))] == "promote champion"
    assert gc("--yes").endswith(f"nothing to delete in {relative(declared.pipeline.store)}\n")
    assert gc("--json", "--yes", "--older-than", "0")["freed"] == [kept]
    assert gc("--json", "--yes", "--older-than", "0")["garbage"] == []
    assert (
        states(plan(mine))
        == states(plan(mine, f"{RATE}=0.3"))
        == {"corpus": "reuse", "model": "reuse", "left": "reuse"}
    )
    assert states(plan(mine, f"{RATE}=0.2")) == {"corpus": "reuse", "model": "reuse", "left": "run"}
    everything, findings = read_store(declared.pipeline.store)
    checked = Checked(all=everything, chosen=sorted(everything))
    assert findings == []
    assert [*check_outputs(checked), *check_promotions(declared.pipeline.store, checked)] == []


def test_what_an_alias_of_mlflow_names_stays_until_the_alias_goes(mine, gc, uri):
    written = WrittenStore(mine / "artifacts")
    old, new = (
        [corpus, written.stage("left", {"rows": corpus}, pipeline="mine")]
        for content in "ab"
        for corpus in [written.stage("corpus", {"rows": written.source("rows", content)}, pipeline="mine")]
    )
    View(written.root, "mine").show({"left": Store(written.root).entry("left", new[-1].fingerprint)})
    refill(uri, written.root)
    set_alias(uri, "mine", "tried", old[-1].fingerprint, "left")
    cli_args = ("--json", "--yes", "--older-than", "0", "tracking.mlflow=true", f"tracking.uri={uri}")

    kept = gc(*cli_args)
    assert kept["freed"] == []
    assert kept["needed"][written_node(old[-1])] == "alias tried of MLflow"
    assert entries(mine) == {written_node(each) for each in (*old, *new)}

    set_alias(uri, "mine", "tried", None)
    assert set(gc(*cli_args)["freed"]) == {written_node(each) for each in old}
    assert entries(mine) == {written_node(each) for each in new}


@pytest.fixture
def read_rows(mine) -> tuple[set[str], str]:
    """Outputs of another pipeline, and the override of a sweep that reads them."""
    written = WrittenStore(mine / "artifacts")
    rows = [written.stage("corpus", {"rows": written.source("rows", content)}) for content in "ab"]
    paths = [f"artifacts/corpus/{each.fingerprint[:16]}/output/content.txt" for each in rows]
    return {f"corpus@{each.fingerprint[:16]}" for each in rows}, f"sources.rows.path={','.join(paths)}"


@pytest.fixture
def command(mine, prefect_url) -> Command:
    environment = {"PREFECT_API_URL": prefect_url}
    return Command(mine, "--config-dir", str(mine / "conf"), "pipeline=mine", "model=none", environment=environment)


@pytest.mark.slow
def test_the_record_of_a_sweep_names_what_its_trials_read_of_another_pipeline(mine, command, read_rows):
    read, paths = read_rows
    done = command("run", "--multirun", paths)
    assert done.returncode == 0, done.stderr
    [note] = latest(mine / "artifacts")
    assert read <= set(note.reads)


@pytest.mark.slow  # tests/unit/flows/operate/test_gc_roots.py: what a record names stays
@pytest.mark.parametrize(
    "by", [("sweep.parallel=1",), ("sweep=optuna", "sweep.num_trials=2", "sweep.parallel=2", OBJECTIVE)]
)
def test_what_the_trials_of_a_sweep_read_of_another_pipeline_stays(mine, gc, command, read_rows, by):
    """Of a grid also what its later trials read, and of a sampler what it proposes."""
    read, paths = read_rows
    process = command.start("run", "--multirun", paths, *by, *SLOW)
    wait_until(lambda: list((mine / "artifacts" / "left").glob("*/checkpoints/step-*")), "left saves")
    [note] = latest(mine / "artifacts")
    assert read <= set(note.reads)
    gc("--json", "--yes", "--older-than", "0")
    assert read <= entries(mine)
    process.kill()
    process.communicate(timeout=60)


def test_what_a_run_makes_and_reads_stays_while_it_lives(mine, gc, command):
    """Also what it only reads, and what no declared pipeline would make."""
    cli_args = ("stages.corpus.method.prefix=x", *SLOW)
    process = command.start("run", *cli_args)
    running = plan(mine, *cli_args)
    saved = running.entry(running.stage("left")).checkpoints
    wait_until(saved.steps, "left saves")
    names = {node(planned) for planned in running.stages}
    assert gc("--json", "--yes", "--older-than", "0")["garbage"] == []
    assert entries(mine) == names
    process.kill()
    process.communicate(timeout=60)
    wait_until(lambda: set(gc("--json", "--yes", "--older-than", "0")["freed"]) == names, "all of it is free")
    assert entries(mine) == set()
    assert not (mine / "artifacts" / "left").exists()
