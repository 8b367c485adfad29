"""What leads from one artifact to the next in MLflow: models, data sets, reused runs, versions."""

import json
import shutil
from dataclasses import replace

from lineage.errors import StoppedError
from lineage.mlflow.address import connect
from lineage.mlflow.entities import Key
from lineage.mlflow.registry import links, refill
from lineage.mlflow.tracker import MlflowTracker
from lineage.record.metrics_file import BENCHMARKS_FILE
from lineage.record.run_file import RunNames
from lineage.record.tracker import Event
from tests.tracked_stage import Tracked, attempt, execution, record, start_of


def test_a_parent_that_mlflow_does_not_know_is_written_from_its_manifest(uri, client, store):
    made = store.chain()
    _, ids = record(uri, store, made["dpo"], [made["cpt"], made["pairs"]])
    run = client.get_run(ids.stage)
    [parent] = [client.get_logged_model(each.model_id) for each in run.inputs.model_inputs]
    assert (parent.name, parent.tags["posttrain.digest"]) == ("cpt", made["cpt"].output_digest)
    assert parent.source_run_id == ids.parents[0]
    # The page of a model is one click from its parent's.
    [made_of_it] = [client.get_logged_model(each.model_id) for each in run.outputs.model_outputs]
    link = f"[cpt](#/experiments/{run.info.experiment_id}/models/{parent.model_id})"
    assert link in made_of_it.tags["mlflow.note.content"] == run.data.tags["mlflow.note.content"]
    base = client.get_run(parent.source_run_id).inputs.model_inputs
    assert client.get_logged_model(base[0].model_id).name == "base"
    [pairs] = [each.dataset for each in run.inputs.dataset_inputs]
    assert json.loads(pairs.profile)["labels"] == ["cc-by-nc-4.0"]
    assert json.loads(run.data.tags["posttrain.labels"]) == ["cc-by-nc-4.0"]


def test_a_reused_stage_is_a_link_to_the_run_that_made_it(uri, client, store):
    made = store.chain()
    _, base = record(uri, store, made["base"], [made["corpus"]])
    tracker = MlflowTracker(uri)
    with tracker.execution(execution(store, [made["base"]])):
        pass
    run = client.get_run(tracker.execution_id())
    assert run.data.tags["posttrain.reused.base"] == base.stage
    assert f"| base | reused | [{base.stage[:8]}](#/experiments/" in run.data.tags["mlflow.note.content"]


def test_a_stage_that_another_execution_made_meanwhile_is_a_link_too(uri, client, store):
    manifest = store.stage("a", {})
    _, ids = record(uri, store, manifest)
    tracker = MlflowTracker(uri)
    with tracker.execution(execution(store)):
        tracker.on(Event(title="a", state="reused", manifest=manifest))
    run = client.get_run(tracker.execution_id())
    assert run.data.tags["posttrain.reused.a"] == ids.stage
    assert ids.stage in run.data.tags["mlflow.note.content"]


def test_a_model_that_no_stage_made_is_a_logged_model_once(uri, client, store):
    source = store.source("qwen", path="owner/name", kind="checkpoint", revision="c" * 40, files={})
    manifests = [store.stage(name, {"policy": source}) for name in ("cpt", "sft")]
    ids = [record(uri, store, manifest)[1] for manifest in manifests]
    found = [client.get_run(each.stage).inputs.model_inputs for each in ids]
    assert found[0] == found[1] != []
    model = client.get_logged_model(found[0][0].model_id)
    assert (model.name, model.tags["posttrain.output"], model.source_run_id) == ("qwen", "owner/name", None)


def test_reports_read_models_and_make_none(uri, client, store):
    made = store.chain()
    _, ids = record(uri, store, made["evaluate"], [made["cpt"], made["dpo"], made["corpus"]])
    run = client.get_run(ids.stage)
    names = {client.get_logged_model(each.model_id).name for each in run.inputs.model_inputs}
    assert (names, run.outputs.model_outputs) == ({"cpt", "dpo"}, [])


def test_metrics_of_models_belong_to_the_data_that_they_were_measured_on(uri, client, store):
    metrics = {"loss": 0.4, "evaluation/f1": 0.5, "evaluation/base/f1": 0.2}
    metrics |= {"evaluation/lm_eval/arc/acc": 0.3, "evaluation/base/lm_eval/arc/acc": 0.1, "evaluation/own/acc": 0.7}
    made = store.chain(metrics=metrics)
    folder = store.root / "dpo" / made["dpo"].fingerprint[:16] / "evaluation" / "step-5"
    folder.mkdir(parents=True)
    (folder / BENCHMARKS_FILE).write_text('{"own": {"num_fewshot": 0}}')  # a benchmark that has a name
    _, of_dpo = record(uri, store, made["dpo"], [made["cpt"], made["pairs"]])
    policies = {"cpt": made["cpt"], "dpo": made["dpo"], "text": made["corpus"]}
    measured = {"dpo/text_perplexity": 3.0, "cpt/text_perplexity": 4.0, "dpo/lm_eval/arc/acc": 0.3, "max_length": 9.0}
    report = store.stage("evaluate", policies, metrics=measured, recipe={"seed": 1})
    _, of_report = record(uri, store, report, [*policies.values()])

    def of(run_id):
        run = client.get_run(run_id)
        ids = [each.model_id for each in (*run.inputs.model_inputs, *run.outputs.model_outputs)]
        models = [client.get_logged_model(each) for each in ids]
        assert run.data.metrics == {"loss": 0.4, **metrics} if run_id == of_dpo.stage else measured
        return {
            (model.name, each.key, each.value, each.dataset_name, each.dataset_digest)
            for model in models for each in model.metrics or [] if each.run_id == run_id
        }  # fmt: skip

    pairs, corpus = made["pairs"].output_digest[:36], made["corpus"].output_digest[:36]
    assert of(of_dpo.stage) == {
        ("dpo", "loss", 0.4, "pairs", pairs), ("dpo", "evaluation/f1", 0.5, "pairs", pairs),
        ("cpt", "evaluation/base/f1", 0.2, "pairs", pairs), ("dpo", "evaluation/lm_eval/arc/acc", 0.3, None, None),
        ("cpt", "evaluation/base/lm_eval/arc/acc", 0.1, None, None), ("dpo", "evaluation/own/acc", 0.7, None, None),
    }  # fmt: skip
    assert of(of_report.stage) == {
        ("dpo", "dpo/text_perplexity", 3.0, "corpus", corpus), ("cpt", "cpt/text_perplexity", 4.0, "corpus", corpus),
        ("dpo", "dpo/lm_eval/arc/acc", 0.3, None, None),
    }  # fmt: skip
    experiment = client.get_run(of_report.stage).info.experiment_id
    on = [{"dataset_name": "corpus", "dataset_digest": corpus}]
    better = client.search_logged_models([experiment], "metrics.`dpo/text_perplexity` < 3.5", datasets=on)
    assert [each.name for each in better] == ["dpo"]


def test_the_same_bytes_are_registered_once_and_others_again(uri, client, store):
    manifest = store.stage("base", {})
    for each in (manifest, manifest, replace(manifest, output_digest="f" * 64)):
        record(uri, store, each)
    found = client.search_model_versions("name='p'", order_by=["version_number ASC"])
    assert [each.tags["posttrain.digest"] for each in found] == [manifest.output_digest, "f" * 64]
    output = store.root / "base" / manifest.fingerprint[:16] / "output"
    assert found[0].source == found[0].tags["posttrain.output"] == output.as_uri()


def test_a_model_that_an_alias_named_is_the_logged_model_of_the_stage_that_made_it(uri, client, store):
    champion = store.stage("sft", {}, pipeline="other")
    output = store.root / "sft" / champion.fingerprint[:16] / "output"
    source = store.source("champion", path=str(output), kind="checkpoint", revision="alias:champion", files={})
    _, ids = record(uri, store, store.stage("dpo", {"policy": replace(source, fingerprint=champion.fingerprint)}))
    [parent] = client.get_run(ids.stage).inputs.model_inputs
    assert client.get_run(client.get_logged_model(parent.model_id).source_run_id).info.run_name == "sft"


NAMES = RunNames(experiment="shared", run_name="{pipeline} again", tags={"team": "nlp"})


def seen(client):
    """Experiment, name, name of the parent, and the tag, of every run."""
    found = []
    for experiment in client.search_experiments():
        for run in client.search_runs([experiment.experiment_id]):
            parent = run.data.tags.get("mlflow.parentRunId")
            above = client.get_run(parent).info.run_name if parent else None
            found.append((experiment.name, run.info.run_name, above, run.data.tags.get("team")))
    return sorted(found, key=str)


def test_two_pipelines_share_an_experiment_and_names_and_keep_their_lineage(uri, client, store, migrated):
    """Also where two executions have one name, and after MLflow was lost."""
    base = store.stage("base", {}, pipeline="first")
    sft = store.stage("sft", {"policy": base}, pipeline="second")
    dpo = store.stage("dpo", {"policy": sft}, pipeline="second")
    _, of_base = record(uri, store, base, names=NAMES)
    _, of_sft = record(uri, store, sft, [base], names=NAMES)
    _, of_dpo = record(uri, store, dpo, [sft], names=NAMES)
    assert of_sft.execution != of_dpo.execution and of_sft.parents == (of_base.stage,)
    home = client.get_experiment_by_name("shared").experiment_id
    assert client.get_experiment_by_name("first") is client.get_experiment_by_name("second") is None
    [parent] = client.get_run(of_dpo.stage).inputs.model_inputs
    model = client.get_logged_model(parent.model_id)
    assert (model.name, model.experiment_id, model.source_run_id) == ("sft", home, of_sft.stage)
    expected = [
        ("shared", "base", "first again", "nlp"), ("shared", "dpo", "second again", "nlp"),
        ("shared", "first again", None, "nlp"), ("shared", "second again", None, "nlp"),
        ("shared", "second again", None, "nlp"), ("shared", "sft", "second again", "nlp"),
    ]  # fmt: skip
    assert seen(client) == sorted(expected, key=str)
    assert set(links(uri, ["second"]).runs) == {Key.of(sft), Key.of(dpo)}
    assert set(links(uri, ["first"]).models) >= {Key.of(base)}
    assert refill(uri, store.root).added["runs"] == 0
    lost = f"sqlite:///{shutil.copy(migrated, store.root / 'new.db')}"
    assert refill(lost, store.root).added["runs"] == 3
    assert seen(connect(lost)) == sorted(expected, key=str)
    assert {each.name for each in connect(lost).search_registered_models()} == {"first", "second"}


def test_a_stage_that_resumes_under_another_experiment_resumes_in_its_run(uri, client, store):
    """Its execution is in the new one, and shows it all the same."""
    manifest = store.stage("a", {})
    tracker = attempt(uri, store, start_of(store, manifest), StoppedError("stop"), 1)
    stopped = client.search_runs([client.get_experiment_by_name("p").experiment_id], "tags.`posttrain.stage` = 'a'")
    again = MlflowTracker(uri, NAMES)
    with again.execution(execution(store)):
        stage = Tracked(again, start_of(store, manifest, resumes=True))
        assert stage.run_ids().stage == stopped[0].info.run_id
        stage.finish(manifest)
    shown = client.get_run(again.execution_id())
    assert shown.info.experiment_id == client.get_experiment_by_name("shared").experiment_id
    assert f"| a | finished | [{stopped[0].info.run_id[:8]}]" in shown.data.tags["mlflow.note.content"]
    assert set(links(uri, ["p"]).runs) == {Key.of(manifest)} and tracker.execution_id() != again.execution_id()
