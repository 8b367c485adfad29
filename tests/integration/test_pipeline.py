"""The default pipeline in miniature, through Prefect and Ray, as a user runs it."""

import json
from pathlib import Path

import pytest

from tests.command import Command, family, wait_until, wait_until_gone
from tests.miniature import MODEL, STEPS, write_own_rows

STAGES = ["base", "corpus", "cpt", "dpo", "evaluate", "instructions", "preferences", "reward", "sft"]
ONLY_SFT = ("~stages.preferences", "~stages.reward", "~stages.dpo", "~stages.evaluate")


def output(row: dict) -> Path:
    return Path(row["output"])


def losses(row: dict) -> list[float]:
    lines = (output(row).parent / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["metrics"]["loss"] for line in lines]


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory) -> Command:
    return Command(tmp_path_factory.mktemp("quickstart"), *MODEL, *STEPS)


@pytest.fixture(scope="module")
def stages(quickstart) -> dict[str, dict]:
    return quickstart.run()


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Command:
    """A folder with a user's own rows in JSON Lines."""
    folder = tmp_path_factory.mktemp("own")
    return Command(folder, *MODEL, *STEPS, *write_own_rows(folder))


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


def test_a_second_run_trains_nothing_and_starts_no_flow(quickstart, stages):
    result = quickstart("run")
    assert result.returncode == 0
    assert "nothing to do: all 9 stages are finished" in result.stdout
    assert "| dpo " in result.stdout
    assert "Prefect" not in result.stderr
    assert {row["seconds"] for row in quickstart.run().values()} == {0.0}


def test_one_field_reruns_its_stage_and_evaluate(quickstart, stages):
    states = quickstart.states("stages.dpo.method.beta=0.2")
    assert sorted(name for name, state in states.items() if state == "run") == ["dpo", "evaluate"]
    assert set(quickstart.states("resources.num_workers=2", "resources.micro_batch_size=2").values()) == {"reuse"}


@pytest.mark.slow
def test_a_cluster_gives_the_same_bits_and_two_workers_the_same_trajectory(own):
    here = own.run("store=here", *ONLY_SFT)
    there = own.run(
        "store=there", *ONLY_SFT, "stages.cpt.resources.launcher=cluster",
        "stages.sft.resources.num_workers=2", "stages.sft.resources.micro_batch_size=4",
    )  # fmt: skip
    assert here["cpt"]["fingerprint"] == there["cpt"]["fingerprint"]
    for name in ("model.safetensors", "tokenizer.json"):
        assert (output(here["cpt"]) / name).read_bytes() == (output(there["cpt"]) / name).read_bytes()
    assert losses(here["sft"]) == pytest.approx(losses(there["sft"]), abs=1e-4)


@pytest.mark.slow
def test_a_killed_command_takes_its_ray_cluster_with_it(own):
    process = own.start(
        "run", "store=here", *ONLY_SFT, "stages.sft.method.num_steps=20000", "stages.sft.resources.launcher=cluster"
    )
    sft = own.folder / "here" / "sft"
    before = set(sft.glob("*/metrics.jsonl"))
    wait_until(lambda: any(path.stat().st_size for path in set(sft.glob("*/metrics.jsonl")) - before), "sft steps")
    started = family(process)
    assert any("raylet" in each.name() for each in started)
    process.kill()
    process.communicate(timeout=60)
    wait_until_gone(started)


@pytest.mark.slow
def test_lora_trains_every_stage_and_leaves_merged_models_with_their_adapters(own):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    rows = own.run("store=lora", "adapter=lora", "adapter.rank=4")
    for name in ("cpt", "sft", "reward", "dpo"):
        assert (output(rows[name]) / "adapter" / "adapter_model.safetensors").exists()
    assert losses(rows["dpo"])[0] == pytest.approx(0.693147, abs=1e-3)
    AutoModelForCausalLM.from_pretrained(output(rows["dpo"]))
    before, after = (load_file(output(rows[name]) / "model.safetensors") for name in ("sft", "dpo"))
    assert any(not before[key].equal(after[key]) for key in before)

    alone = own.run("store=lora", "adapter=lora", "adapter.rank=4", "save=adapter")
    for name in ("cpt", "sft", "reward", "dpo"):
        assert not (output(alone[name]) / "model.safetensors").exists()
        assert losses(alone[name]) == losses(rows[name])  # each on the base that it found, merged
    assert alone["evaluate"]["metrics"] == rows["evaluate"]["metrics"]
    assert own("verify", "store=lora").returncode == 0


@pytest.mark.slow
def test_ones_own_model_goes_in_by_its_directory(own):
    base = output(own.run("store=here", *ONLY_SFT)["base"])
    model = Command(own.folder, *STEPS, *own_sources(own), f"model={base}", "store=model")
    model_steps = [f"stages.{stage}.method.global_batch_size=8" for stage in ("cpt", "sft")]
    rows = model.run(*ONLY_SFT, *model_steps, *(f"stages.{stage}.method.max_length=32" for stage in ("cpt", "sft")))
    assert sorted(rows) == ["corpus", "cpt", "instructions", "sft"]
    manifest = json.loads((output(rows["cpt"]).parent / "manifest.json").read_text())
    assert manifest["inputs"]["policy"]["artifact"] == "source:base"


def own_sources(own: Command) -> list[str]:
    return [f"sources.{name}.path={own.folder / name}.jsonl" for name in ("corpus", "instructions", "preferences")]


def test_a_bad_row_is_named_before_anything_trains(own):
    bad = own.folder / "bad.jsonl"
    good = (own.folder / "preferences.jsonl").read_text().splitlines()
    bad.write_text("\n".join([*good[:7], '{"prompt": "p", "chosen": "c"}', *good[7:]]) + "\n")
    result = own("run", "store=bad", "sources.preferences.path=bad.jsonl")
    assert result.returncode == 2, result.stderr
    assert "bad.jsonl:8: no field 'rejected'" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (own.folder / "bad" / "cpt").exists()
