"""The record of the default pipeline in miniature, as its reader finds it: from an alias back to the base model."""

import itertools
import json
from pathlib import Path

import pytest

from tests.command import Command
from tests.miniature import MODEL, STEPS, write_own_rows

PIPELINE = "cpt-sft-dpo"
LICENCE = "sources.corpus.labels=[cc-by-sa-4.0]"

_looks = itertools.count()


@pytest.fixture(scope="module")
def ours(tmp_path_factory, prefect_url) -> Command:
    folder = tmp_path_factory.mktemp("ledger")
    words = (*MODEL, *STEPS, *write_own_rows(folder), LICENCE)
    return Command(folder, *words, environment={"PREFECT_API_URL": prefect_url}, tracked=True)


@pytest.fixture(scope="module")
def stages(ours) -> dict[str, dict]:
    return ours.run()


@pytest.fixture(scope="module")
def champion(ours, stages) -> dict:
    """The aligned model, promoted by hand: in four steps no model passes an honest gate."""
    result = ours("promote", f"{PIPELINE}/dpo", "--alias", "champion", "--force", "--why", "a test", "--json")
    assert result.returncode == 0, result.stderr
    return stages["dpo"]


def address(folder: Path) -> str:
    """Of the database of now, spelled anew: MLflow keeps a connection by spelling, also to a file that is gone."""
    return f"sqlite:///{folder}/{'./' * next(_looks)}mlflow.db"


def registered_versions(folder: Path) -> dict[str, int]:
    from mlflow import MlflowClient

    versions = MlflowClient(address(folder)).search_model_versions(f"name = '{PIPELINE}'")
    return {version.tags["posttrain.stage"]: int(version.version) for version in versions}


def walk(folder: Path) -> dict:
    """What MLflow's own client finds from the alias on: each run with its recipe, data and parent models."""
    from mlflow import MlflowClient

    client = MlflowClient(address(folder))

    def visit(run_id: str) -> dict:
        run = client.get_run(run_id)
        models = [client.get_logged_model(given.model_id) for given in run.inputs.model_inputs]
        assert run.info.status == "FINISHED"
        return {
            "stage": run.data.tags["posttrain.stage"],
            "recipe": run.data.params,
            "loss": [(point.step, point.value) for point in client.get_metric_history(run_id, "loss")],
            "data": sorted((each.dataset.name, each.dataset.digest) for each in run.inputs.dataset_inputs),
            "parents": [
                visit(model.source_run_id) if model.source_run_id else model.name
                for model in sorted(models, key=lambda model: model.name)
            ],
        }

    version = client.get_model_version_by_alias(PIPELINE, "champion")
    return {"source": version.source, "digest": version.tags["posttrain.digest"], "run": visit(version.run_id)}


def test_from_the_alias_a_reader_reaches_the_base_model_and_all_data(ours, stages, champion):
    found = walk(ours.folder)
    assert found["source"] == Path(champion["output"]).as_uri()
    run, seen = found["run"], []
    while True:
        seen.append((run["stage"], [name for name, _ in run["data"]]))
        if not run["parents"]:
            break
        [run] = run["parents"]
    assert [stage for stage, _ in seen] == ["dpo", "sft", "cpt", "base"]
    assert all(names for _, names in seen)


def test_losses_are_recorded_live_at_their_steps_once(ours, champion):
    lines = (Path(champion["output"]).parent / "metrics.jsonl").read_text().splitlines()
    reported = [(line["step"], line["metrics"]["loss"]) for line in map(json.loads, lines)]
    assert walk(ours.folder)["run"]["loss"] == reported


def test_weights_are_not_uploaded(ours, champion):
    assert not list(ours.folder.glob("mlruns/**/*.safetensors"))
    assert not list(ours.folder.glob("mlartifacts/**/*.safetensors"))


def test_losing_mlflow_loses_no_lineage(ours, champion):
    before = walk(ours.folder)
    (ours.folder / "mlflow.db").rename(ours.folder / "lost.db")
    result = ours("rebuild")
    assert result.returncode == 0, result.stderr
    assert walk(ours.folder) == before


def test_a_label_is_found_upstream_and_downstream(ours, champion):
    lineage = json.loads(ours("lineage", "alias:champion", "--json").stdout)
    root = next(node for node in lineage["nodes"] if node["id"] == lineage["root"])
    assert root["labels"] == ["cc-by-sa-4.0"]
    assert root["aliases"] == ["champion"]
    impact = ours("impact", "label:cc-by-sa-4.0")
    assert impact.returncode == 0
    assert "champion" in impact.stdout
    artifacts = json.loads(ours("impact", "label:cc-by-sa-4.0", "--json").stdout)["artifacts"]
    registered = {each["stage"]: each["registered_version"] for each in artifacts}
    assert registered == {**dict.fromkeys(("corpus", "evaluate")), **registered_versions(ours.folder)}


def test_the_whole_record_is_intact_until_a_byte_changes(ours, stages, champion):
    result = ours("verify")
    assert result.returncode == 0, result.stdout
    weights = Path(champion["output"]) / "model.safetensors"
    original = weights.read_bytes()
    weights.chmod(0o644)
    weights.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
    try:
        for verb in (["verify"], ["verify", "alias:champion"]):
            result = ours(*verb)
            assert result.returncode == 1
            assert "model.safetensors has SHA-256" in result.stdout
        assert ours("verify", f"{PIPELINE}/sft").returncode == 0  # not of its ancestry
        result = ours("promote", f"{PIPELINE}/dpo", "--alias", "other", "--force")
        assert result.returncode == 1
        assert "model.safetensors has SHA-256" in result.stderr
        result = ours("run", "stages.evaluate.method.num_rows=8")
        assert result.returncode == 1
        assert "stage evaluate failed" in result.stderr
        assert "model.safetensors has SHA-256" in result.stderr
    finally:
        weights.write_bytes(original)
    assert ours("verify").returncode == 0
