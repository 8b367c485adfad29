"""Who needs what of a store, where that cannot be told, and what comes to be needed later."""

import json
import shutil
import time
from dataclasses import asdict

import pytest

from flows.declare.operation import Tracking
from flows.deploy import preset
from flows.needed import registries
from flows.needed.found import Needed
from flows.needed.look import last_look, needed
from flows.needed.pipelines import add_plan
from flows.needed.registries import Registries
from flows.planning.plan import make_plan
from flows.planning.reads import reads
from flows.progress.run_notes import RunNote, new_id
from flows.sweep.folder import Row
from lineage.errors import ArtifactError, ConfigError
from lineage.garbage import TOKENS
from lineage.lease import Holder, Lease
from lineage.promotions import Event, append
from lineage.run_file import RunFile
from lineage.store import Store
from tests.toy_methods import ToyModel
from tests.written_store import WrittenStore, node


@pytest.fixture
def written(tmp_path) -> WrittenStore:
    return WrittenStore(tmp_path / "store")


@pytest.fixture
def look(tmp_path, toy, written, monkeypatch):
    """What a command finds needed that states the toy pipeline, where only a folder of the user's declares others."""
    (tmp_path / "shipped").mkdir()
    (tmp_path / "conf" / "pipeline").mkdir(parents=True)
    monkeypatch.setattr(preset, "CONF", tmp_path / "shipped")
    stated = toy("tracking=none").pipeline

    def call(unseen=False, **files: str):
        for name, text in files.items():
            (tmp_path / "conf" / "pipeline" / f"{name}.yaml").write_text(text)
        return needed(stated, written.root, tmp_path / "conf", unasked(written), unseen=unseen)

    return call


def unasked(written, uri=None) -> Registries:
    """Of a command that states this MLflow, or ``tracking=none``."""
    return Registries(Tracking(mlflow=uri is not None, uri=uri, dvc=False), written.root)


def registered(written, made, *addresses):
    note = RunFile(uri="", run_id="", execution_id="", words=[], version=1, registries=list(addresses))
    note.write(Store(written.root).entry(made.stage, made.fingerprint).path)


def made_by(kept, *manifests):
    return {node(each) for each in manifests} <= kept.keys()


def event(made, alias="champion", action="promote", **fields) -> Event:
    return Event(action=action, alias=alias, fingerprint=made.fingerprint, stage=made.stage, who="", why="", **fields)


def test_a_pipeline_that_cannot_be_read_keeps_what_is_made_under_its_name_and_its_files(look, written):
    of_file, of_name, of_another = (
        written.stage(stage, {"rows": written.source("rows")}, pipeline=pipeline)
        for stage, pipeline in {"a": "file", "b": "named", "c": "another"}.items()
    )
    kept, lines = look(file="# @package _global_\nname: named\nstages: {x: 3}\n")
    assert made_by(kept, of_file, of_name) and not made_by(kept, of_another)
    assert [line.partition(": pipeline=file cannot be read")[0] for line in sorted(lines)] == [
        "all of file stays", "all of named stays",
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["name: [", "stages: {}", "name: ${stages}"])
def test_nothing_goes_beside_a_pipeline_that_does_not_say_its_name(look, written, text):
    made = written.chain()
    kept, lines = look(file=f"# @package _global_\nstages: {{x: 3}}\n{text}")
    assert made_by(kept, *made.values())
    assert any(line.startswith("nothing goes: pipeline=file cannot be read") for line in lines)


def test_what_nobody_declares_stays_unless_an_age_is_stated(look, written):
    made = written.chain()
    kept, [line] = look(unseen=True)
    assert made_by(kept, *made.values())
    assert line.startswith("all of p stays: it is not declared here; state its --config-dir or its overrides, or --old")
    kept, lines = look()
    assert (made_by(kept, made["dpo"]), lines) == (False, [])


def test_what_lacks_a_value_stays_unless_an_age_is_stated(look, written):
    made = written.stage("a", {"rows": written.source("rows")}, pipeline="file")
    text = '# @package _global_\nname: file\nsources: {rows: {path: "???"}}\n'
    kept, [line] = look(unseen=True, file=text)
    assert made_by(kept, made)
    assert line.startswith("all of file stays: pipeline=file lacks sources.rows.path: has no value; state sources")
    kept, [line] = look(file=text)
    assert not made_by(kept, made)
    assert "it keeps nothing" in line


def test_a_stage_that_no_run_can_go_on_with_keeps_no_more_than_its_plan(toy, written):
    """None of its checkpoints is whole, and other code trained them."""
    shown = toy("code_drift=refuse", f"store={written.root}")
    left = shown.entry(shown.stage("left"))
    left.begin()
    (left.checkpoints.directory / "step-3").mkdir(parents=True)
    with pytest.raises(ConfigError, match="each lacks a file"):
        make_plan(shown.pipeline)
    found = Needed()
    add_plan(shown.pipeline, "mine", found)
    assert found.pipelines == {} and found.by == dict.fromkeys(reads(shown), "mine")


def test_a_method_that_trains_in_a_way_of_its_own_is_planned_too(toy, written, monkeypatch):
    monkeypatch.setattr(ToyModel, "trains", True)
    found = Needed()
    add_plan(toy(f"store={written.root}").pipeline, "mine", found)
    assert found.pipelines == {} and found.by


def test_while_a_promoted_model_has_no_record_nothing_goes(look, written):
    made = written.chain()
    append(written.root, event(made["dpo"]))
    assert made_by(look()[0], made["corpus"], made["cpt"])
    (Store(written.root).entry("dpo", made["dpo"].fingerprint).path / "manifest.json").unlink()
    kept, [line] = look()
    assert made_by(kept, *(made[name] for name in ("corpus", "base", "cpt", "pairs", "dpo", "evaluate")))
    assert line.startswith(f"nothing goes: {node(made['dpo'])}, which alias champion names or has named, has no mani")


def test_a_model_of_the_past_that_somebody_deleted_keeps_nothing(look, written):
    made = written.chain()
    append(written.root, event(made["dpo"]))
    append(written.root, event(made["base"]))
    written.delete(made["evaluate"])
    written.delete(made["dpo"])
    kept, lines = look()
    assert (made_by(kept, made["base"]), made_by(kept, made["cpt"]), lines) == (True, False, [])


def test_what_comes_to_be_needed_later_is_seen_with_what_it_was_made_from(look, written):
    made = written.chain()
    before, _ = look()
    lease = Lease(Store(written.root).entry("corpus", made["corpus"].fingerprint).path)
    lease.try_acquire()  # as who frees it does
    with lease.holding():
        assert made_by(look()[0], made["corpus"])
        now = last_look(written.root, before, unasked(written))()
    assert not made_by(now, made["corpus"]) and TOKENS not in now
    run = RunNote(
        id=new_id(), pipeline="q", words=[], driver=Holder.here(), started=time.time(), stages={},
        reads=[node(made["pairs"])],
    )  # fmt: skip
    run.write(written.root)
    append(written.root, event(made["cpt"]))
    now = last_look(written.root, before, unasked(written))()
    assert made_by(now, made["pairs"], made["cpt"], made["base"], made["corpus"]) and TOKENS in now
    assert not made_by(now, made["dpo"])


def test_a_view_that_moves_later_is_seen(look, written):
    made = written.chain()
    before, _ = look()
    place = written.root / "pipelines" / "p" / "dpo"
    shutil.copytree(Store(written.root).entry("dpo", made["dpo"].fingerprint).path, place)
    assert made_by(last_look(written.root, before, unasked(written))(), made["dpo"], made["pairs"])


def test_an_alias_of_any_registry_keeps_its_model_whatever_the_command_states(written, monkeypatch):
    made = written.chain()
    stated, other = "http://stated", "http://other"
    registered(written, made["cpt"], other)
    registered(written, made["dpo"], stated, other)
    named = {stated: {}, other: {("cpt", made["cpt"].fingerprint): "mine"}}
    monkeypatch.setattr(registries, "aliases", lambda address, pipelines: named[address])
    for uri in (None, stated, other):
        found = Needed()
        unasked(written, uri).add_aliased(found)
        assert found.by == {node(made["cpt"]): "alias mine of MLflow"}


def test_an_alias_that_is_given_after_the_look_keeps_its_model(look, written, monkeypatch):
    made, named = written.chain(), {}
    monkeypatch.setattr(registries, "aliases", lambda address, pipelines: named)
    asked = unasked(written, "http://stated")
    named["cpt", made["cpt"].fingerprint] = "mine"
    assert made_by(last_look(written.root, {}, asked)(), made["cpt"], made["base"], made["corpus"])


def test_no_registry_is_asked_while_runs_wait_for_the_last_look(written, monkeypatch):
    made, asked = written.chain(), []
    monkeypatch.setattr(registries, "aliases", lambda address, pipelines: asked.append(address) or {})
    looks = last_look(written.root, {node(made["dpo"]): "mine"}, unasked(written, "http://stated"))
    assert asked == ["http://stated"]
    assert made_by(looks(), made["dpo"], made["cpt"]) and asked == ["http://stated"]


def test_what_is_registered_where_nobody_answers_stays(written, tmp_path, monkeypatch):
    made = written.chain()
    registered(written, made["cpt"], f"sqlite:///{tmp_path}/gone.db")
    asked, found = unasked(written), Needed()
    asked.add_aliased(found)
    assert found.by.keys() == {node(made["cpt"])}
    [line] = found.lines
    assert line.startswith(f"1 model registered in MLflow at sqlite:///{tmp_path}/gone.db stay") and "gone for" in line

    def refuse(address, pipelines):
        raise ArtifactError("no answer")

    monkeypatch.setattr(registries, "aliases", refuse)
    again = Needed()
    asked.add_aliased(again)
    assert (again.by, again.lines) == (found.by, [])  # it is not asked again for each thing that goes
    assert made_by(last_look(written.root, {}, asked)(), made["cpt"], made["corpus"])
    with pytest.raises(ArtifactError, match="no answer"):
        unasked(written, "http://stated").add_aliased(Needed())


@pytest.mark.parametrize(
    ("best", "kept_trials"),
    [("trial: 1\noverrides: [x=1, stages.dpo.method.beta=0.2]", {1}), ("", {0, 1}), ("[1]", {0, 1})],
)
def test_a_sweep_that_does_not_tell_its_best_trial_keeps_them_all(look, written, best, kept_trials):
    made = [written.chain(beta=beta)["dpo"] for beta in (0.1, 0.2)]
    folder = written.root / "sweeps" / "s"
    folder.mkdir(parents=True)
    rows = [
        Row(
            number=number, params={"stages.dpo.method.beta": beta}, state="complete", seconds=1.0, cause="", values={},
            metrics={}, fingerprints={"dpo": made[number].fingerprint},
        )
        for number, beta in enumerate(("0.1", "0.2"))
    ]  # fmt: skip
    (folder / "trials.jsonl").write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    (folder / "best.yaml").write_text(best)
    kept, _ = look()
    assert {number for number, each in enumerate(made) if made_by(kept, each)} == kept_trials
