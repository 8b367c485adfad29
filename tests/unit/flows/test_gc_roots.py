"""What keeps an output from garbage collection, also what comes to keep it after it was shown."""

import json
import shutil
import sys
import time
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from flows.declare.operation import Tracking
from flows.operate import gc_roots
from flows.operate.gc_roots import add_present, find_roots
from flows.progress.run_record import RunRecord, new_id
from flows.sweep.folder import TrialResult
from lineage.errors import ArtifactError, ConfigError
from lineage.filesystem.owner import Owner
from lineage.gc import TOKENS
from lineage.store import Store
from tests.written_store import WrittenStore, node


@pytest.fixture
def written(tmp_path) -> WrittenStore:
    return WrittenStore(tmp_path / "store")


@pytest.fixture
def roots(toy, written):
    """The roots of a command that states the toy pipeline."""
    configured = toy("tracking=none", f"store={written.root}").pipeline
    return lambda *keep: find_roots(written.root, configured, keep)


def is_kept(roots, *manifests):
    return {node(each) for each in manifests} <= roots.keys()


def run_of(written, pipeline="q", **fields):
    run = RunRecord(
        id=new_id(), pipeline=pipeline, cli_args=[], driver=Owner.here(), started=time.time(), stages={}, **fields
    )
    run.write(written.root)


def test_what_the_command_states_and_keeps_are_roots(roots, written, toy):
    made = written.chain()
    assert not is_kept(roots(), made["corpus"])
    planned = {f"{each.name}@{each.fingerprint[:16]}" for each in toy(f"store={written.root}").stages}
    assert planned <= roots().keys()
    kept = roots("p/cpt", node(made["pairs"]))
    assert kept[node(made["cpt"])] == "--keep p/cpt" and is_kept(kept, made["base"], made["corpus"], made["pairs"])
    assert not is_kept(kept, made["dpo"])
    with pytest.raises(ConfigError, match="nonesuch"):
        roots("nonesuch")


def test_a_promoted_model_is_a_root_for_ever(roots, written):
    made = written.chain()
    written.event(made["dpo"])
    written.event(made["base"])
    assert is_kept(roots(), made["dpo"], made["corpus"], made["cpt"])
    manifest = Store(written.root).entry("dpo", made["dpo"].fingerprint).path / "manifest.json"
    text = manifest.read_text()
    manifest.unlink()
    with pytest.raises(
        ArtifactError, match=f"{node(made['dpo'])}, which alias champion names or has named, has no mani"
    ):
        roots()
    manifest.write_text(text)
    written.delete(made["evaluate"])
    written.delete(made["dpo"])  # a model of the past may be deleted
    assert is_kept(roots(), made["base"]) and not is_kept(roots(), made["cpt"])


def test_what_comes_to_be_referenced_later_is_seen_with_its_ancestors(roots, written):
    made = written.chain()
    before = roots()
    run_of(written, reads=[node(made["pairs"])])
    written.event(made["cpt"])
    now = add_present(written.root, before)
    assert is_kept(now, made["pairs"], made["cpt"], made["base"], made["corpus"]) and TOKENS in now
    assert not is_kept(now, made["dpo"])
    place = written.root / "pipelines" / "p" / "dpo"
    shutil.copytree(Store(written.root).entry("dpo", made["dpo"].fingerprint).path, place)
    assert add_present(written.root, before)[node(made["dpo"])] == "view p/dpo"


def test_all_of_a_pipeline_stays_while_a_run_of_it_has_no_plan_yet(roots, written):
    made = written.chain()
    assert not is_kept(roots(), made["dpo"])
    run_of(written, pipeline="p", waits_for="another run")
    assert is_kept(roots(), *made.values())


def test_an_alias_of_mlflow_is_a_root(toy, written, monkeypatch):
    made = written.chain()
    named = {("cpt", made["cpt"].fingerprint): "mine"}
    registry = SimpleNamespace(aliases=lambda uri, pipelines: named if "p" in pipelines else {})
    monkeypatch.setitem(sys.modules, "lineage.mlflow.registry", registry)  # which imports mlflow
    for tracking, found in (
        (Tracking(mlflow=True, uri="http://x", dvc=False), {node(made["cpt"]): "alias mine of MLflow"}),
        (Tracking(mlflow=False, uri=None, dvc=False), {}),
        (Tracking(mlflow=True, uri=f"sqlite:///{written.root}/none.db", dvc=False), {}),
    ):
        pipeline = SimpleNamespace(tracking=tracking, store=written.root)
        assert gc_roots._mlflow(pipeline, ["p"]) == found


def test_the_best_trial_of_a_sweep_is_a_root(roots, written):
    made = [written.chain(beta=beta)["dpo"] for beta in (0.1, 0.2)]
    folder = written.root / "sweeps" / "s"
    folder.mkdir(parents=True)
    rows = [
        TrialResult(
            number=number, params={"stages.dpo.method.beta": beta}, state="complete", seconds=1.0, cause="", values={},
            metrics={}, fingerprints={"dpo": made[number].fingerprint},
        )
        for number, beta in enumerate(("0.1", "0.2"))
    ]  # fmt: skip
    (folder / "trials.jsonl").write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    (folder / "best.yaml").write_text("trial: 1\noverrides: [x=1, stages.dpo.method.beta=0.2]")
    assert is_kept(roots(), made[1]) and not is_kept(roots(), made[0])
    (folder / "best.yaml").write_text("[1]")
    with pytest.raises(ConfigError, match=r"best\.yaml"):
        roots()
