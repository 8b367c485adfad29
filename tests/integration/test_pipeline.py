"""The default pipeline in miniature, through Prefect and Ray, as a user runs it; its record as a reader finds it."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.command import Command
from tests.miniature import MODEL, STEPS, write_own_rows
from tests.mlflow_walk import walk

PIPELINE = "cpt-sft-dpo"
LICENCE = "sources.corpus.labels=[cc-by-sa-4.0]"
STAGES = ["base", "corpus", "cpt", "dpo", "evaluate", "instructions", "preferences", "reward", "sft"]
ONLY_SFT = ("~stages.preferences", "~sources.preferences", "~stages.reward", "~stages.dpo", "~stages.evaluate")

_looks = itertools.count()


def output(row: dict) -> Path:
    return Path(row["output"])


def losses(row: dict) -> list[float]:
    lines = (output(row).parent / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["metrics"]["loss"] for line in lines]


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory, prefect_url, migrated) -> Command:
    folder = tmp_path_factory.mktemp("quickstart")
    shutil.copy(migrated, folder / "mlflow.db")
    return Command(folder, *MODEL, *STEPS, LICENCE, environment={"PREFECT_API_URL": prefect_url}, tracked=True)


@pytest.fixture(scope="module")
def stages(quickstart) -> dict[str, dict]:
    return quickstart.run()


@pytest.fixture(scope="module")
def champion(quickstart, stages) -> dict:
    """The aligned model, promoted by hand: in four steps no model passes an honest gate."""
    result = quickstart("promote", f"{PIPELINE}/dpo", "--alias", "champion", "--force", "--why", "a test", "--json")
    assert result.returncode == 0, result.stderr
    return stages["dpo"]


@pytest.fixture(scope="module")
def own(tmp_path_factory, prefect_url) -> Command:
    """A folder with a user's own rows in JSON Lines."""
    folder = tmp_path_factory.mktemp("own")
    overrides = (*MODEL, *STEPS, *write_own_rows(folder))
    return Command(folder, *overrides, environment={"PREFECT_API_URL": prefect_url})


def test_every_stage_leaves_an_output_with_a_manifest(stages):
    assert sorted(stages) == STAGES
    for name, row in stages.items():
        manifest = json.loads((output(row).parent / "manifest.json").read_text())
        assert manifest["fingerprint"] == row["fingerprint"]
        assert manifest["stage"] == name
        assert {path.relative_to(output(row)).as_posix() for path in output(row).rglob("*") if path.is_file()} == set(
            manifest["files"]
        )


def test_every_model_loads_alone_with_the_tokenizer_it_began_with(stages):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    base = output(stages["base"])
    for name in ("base", "cpt", "sft", "dpo", "reward"):
        auto = AutoModelForSequenceClassification if name == "reward" else AutoModelForCausalLM
        auto.from_pretrained(output(stages[name]))
        assert AutoTokenizer.from_pretrained(output(stages[name])).chat_template
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            assert (output(stages[name]) / file).read_bytes() == (base / file).read_bytes()


def test_dpo_starts_at_ln_2(stages):
    assert losses(stages["dpo"])[0] == pytest.approx(0.693147, abs=1e-3)


def test_evaluation_has_every_policy_and_the_reference_at_one_half(stages):
    metrics = stages["evaluate"]["metrics"]
    for policy in ("base", "cpt", "sft", "dpo"):
        for measure in ("text_perplexity", "answer_perplexity", "preference_accuracy", "logp_accuracy", "reward_score"):
            assert f"{policy}/{measure}" in metrics
    assert metrics["sft/preference_accuracy"] == 0.5
    assert 0 <= metrics["reward_model/accuracy"] <= 1


def test_no_row_is_lost_on_the_way(stages):
    for name, data in (("cpt", "corpus"), ("sft", "instructions"), ("reward", "preferences"), ("dpo", "preferences")):
        trained, given = stages[name]["metrics"], stages[data]["metrics"]
        assert given["rows"] == given["train_rows"] + given["held_out_rows"]
        assert trained["rows"] == given["train_rows"]
        assert 0 <= trained["rows_dropped"] < trained["rows"]


def client_of(folder: Path) -> MlflowClient:
    """Of the database of now, spelled anew: MLflow keeps a connection by spelling, also to a file that is gone."""
    return MlflowClient(f"sqlite:///{folder}/{'./' * next(_looks)}mlflow.db")


def test_from_the_alias_a_reader_reaches_the_base_model_all_data_and_each_loss_once(quickstart, stages, champion):
    client = client_of(quickstart.folder)
    version, *hops = walk(client, PIPELINE, client.get_model_version_by_alias(PIPELINE, "champion").version)
    assert Path(version["tags"]["posttrain.output"].removeprefix("file://")) == output(champion)
    assert [hop["stage"] for hop in hops] == ["dpo", "sft", "cpt", "base"]
    assert all(hop["data"] for hop in hops)
    lines = (output(champion).parent / "metrics.jsonl").read_text().splitlines()
    reported = [(line["step"], line["metrics"]["loss"]) for line in map(json.loads, lines)]
    assert [(step, value) for step, value, _ in hops[0]["metrics"]["loss"]] == reported


def test_weights_are_not_uploaded(quickstart, champion):
    assert not list(quickstart.folder.glob("mlruns/**/*.safetensors"))
    assert not list(quickstart.folder.glob("mlartifacts/**/*.safetensors"))


def test_a_label_is_found_upstream_and_downstream(quickstart, champion):
    lineage = json.loads(quickstart("lineage", "alias:champion", "--json").stdout)
    root = next(node for node in lineage["nodes"] if node["id"] == lineage["root"])
    assert root["labels"] == ["cc-by-sa-4.0"]
    assert root["aliases"] == ["champion"]
    impact = quickstart("impact", "label:cc-by-sa-4.0")
    assert impact.returncode == 0
    assert "champion" in impact.stdout
    artifacts = json.loads(quickstart("impact", "label:cc-by-sa-4.0", "--json").stdout)["artifacts"]
    registered = {each["stage"]: each["registered_version"] for each in artifacts}
    versions = client_of(quickstart.folder).search_model_versions(f"name = '{PIPELINE}'")
    numbers = {version.tags["posttrain.stage"]: int(version.version) for version in versions}
    assert registered == {**dict.fromkeys(("corpus", "evaluate")), **numbers}


def test_the_whole_record_is_intact_until_a_byte_changes(quickstart, stages, champion):
    result = quickstart("verify")
    assert result.returncode == 0, result.stdout
    weights = Path(champion["output"]) / "model.safetensors"
    original = weights.read_bytes()
    weights.chmod(0o644)
    weights.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
    try:
        for verb in (["verify"], ["verify", "alias:champion"]):
            result = quickstart(*verb)
            assert result.returncode == 1
            assert "model.safetensors has SHA-256" in result.stdout
        assert quickstart("verify", f"{PIPELINE}/sft").returncode == 0  # not of its ancestry
        result = quickstart("promote", f"{PIPELINE}/dpo", "--alias", "other", "--force")
        assert result.returncode == 1
        assert "model.safetensors has SHA-256" in result.stderr
        result = quickstart("run", "stages.evaluate.method.num_rows=8")
        assert result.returncode == 1
        assert "stage evaluate failed" in result.stderr
        assert "model.safetensors has SHA-256" in result.stderr
    finally:
        weights.write_bytes(original)
    assert quickstart("verify").returncode == 0


@pytest.mark.slow
def test_a_cluster_gives_the_same_bits_and_two_workers_the_same_trajectory(own):
    here = own.run("store=here", *ONLY_SFT)
    there = own.run(
        "store=there", *ONLY_SFT, "stages.cpt.resources.launcher=cluster",
        "stages.sft.resources.num_workers=2", "stages.sft.resources.micro_batch_size=4",
        "+stages.sft.evaluation={every_steps: 2, rows: 2, max_new_tokens: 4}",
    )  # fmt: skip
    assert here["cpt"]["fingerprint"] == there["cpt"]["fingerprint"]
    for name in ("model.safetensors", "tokenizer.json"):
        assert (output(here["cpt"]) / name).read_bytes() == (output(there["cpt"]) / name).read_bytes()
    assert losses(here["sft"]) == pytest.approx(losses(there["sft"]), abs=1e-4)
    scored = map(json.loads, (output(there["sft"]).parent / "evaluation.jsonl").read_text().splitlines())
    assert [(each["step"], each["error"]) for each in scored] == [(0, ""), (2, ""), (4, "")]  # by a task of Ray


@pytest.mark.slow  # of a data stage in test_prepare_data.py
def test_a_bad_row_is_named_before_anything_trains(own):
    bad = own.folder / "bad.jsonl"
    good = (own.folder / "preferences.jsonl").read_text().splitlines()
    bad.write_text("\n".join([*good[:7], '{"prompt": "p", "chosen": "c"}', *good[7:]]) + "\n")
    result = own("run", "store=bad", "sources.preferences.path=bad.jsonl")
    assert result.returncode == 2, result.stderr
    assert "bad.jsonl:8: no field 'rejected'" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (own.folder / "bad" / "cpt").exists()
